"""``megaspeed generate``: a few continuations of prompts, for eyes.

A prompt is the beginning of a document, and opens as the model saw documents open in its training
(``inference/opening.py``), which `--opening` may say otherwise: `nothing` for a prompt from within.
"""

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megaspeed.cli.model_options import add_model_options, add_opening, load_model
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    not_negative,
    positive,
    say,
    utf8_text,
    write_json,
)

if TYPE_CHECKING:
    from megaspeed.inference.generation import Continuation

_WIDTH = 100
"""Columns of the lines between samples where they do not go to a terminal."""

_TITLE_CHARACTERS = 40
"""Of a prompt, in the line above its sample; behind that it stands whole."""


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "continue prompts with a checkpoint's model"
    parser = commands.add_parser("generate", help=text, description=text)
    parser.set_defaults(run=run)
    add_model_options(parser)
    add_opening(parser, "nothing")
    parser.add_argument(
        "--prompt",
        action="append",
        type=utf8_text,
        metavar="TEXT",
        help="what to continue; may be given several times (a document's beginning)",
    )
    parser.add_argument(
        "--samples",
        type=positive,
        default=3,
        metavar="N",
        help="continuations of each prompt (3); one where the temperature is 0",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=100, metavar="N", help="tokens of each (100)"
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=0.8,
        metavar="T",
        help="what logits are divided by; 0 takes the likeliest token (0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=_not_negative,
        default=50,
        metavar="K",
        help="draw from the K likeliest tokens; 0 for all (50)",
    )
    parser.add_argument(
        "--seed", type=_not_negative, default=0, metavar="N", help="of all draws (0)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the continuations of each prompt as they are ready."""
    # Imported here: torch takes seconds, which `check` need not wait for.
    from megaspeed.checkpoint.errors import CheckpointError
    from megaspeed.inference.errors import InferenceError
    from megaspeed.inference.generation import generate
    from megaspeed.inference.sampling import Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    samples = options.samples if sampling.temperature else 1
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    written = []
    try:
        model = load_model(options, always_open=False)
        say(f"{model.checkpoint}")
        for continuation in generate(model, options.prompt or [""], samples, sampling):
            _show(continuation, console)
            written.append(asdict(continuation))
    except CheckpointError as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    except InferenceError as error:
        say(str(error), error=True)
        return EXIT_FAILED
    figures = {
        "checkpoint": str(model.checkpoint),
        "opening": model.opening,
        "sampling": asdict(sampling),
        "continuations": written,
    }
    write_json(options, figures)
    return EXIT_DONE


def _show(sample: "Continuation", console: Console) -> None:
    prompt = repr(_shortened(sample.prompt)) if sample.prompt else "a document's beginning"
    end = "ended by the model" if sample.ended else "cut"
    title = f"sample {sample.number} from {prompt}: {len(sample.ids):,} tokens, {end}"
    console.print(Rule(Text(title), align="left"))
    console.print(Text.assemble((sample.prompt, "bold"), sample.text), soft_wrap=True)


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= _TITLE_CHARACTERS else prompt[:_TITLE_CHARACTERS] + "..."


def _not_negative(text: str) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be a whole number, not {text!r}") from error
    if number < 0:
        raise argparse.ArgumentTypeError("it must be 0 or more")
    return number
