"""Check that transformers and megaspeed compute the same function from the same weights.

    prompt --transformers, in fp64--> logits --+
           --megaspeed, in fp64-----> logits --+-- is the largest difference within the tolerance?

Both run on the CPU, one after the other, so only one model is in memory. In fp32, rounding would
hide mistakes: if weights are small, attention hardly depends on q and k, even if their rows are in
the wrong order. These are differences of logits in fp64, divided by the largest logit:

    right   width 64 to 512, 2 to 24 blocks, weights of 0.006 to 0.15      at most 7e-14
    TOLERANCE                                                               1e-10
    wrong   width 32, weights of 0.006: the exact GELU instead of tanh's    2.0e-8
            rotary base a tenth too large                                   2.5e-6
            k before q, or rows of both for neighbouring pairs              at least 3.1e-5
            weights of 0.02 and more: any mistake in the tests              at least 3.0e-6
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megaspeed.checkpoint.reading import load_model
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.config.model import ModelConfig
from megaspeed.files.durable import new_folder
from megaspeed.files.paths import free_bytes, nearest_existing
from megaspeed.hugging_face.tokenizer import quiet_transformers
from megaspeed.hugging_face.weights import ComputationError, HuggingFaceError

TOLERANCE = 1e-10
"""Largest difference of two logits, as a fraction of the largest logit."""

LENGTH = 512
"""Tokens of the prompt, at most the model's positions."""

_GOLDEN = (math.sqrt(5) - 1) / 2


class Disagreement(ComputationError):
    """transformers and megaspeed do not compute the same function from the same weights."""


@dataclass(frozen=True)
class Agreement:
    """How well two implementations agree."""

    difference: float  # largest of logits in fp64, over all positions and token ids
    tolerance: float  # the limit of ``difference``
    tokens: int  # of the prompt

    def __str__(self) -> str:
        return (
            f"verified: the logits of {self.tokens} tokens differ by at most {self.difference:.2g} "
            f"in fp64 (limit {self.tolerance:.2g})"
        )


@contextmanager
def new_model_folder(
    out: Path, model: ModelConfig, size_bytes: int, *, verify: bool
) -> Iterator[Path]:
    """An empty folder for the files of a model, which gets the name ``out`` after the block.

    Raises HuggingFaceError if there is too little disk or, to verify, too little memory.
    """
    above = nearest_existing(out)
    if not above.is_dir():
        raise HuggingFaceError(
            f"{out} cannot be created, because {above} is a file; name a path in a folder"
        )
    if free_bytes(out) < size_bytes:
        raise HuggingFaceError(
            f"{out} needs {size_bytes:,} bytes, but its disk has {free_bytes(out):,} free; make "
            "room, or use another disk"
        )
    if verify:
        check_memory(model)
    with new_folder(out) as writing:
        yield writing


def compare(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype = torch.float32, strict: bool = False
) -> Agreement:
    """Compare a checkpoint with a Hugging Face model.

    Args:
        checkpoint: our model.
        folder: their model.
        dtype: the dtype of their weights, to which ours are rounded before the comparison.
        strict: whether it is an error if their files have a tensor that transformers does not use.

    Raises:
        Disagreement: the two models compute different logits.
        HuggingFaceError: transformers cannot load ``folder``.
    """
    config = RunState.read(checkpoint).model_section()
    prompt = _spread_ids(config.vocab_size, _length(config))
    stock = load_transformers_model(folder, strict=strict)
    if config.num_experts is not None:  # transformers' default kernel refuses fp64
        stock.set_experts_implementation("eager")
    # Only parameters. The rotary frequencies stay in fp32, as in every implementation.
    for parameter in stock.parameters():  # one at a time; a tied one is listed once
        parameter.data = parameter.data.double()
    with _StayDouble(), torch.no_grad():
        theirs: Tensor = stock(prompt[None], use_cache=False).logits[0]
    del stock
    gc.collect()
    model = load_model(checkpoint)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    with torch.no_grad():
        ours: Tensor = model.double()(prompt[None])[0]
    return _agreement(ours, theirs)


def _agreement(ours: Tensor, theirs: Tensor) -> Agreement:
    """Compare logits (S, V). Raises Disagreement if the difference is too large."""
    largest, difference = float(theirs.abs().max()), float((ours - theirs).abs().max())
    if not math.isfinite(largest):
        raise Disagreement(
            f"logits must be finite to be compared, but transformers computes {largest} from these "
            "weights; nothing was written. Use another model, or omit the comparison with "
            "--no-verify"
        )
    tolerance = TOLERANCE * largest
    if not difference <= tolerance:  # true for NaN
        raise Disagreement(
            f"transformers and megaspeed disagree: on a prompt of {len(theirs)} tokens their "
            f"logits differ by {difference:.3g} in fp64, but rounding explains only "
            f"{tolerance:.3g} (the largest logit is {largest:.3g}). The weights are not mapped "
            "correctly; nothing was written."
        )
    return Agreement(difference, tolerance, len(theirs))


def check_memory(config: ModelConfig) -> None:
    """Raise HuggingFaceError if memory has no room for a model in fp64 and the logits of both."""
    parameters = sum(map(math.prod, expected_shapes(config).values()))
    needed_bytes = 8 * (parameters + 3 * _length(config) * config.vocab_size)
    free = available_memory_bytes()
    if free < needed_bytes:
        raise HuggingFaceError(
            f"comparing both implementations takes about {needed_bytes:,} bytes of memory, but "
            f"{free:,} are available; omit the comparison with --no-verify"
        )


def available_memory_bytes() -> int:
    """Memory that processes can get without swapping."""
    free: int = psutil.virtual_memory().available
    return free


def load_transformers_model(folder: Path, *, strict: bool) -> Any:
    """Load a folder with transformers' AutoModelForCausalLM, on the CPU, in evaluation mode.

    Args:
        folder: a folder with config.json and weights.
        strict: whether it is an error if the files have a tensor that the model does not use.

    Raises:
        HuggingFaceError: transformers cannot load it, or a tensor of the model is missing.
    """
    with quiet_transformers():
        try:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises many kinds
            raise HuggingFaceError(f"transformers cannot load {folder}: {error}") from error
    problems = {
        "does not have": loading["missing_keys"],
        "has in another shape": loading["mismatched_keys"],
        "also has": loading["unexpected_keys"] if strict else (),
    }
    found = [
        f"{what} {', '.join(sorted(map(str, keys)))}" for what, keys in problems.items() if keys
    ]
    if found:
        raise HuggingFaceError(
            f"{folder} must have the tensors of its model, but it {'; '.join(found)}; "
            "save the model again with save_pretrained"
        )
    return model.eval()


class _StayDouble(TorchFunctionMode):
    """Keeps fp64 tensors in fp64 if code asks to convert them to fp32.

    transformers 5.23 rounds to fp32 within LlamaRMSNorm (modeling_llama.py, ``forward``), whatever
    the dtype of the model. Without this mode, fp64 would be no more exact than fp32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(map(_doubled, args))
            kwargs = {name: _doubled(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _length(config: ModelConfig) -> int:
    return min(LENGTH, config.max_position_embeddings)


def _spread_ids(vocab_size: int, count: int) -> Tensor:
    """Ids (count,) from all parts of the vocabulary, each far from the one before.

    The multiples of the golden ratio, modulo 1, are spread evenly, for any count.
    """
    return torch.tensor([int(vocab_size * (_GOLDEN * i % 1)) for i in range(1, count + 1)])
