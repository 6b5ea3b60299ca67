"""Whether transformers and megaspeed compute the same from the same weights.

    prompts --transformers--> logits --+
            --megaspeed-----> logits --+-- largest difference within the tolerance?
    prompt  --transformers, greedily--> tokens --megaspeed--> is each of them its choice, too?

Both compute in fp32 on the CPU, one after the other, so that one model is in memory at a time. What
is right differs by rounding alone; rows of q and k in another order differ by far more, but a loose
tolerance or the mean of the differences would let them pass.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.checkpoint.whole_model import load_whole_model, model_config
from megaspeed.config import ModelConfig
from megaspeed.hugging_face.errors import Disagreement
from megaspeed.hugging_face.room import check_memory
from megaspeed.hugging_face.stock import load_stock
from megaspeed.model import GPT

LENGTHS = (1, 16, 128, 512)
"""Of the prompts, tokens; a longer one than the model takes is as long as it takes."""

GREEDY_TOKENS = 64
"""Tokens continued; fewer where the model takes fewer."""

_GREEDY_PROMPT = 16
_ABSOLUTE, _RELATIVE = 1e-4, 2e-6
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Agreement:
    """How well two implementations agree.

    Attributes:
        difference: the largest of two logits, over all prompts, positions and words.
        tolerance: what it must not exceed.
        prompts: how long each was.
        tokens: how many were chosen alike.
    """

    difference: float
    tolerance: float
    prompts: tuple[int, ...]
    tokens: int

    def __str__(self) -> str:
        return (
            f"verified: logits of {len(self.prompts)} prompts of up to {max(self.prompts)} tokens "
            f"differ by at most {self.difference:.2g} (limit {self.tolerance:.2g}), and "
            f"{self.tokens} greedy tokens are the same"
        )


def compare(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype = torch.float32, strict: bool = False
) -> Agreement:
    """Compares a checkpoint with a Hugging Face model.

    Args:
        checkpoint: one of ours.
        folder: theirs.
        dtype: to which our weights are rounded before, because theirs were.
        strict: whether theirs must have no tensor that transformers does not expect.

    Raises:
        Disagreement: they are not the same function.
        HuggingFaceError: transformers cannot load ``folder``.
    """
    config = model_config(checkpoint)
    prompts = _prompts(config)
    greedy = min(_GREEDY_PROMPT, config.max_position_embeddings)
    wanted = min(GREEDY_TOKENS, config.max_position_embeddings - greedy)
    stock = load_stock(folder, strict=strict)
    theirs = [stock.logits(prompt) for prompt in prompts]
    text = stock.continued(_spread_ids(config.vocab_size, greedy), wanted)
    del stock
    gc.collect()
    model = load_whole_model(checkpoint)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    difference, tolerance = _compare_logits(model, prompts, theirs)
    _compare_choices(model, text, greedy, tolerance)
    return Agreement(difference, tolerance, tuple(map(len, prompts)), wanted)


def check_room(config: ModelConfig) -> None:
    """Raises HuggingFaceError where memory does not hold a model and the logits of both."""
    parameters = sum(map(math.prod, expected_shapes(config).values()))
    logits = sum(_lengths(config)) * config.vocab_size
    # The logits of one implementation are kept, the other's are there one prompt at a time.
    check_memory(4 * (parameters + 3 * logits), "go on without it by --no-verify")


def _lengths(config: ModelConfig) -> list[int]:
    return sorted({min(length, config.max_position_embeddings) for length in LENGTHS})


def _prompts(config: ModelConfig) -> list[Tensor]:
    return [_spread_ids(config.vocab_size, length) for length in _lengths(config)]


def _spread_ids(vocab_size: int, count: int) -> Tensor:
    """Ids all over the vocabulary, neighbours far from each other: (count,).

    The multiples of the golden ratio, modulo 1, are spread evenly however many there are.
    """
    return torch.tensor([int(vocab_size * (_GOLDEN * i % 1)) for i in range(1, count + 1)])


@torch.no_grad()
def _compare_logits(
    model: GPT, prompts: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[float, float]:
    """(largest difference, tolerance) where the one is within the other."""
    largest = max(float(logits.abs().max()) for logits in theirs)
    tolerance = max(_ABSOLUTE, _RELATIVE * largest)
    differences = []
    for prompt, expected in zip(prompts, theirs, strict=True):
        difference = float((model(prompt[None])[0] - expected).abs().max())
        differences.append(difference)
        if not difference <= tolerance:  # true for NaN
            raise Disagreement(
                f"transformers and megaspeed disagree: on a prompt of {len(prompt)} tokens their "
                f"logits differ by {difference:.3g}, and rounding explains {tolerance:.3g} (the "
                f"largest logit is {largest:.3g}). The weights were not mapped as they should be; "
                "nothing was written."
            )
    return max(differences), tolerance


@torch.no_grad()
def _compare_choices(model: GPT, text: Tensor, prompt: int, tolerance: float) -> None:
    """Whether each token of ``text`` after the prompt is the model's own greedy choice.

    Of two words whose logits are nearer to each other than rounding tells, either is one.
    """
    if len(text) == prompt:
        return
    logits = model(text[None, :-1])[0, prompt - 1 :]  # (tokens, V)
    chosen = text[prompt:]
    behind = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    wrong = torch.nonzero(~(behind <= 2 * tolerance))
    if len(wrong):
        at = int(wrong[0])
        raise Disagreement(
            f"transformers and megaspeed disagree: greedy token {at + 1} of {len(chosen)} is "
            f"{int(chosen[at])} there and {int(logits[at].argmax())} here, and rounding does not "
            "explain it. Nothing was written."
        )
