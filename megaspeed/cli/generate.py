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
    from megaspeed.hugging_face.text_model import Continuation

_WIDTH = 100
"""Columns of the lines between samples if stdout is not a terminal."""

_TITLE_CHARACTERS = 40
"""Largest number of a prompt's characters in the line above its sample."""


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "continue prompts with a model"
    parser = add_parser(commands, "generate", partial(exit_code, _generate), text)
    add_model_options(parser, "nothing")
    parser.add_argument(
        "--prompt",
        action="append",
        type=utf8_text,
        metavar="TEXT",
        help="the text to continue; can be repeated (default: the beginning of a document)",
    )
    parser.add_argument(
        "--samples",
        type=positive,
        default=3,
        metavar="N",
        help="continuations of each prompt (default: 3; always 1 if the temperature is 0)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=100,
        metavar="N",
        help="largest number of tokens of each (default: 100)",
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=0.8,
        metavar="T",
        help="logits are divided by it; 0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=_not_negative,
        default=50,
        metavar="K",
        help="draw from the K likeliest tokens; 0 for all (default: 50)",
    )
    parser.add_argument(
        "--top-p",
        type=_probability,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens with a probability of P together (default: 1, all)",
    )
    parser.add_argument(
        "--seed", type=_not_negative, default=0, metavar="N", help="seed of all draws (default: 0)"
    )


def _generate(options: argparse.Namespace) -> None:
    """Prints each continuation as soon as it is computed."""
    # Imported here, because torch takes seconds to load, and `check` does not need it.
    from megaspeed.hugging_face.text_model import Sampling, continue_prompt

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
    prompt = repr(_shortened(sample.prompt)) if sample.prompt else "a document's beginning"
    end = "ended by the model" if sample.ended else "cut"
    title = f"sample {sample.number} from {prompt}: {len(sample.ids):,} tokens, {end}"
    console.print(Rule(Text(title), align="left"))
    console.print(Text.assemble((sample.prompt, "bold"), sample.text), soft_wrap=True)


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= _TITLE_CHARACTERS else prompt[:_TITLE_CHARACTERS] + "..."


def _probability(text: str) -> float:
    number = not_negative(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError("it must be more than 0 and at most 1")
    return number


def _not_negative(text: str) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be a whole number, not {text!r}") from error
    if number < 0:
        raise argparse.ArgumentTypeError("it must be 0 or more")
    return number
