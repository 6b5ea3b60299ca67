"""``megaspeed generate``: prints some continuations of prompts.

A prompt is the beginning of a document. Use ``--opening nothing`` for one from within a document.
"""

import argparse
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megaspeed.cli.model_options import add_model_options, exit_code, load_model
from megaspeed.cli.options import add_parser, not_negative, positive, say, utf8_text, write_json

if TYPE_CHECKING:
    from megaspeed.hugging_face.generation import Continuation

_WIDTH = 100
"""Columns of the lines between samples if stdout is not a terminal."""

_TITLE_CHARACTERS = 40
"""Largest number of a prompt's characters in the line above its sample."""


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    text = "continue prompts with a model"
    parser = add_parser(commands, "generate", partial(exit_code, _generate), text)
    add_model_options(parser, "nothing")
    text = "the text to continue; can be repeated (default: the beginning of a document)"
    parser.add_argument("--prompt", action="append", type=utf8_text, metavar="TEXT", help=text)
    for name, kind, metavar, default, text in (
        ("--samples", positive, "N", 3, "continuations of each prompt; always 1 if T is 0"),
        ("--max-tokens", positive, "N", 100, "largest number of tokens of each"),
        ("--temperature", not_negative, "T", 0.8, "logits are divided by it; 0: likeliest token"),
        ("--top-k", _count, "K", 50, "draw from the K likeliest tokens; 0 for all"),
        ("--top-p", _share, "P", 1.0, "draw from the likeliest with a probability of P together"),
        ("--seed", _count, "N", 0, "seed of all draws"),
    ):
        text += " (default: %(default)s)"
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def _generate(options: argparse.Namespace) -> None:
    """Print each continuation as soon as it is computed."""
    # Imported here, because torch takes seconds to load, and ``check`` does not need it.
    from megaspeed.hugging_face.generation import Sampling, continue_prompt

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    model = load_model(options, always_open=False)
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


def _share(text: str) -> float:
    number = not_negative(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError("it must be more than 0 and at most 1")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it must be a whole number, 0 or more, not {text!r}")
    return int(text)
