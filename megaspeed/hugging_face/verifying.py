"""Whether transformers and megaspeed compute the same from the same weights.

    fp32  prompts --transformers--> logits --+
                  --megaspeed-----> logits --+-- largest difference within the tolerance?
    fp64  prompt  --both, as above--------------- within a far smaller one?
    fp64  prompt  --transformers, greedily--> tokens --megaspeed--> is each of them its choice, too?

On the CPU, one after the other, so that one model is in memory at a time. fp32 is how models are
used. But where weights are small, q and k hardly matter, and their rows in another order change the
logits by no more than fp32 rounds away. In fp64 the two are far apart, in parts of the largest
logit:

    right   width 64 to 512, 2 to 24 blocks, weights of 0.006 to 0.15      7e-14 and less
    LIMIT                                                                   1e-10
    wrong   width 32, weights of 0.006: the exact GELU for tanh's           2.0e-8
            rotary base a tenth too large                                   2.5e-6
            k before q, or rows of both for neighbouring pairs              3.1e-5 and more
            weights of 0.02 and more: any mistake that tests make           3.0e-6 and more
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaspeed.checkpoint.reading import load_model, model_config
from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face.errors import Disagreement
from megaspeed.hugging_face.free_space import check_memory
from megaspeed.hugging_face.transformers_model import load_transformers_model
from megaspeed.model.gpt import GPT

LENGTHS = (1, 16, 128, 512)
"""Of the prompts in fp32, tokens; a longer one than the model takes is as long as it takes."""

DOUBLE_LENGTH = 128
"""Of the prompt in fp64, likewise."""

GREEDY_TOKENS = 64
"""Tokens continued; fewer where the model takes fewer."""

_GREEDY_PROMPT = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Limit:
    """By how much logits may differ in some precision."""

    precision: str
    absolute: float
    relative: float

    def of(self, largest: float) -> float:
        """The limit where that is the largest of them."""
        return max(self.absolute, self.relative * largest)


SINGLE = Limit("fp32", absolute=1e-4, relative=2e-6)
DOUBLE = Limit("fp64", absolute=0.0, relative=1e-10)


@dataclass(frozen=True)
class Agreement:
    """How well two implementations agree.

    Attributes:
        difference: the largest of two logits in fp32, over all prompts, positions and words.
        tolerance: what it must not exceed.
        double_difference: the same in fp64, of one prompt.
        double_tolerance: what that must not exceed.
        prompts: how long each was.
        tokens: how many were chosen alike.
    """

    difference: float
    tolerance: float
    double_difference: float
    double_tolerance: float
    prompts: tuple[int, ...]
    tokens: int

    def __str__(self) -> str:
        return (
            f"verified: logits of {len(self.prompts)} prompts of up to {max(self.prompts)} tokens "
            f"differ by at most {self.difference:.2g} (limit {self.tolerance:.2g}), in fp64 by "
            f"{self.double_difference:.2g} (limit {self.double_tolerance:.2g}), and "
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
    prompts = [_spread_ids(config.vocab_size, length) for length in _lengths(config)]
    in_double = _spread_ids(config.vocab_size, _at_most(config, DOUBLE_LENGTH))
    greedy = _at_most(config, _GREEDY_PROMPT)
    wanted = min(GREEDY_TOKENS, config.max_position_embeddings - greedy)
    stock = load_transformers_model(folder, strict=strict)
    theirs = [stock.logits(prompt) for prompt in prompts]
    stock.to_double()
    theirs_in_double = stock.logits(in_double)
    text = stock.continued(_spread_ids(config.vocab_size, greedy), wanted)
    del stock
    gc.collect()
    model = load_model(checkpoint)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    single = _compare_logits(model, prompts, theirs, SINGLE)
    double = _compare_logits(model.double(), [in_double], [theirs_in_double], DOUBLE)
    _compare_choices(model, text, greedy, double[1])
    return Agreement(*single, *double, tuple(map(len, prompts)), wanted)


def check_room(config: ModelConfig) -> None:
    """Raises HuggingFaceError where memory does not hold a model in fp64 and the logits of both."""
    parameters = sum(map(math.prod, expected_shapes(config).values()))
    # The logits of one implementation are kept, the other's are there one prompt at a time.
    single = 3 * sum(_lengths(config)) * config.vocab_size
    double = 3 * _at_most(config, DOUBLE_LENGTH) * config.vocab_size
    check_memory(8 * (parameters + double) + 4 * single, "go on without it by --no-verify")


def _at_most(config: ModelConfig, length: int) -> int:
    return min(length, config.max_position_embeddings)


def _lengths(config: ModelConfig) -> list[int]:
    return sorted({_at_most(config, length) for length in LENGTHS})


def _spread_ids(vocab_size: int, count: int) -> Tensor:
    """Ids all over the vocabulary, neighbours far from each other: (count,).

    The multiples of the golden ratio, modulo 1, are spread evenly however many there are.
    """
    return torch.tensor([int(vocab_size * (_GOLDEN * i % 1)) for i in range(1, count + 1)])


@torch.no_grad()
def _compare_logits(
    model: GPT, prompts: Sequence[Tensor], theirs: Sequence[Tensor], limit: Limit
) -> tuple[float, float]:
    """(largest difference, tolerance) where the one is within the other."""
    largest = float(torch.stack([logits.abs().max() for logits in theirs]).max())
    if not math.isfinite(largest):  # of these no difference tells anything
        raise Disagreement(
            f"transformers computes logits that are no numbers ({largest}) from these weights, so "
            "that nothing can be compared; nothing was written. Take another model, or go on "
            "without it by --no-verify"
        )
    tolerance = limit.of(largest)
    differences = []
    for prompt, expected in zip(prompts, theirs, strict=True):
        difference = float((model(prompt[None])[0] - expected).abs().max())
        differences.append(difference)
        if not difference <= tolerance:  # true for NaN
            raise Disagreement(
                f"transformers and megaspeed disagree: on a prompt of {len(prompt)} tokens their "
                f"logits differ by {difference:.3g} in {limit.precision}, and rounding explains "
                f"{tolerance:.3g} (the largest logit is {largest:.3g}). The weights were not "
                "mapped as they should be; nothing was written."
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
    wrong = torch.nonzero(~(behind <= 2 * tolerance))  # true for NaN
    if len(wrong):
        at = int(wrong[0])
        raise Disagreement(
            f"transformers and megaspeed disagree: greedy token {at + 1} of {len(chosen)} is "
            f"{int(chosen[at])} there and {int(logits[at].argmax())} here, and rounding does not "
            "explain it; nothing was written."
        )
