"""Options of the commands that compute with a checkpoint's model, and the model that they name."""

import argparse
from typing import TYPE_CHECKING

from megaspeed.cli.options import new_file, say
from megaspeed.files.paths import path_argument

if TYPE_CHECKING:
    from megaspeed.inference.text_model import TextModel


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint``, ``--tokenizer``, ``--device``, ``--dtype`` and ``--json``."""
    parser.add_argument(
        "--checkpoint",
        type=path_argument,
        required=True,
        metavar="DIR",
        help="a checkpoint; or a folder of them or of a run: the newest whole one",
    )
    parser.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="PATH",
        help="a tokenizer.json, or a folder with one (the checkpoint's own)",
    )
    parser.add_argument(
        "--device",
        type=_device,
        metavar="cpu|cuda",
        help="where to compute (cuda where there is one)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the weights and of the computation (float32)",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")


def add_opening(parser: argparse.ArgumentParser, *others: str) -> None:
    """``--opening``.

    Args:
        parser: of the command.
        others: what may open a document, beside what every command can put before it.
    """
    parser.add_argument(
        "--opening",
        choices=("auto", "end-of-text", "tokenizer", *others),
        default="auto",
        help="what stands before a document: an end-of-text, what the tokenizer's template puts "
        "before a text, or what the model was trained with: end-of-text if here, the template's "
        "if it was imported (auto)",
    )


def load_model(options: argparse.Namespace, *, always_open: bool) -> "TextModel":
    """The model of ``--checkpoint`` with its tokenizer; says on stderr what opens a document.

    Args:
        options: of the command.
        always_open: whether an end-of-text opens a document where nothing else does.

    Raises:
        CheckpointError: no checkpoint is whole.
        DataError: there is no tokenizer that fits.
    """
    import torch

    from megaspeed.inference.opening import Opening
    from megaspeed.inference.text_model import load_text_model

    return load_text_model(
        options.checkpoint,
        tokenizer=None if options.tokenizer is None else str(options.tokenizer),
        opening=Opening(options.opening),
        always_open=always_open,
        device=torch.device(options.device or _best_device()),
        dtype=getattr(torch, options.dtype),
        tell=lambda text: say(text, error=True),
    )


def _device(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"it is cpu or cuda, not {name!r}")
    if name == "cuda" and _best_device() != "cuda":
        raise argparse.ArgumentTypeError("there is no GPU that torch can use; take cpu")
    return name


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
