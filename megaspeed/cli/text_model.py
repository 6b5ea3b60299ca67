"""``megaspeed generate`` and ``megaspeed evaluate``: what a trained model writes and predicts.

    megaspeed generate --checkpoint DIR [--prompt TEXT] ...      continuations of prompts
    megaspeed evaluate --checkpoint DIR FILE ...                 loss, perplexity, bits per byte

A prompt is the beginning of a document. Both commands run on a GPU if there is one.
"""

import argparse
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megaspeed.bar_or_lines import BarOrLines
from megaspeed.cli.hugging_face import add_precision, add_tokenizer, exit_code
from megaspeed.cli.options import (
    add_parser,
    add_values,
    not_negative,
    positive,
    say,
    utf8_text,
    write_json,
)
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.errors import DataError
from megaspeed.files.json_values import picked
from megaspeed.files.paths import path_argument

if TYPE_CHECKING:
    from megaspeed.hugging_face.text_model import Continuation, TextModel

_WIDTH = 100
"""Columns of the lines between samples if stdout is not a terminal."""

_TITLE_CHARACTERS = 40
"""Largest number of a prompt's characters in the line above its sample."""


def add_to(commands: Any) -> None:
    """Add both commands and their options."""
    text = "continue prompts with a model"
    generate = add_parser(commands, "generate", partial(exit_code, _generate), text)
    text = "the text to continue; can be repeated (default: the beginning of a document)"
    generate.add_argument("--prompt", action="append", type=utf8_text, metavar="TEXT", help=text)
    add_values(
        generate,
        ("--samples", positive, "N", 3, "continuations of each prompt (3); always 1 if T is 0"),
        ("--max-tokens", positive, "N", 100, "largest number of tokens of each (100)"),
        ("--temperature", not_negative, "T", 0.8, "logits are divided by it (0.8); 0: likeliest"),
        ("--top-k", _count, "K", 50, "draw from the K likeliest tokens (50); 0 for all"),
        ("--seed", _count, "N", 0, "seed of all draws (0)"),
    )
    text = "measure how well a model predicts text"
    evaluate = add_parser(commands, "evaluate", partial(exit_code, _evaluate), text)
    add_text_options(evaluate)
    text = "tokens that the model sees at once (default: its limit)"
    add_values(evaluate, ("--sequence-length", positive, "N", None, text))
    for parser in (generate, evaluate):
        text = "a checkpoint, or the folder of a run (its newest checkpoint)"
        add_values(parser, ("--checkpoint", path_argument, "DIR", ..., text))
        add_tokenizer(parser)
        add_precision(parser, "precision of the weights and of the computation (float32)")


def _load(options: argparse.Namespace) -> "TextModel":
    # Imported here, because torch takes seconds to load, and ``check`` does not need it.
    from megaspeed.hugging_face.text_model import load_text_model

    return load_text_model(
        options.checkpoint,
        tokenizer=options.tokenizer,
        precision=options.dtype,
        report=lambda text: say(text, error=True),
    )


def _generate(options: argparse.Namespace) -> None:
    """Print each continuation as soon as it is computed."""
    from megaspeed.hugging_face.text_model import Sampling, continue_prompt

    sampling = Sampling(**picked(options, "temperature", "top_k", "max_tokens", "seed"))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    model = _load(options)
    say(f"{model.source}")
    written = []
    for prompt in options.prompt or [""]:
        for number in range(1, 1 + (options.samples if sampling.temperature else 1)):
            continuation = continue_prompt(model, prompt, number, sampling)
            _show(continuation, console)
            written.append(asdict(continuation))
    figures = {
        "checkpoint": str(model.source),
        "opening": model.opening,
        "sampling": asdict(sampling),
        "continuations": written,
    }
    write_json(options, figures)


def _show(sample: "Continuation", console: Console) -> None:
    prompt = sample.prompt[:_TITLE_CHARACTERS]
    if prompt != sample.prompt:
        prompt += "..."
    begins = repr(prompt) if prompt else "a document's beginning"
    end = "ended by the model" if sample.ended else "cut"
    title = f"sample {sample.number} from {begins}: {len(sample.ids):,} tokens, {end}"
    console.print(Rule(Text(title), align="left"))
    console.print(Text.assemble((sample.prompt, "bold"), sample.text), soft_wrap=True)


def _evaluate(options: argparse.Namespace) -> None:
    """Print loss, perplexity and bits per byte of all files together."""
    from megaspeed.hugging_face.perplexity import evaluate

    files = text_files(options)
    model = _load(options)
    length = options.sequence_length or model.positions
    if length > model.positions:
        raise DataError(
            f"--sequence-length {length} must be at most the model's max_position_embeddings "
            f"{model.positions}; lower or omit it"
        )
    with BarOrLines(0) as bar:
        score = evaluate(
            model,
            (piece for file in files for piece in file.pieces()),
            length=length,
            watch=lambda so_far: bar.show(
                so_far.tokens, f"{so_far.tokens:,} tokens, loss {so_far.loss:.4f}"
            ),
        )
    figures = {
        "checkpoint": str(model.source),
        "dtype": options.dtype,
        "opening": list(model.opening),
        "sequence_length": length,
        "files": len(files),
        "documents": score.documents,
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }
    for name, figure in figures.items():
        say(f"{name.replace('_', ' '):16}{_text(figure)}")
    write_json(options, figures)


def _text(figure: object) -> str:
    if isinstance(figure, float):
        return f"{figure:.4f}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it must be a whole number, 0 or more, not {text!r}")
    return int(text)
