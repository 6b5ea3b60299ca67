"""Options of the commands that compute with a checkpoint's model, and the model that they name."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megaspeed.cli.common_options import new_file
from megaspeed.cli.output import say

if TYPE_CHECKING:
    from megaspeed.inference.text_model import TextModel


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint``, ``--tokenizer``, ``--device``, ``--dtype`` and ``--json``."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="a checkpoint; or a folder of them or of a run: the newest whole one",
    )
    parser.add_argument(
        "--tokenizer",
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


def load_model(options: argparse.Namespace) -> "TextModel":
    """The model of ``--checkpoint`` with its tokenizer.

    Raises:
        CheckpointError: no checkpoint is whole.
        DataError: there is no tokenizer that fits.
    """
    import torch

    from megaspeed.inference.text_model import load_text_model

    return load_text_model(
        options.checkpoint,
        tokenizer=options.tokenizer,
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
