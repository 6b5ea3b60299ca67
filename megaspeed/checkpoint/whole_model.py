"""The model of a checkpoint, whole, in a process that is no rank of a run.

    what a user names --checkpoint_named--> checkpoint --load_whole_model--> GPT, ready to compute

No process group, no optimizer, no layout: the files hold every tensor whole under its own name.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import locate
from megaspeed.checkpoint.loading import read_pieces_alone
from megaspeed.checkpoint.pieces import Piece
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.soundness import problems_of
from megaspeed.checkpoint.tensors import WEIGHTS, key
from megaspeed.checkpoint.tokenizer_files import TOKENIZER
from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.tensor_parallel.parallelize import materialize


def checkpoint_named(place: Path, tell: Callable[[str], None] = lambda problem: None) -> Path:
    """The newest checkpoint that is whole, of what a user names; reads every byte of it.

    Args:
        place: a checkpoint, a folder of checkpoints, or the folder of a run.
        tell: is told of each newer one that is passed over, and of what is wrong with it.

    Raises:
        CheckpointError: there is none.
    """
    broken: list[str] = []
    for checkpoint in locate(place):
        problems = problems_of(checkpoint)
        if not problems:
            for problem in broken:
                tell(f"passed over {problem}")
            return checkpoint
        broken.append(f"{checkpoint}: {'; '.join(problems)}")
    told = "".join(f"\n  {problem}" for problem in broken)
    raise CheckpointError(f"{place} holds no checkpoint that is whole{told}")


def model_config(checkpoint: Path) -> ModelConfig:
    """Of the model whose tensors a checkpoint holds.

    Raises:
        CheckpointError: its run state cannot be read, or names no model.
    """
    return RunState.read(checkpoint).model_section()


def load_whole_model(
    checkpoint: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPT:
    """The model with the checkpoint's master weights, in evaluation mode and without gradients.

    In fp32 on the CPU the files are read straight into the parameters; elsewhere through one saved
    rectangle at a time. A tied head is the embedding.

    Args:
        checkpoint: one that is whole (`checkpoint_named`).
        device: where the parameters go.
        dtype: their dtype.

    Raises:
        CheckpointError: it cannot be read.
    """
    config = model_config(checkpoint)
    with torch.device("meta"):
        model = GPT(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    materialize(
        model,
        lambda name: torch.empty(shapes[name], dtype=dtype, device=device),
        device=torch.device(device),
        dtype=dtype,
    )
    model.requires_grad_(False)
    # A tied head is among them once, as the embedding: the name under which it was saved.
    weights = dict(model.named_parameters())
    read_pieces_alone(checkpoint, [_whole(name, weight) for name, weight in weights.items()])
    return model.eval()


def saved_tokenizer(checkpoint: Path) -> Path | None:
    """The folder of the tokenizer files that a checkpoint carries; None where it has none."""
    return checkpoint if (checkpoint / TOKENIZER).is_file() else None


def _whole(name: str, weight: Tensor) -> Piece:
    return Piece(key(WEIGHTS, name), tuple(weight.shape), (0,) * weight.dim(), weight)
