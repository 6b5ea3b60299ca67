"""What one rank holds: bytes, and gathered parameters."""

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from megaspeed.measurement.watched_step import held_gradients
from tests.zero.one_rank import OneRank


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of memory behind these tensors. Shared memory counts once."""
    memory = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())


def state_tensors(rank: OneRank) -> list[Tensor]:
    """Return AdamW's two moments."""
    states = rank.optimizer.optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def is_gathered(parameter: Any) -> bool:
    return parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE or parameter.data.numel() > 0


def gradient_bytes_between_micro_batches(rank: OneRank) -> list[int]:
    """Return a list of held bytes. Each backward adds an entry, except the last one of a step."""
    held: list[int] = []
    backward = rank.engine.backward

    def watched(*args: Any) -> None:
        backward(*args)
        if args[-1] != "step":
            held.append(bytes_of(held_gradients(rank.engine)))

    rank.engine.backward = watched  # type: ignore[method-assign, assignment]
    return held
