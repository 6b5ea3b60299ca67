"""Checks that transformers and megaspeed compute the same function from the same weights.

    fp32  prompts --transformers--> logits --+
                  --megaspeed-----> logits --+-- is the largest difference within the tolerance?
    fp64  prompt  --both, as above--------------- is it within a much smaller tolerance?
    fp64  prompt  --transformers, greedily--> tokens --megaspeed--> does it choose each of them?

Both run on the CPU, one after the other, so only one model is in memory. fp32 is the precision in
which models are used. But if weights are small, attention hardly depends on q and k, and if their
rows are in the wrong order, fp32 rounding hides it. fp64 shows it. These are differences of logits
in fp64, divided by the largest logit:

    right   width 64 to 512, 2 to 24 blocks, weights of 0.006 to 0.15      at most 7e-14
    LIMIT                                                                   1e-10
    wrong   width 32, weights of 0.006: the exact GELU instead of tanh's    2.0e-8
            rotary base a tenth too large                                   2.5e-6
            k before q, or rows of both for neighbouring pairs              at least 3.1e-5
            weights of 0.02 and more: any mistake in the tests              at least 3.0e-6
"""

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megaspeed.checkpoint.reading import load_model, model_config
from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.config.hugging_face import family_of, read_keys
from megaspeed.config.model import ModelConfig
from megaspeed.data.tokenizer import quiet_transformers
from megaspeed.files.durable import new_folder
from megaspeed.hugging_face.weight_files import ComputationError, HuggingFaceError, check_disk
from megaspeed.model.gpt import GPT

LENGTHS = (1, 16, 128, 512)
"""Tokens of each prompt in fp32, at most the model's positions."""

DOUBLE_LENGTH = 128
"""Tokens of the prompt in fp64, at most the model's positions."""

GREEDY_TOKENS = 64
"""Number of greedy tokens, fewer if the model has too few positions."""

_GREEDY_PROMPT = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


class Disagreement(ComputationError):
    """transformers and megaspeed do not compute the same function from the same weights."""


@dataclass(frozen=True)
class Limit:
    """The tolerance for differences of logits in some precision."""

    precision: str
    absolute: float
    relative: float

    def of(self, largest: float) -> float:
        """The tolerance if the largest logit is ``largest``."""
        return max(self.absolute, self.relative * largest)


SINGLE = Limit("fp32", absolute=1e-4, relative=2e-6)
DOUBLE = Limit("fp64", absolute=0.0, relative=1e-10)


@dataclass(frozen=True)
class Agreement:
    """How well two implementations agree."""

    difference: float  # largest of logits in fp32, over all prompts, positions and token ids
    tolerance: float  # the limit of ``difference``
    double_difference: float  # largest of logits in fp64, of one prompt
    double_tolerance: float  # the limit of ``double_difference``
    prompts: tuple[int, ...]  # number of tokens of each prompt
    tokens: int  # number of greedy tokens that both choose

    def __str__(self) -> str:
        return (
            f"verified: logits of {len(self.prompts)} prompts of up to {max(self.prompts)} tokens "
            f"differ by at most {self.difference:.2g} (limit {self.tolerance:.2g}), in fp64 by "
            f"{self.double_difference:.2g} (limit {self.double_tolerance:.2g}), and "
            f"{self.tokens} greedy tokens are the same"
        )


@contextmanager
def new_model_folder(
    out: Path, model: ModelConfig, size_bytes: int, *, verify: bool
) -> Iterator[Path]:
    """An empty folder for the files of a model, which gets the name ``out`` after the block.

    Raises HuggingFaceError if there is too little disk or, to verify, too little memory.
    """
    check_disk(out, size_bytes)
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
        Disagreement: the two models compute different logits or choose different tokens.
        HuggingFaceError: transformers cannot load ``folder``.
    """
    config = model_config(checkpoint)
    prompts = [_spread_ids(config.vocab_size, length) for length in _lengths(config)]
    in_double = _spread_ids(config.vocab_size, _at_most(config, DOUBLE_LENGTH))
    greedy = _at_most(config, _GREEDY_PROMPT)
    wanted = min(GREEDY_TOKENS, config.max_position_embeddings - greedy)
    stock = load_transformers_model(folder, strict=strict)
    theirs = [_stock_logits(stock, prompt) for prompt in prompts]
    # Only parameters. The rotary frequencies stay in fp32, as in every implementation.
    for parameter in stock.parameters():  # one at a time; a tied one is listed once
        parameter.data = parameter.data.double()
    theirs_in_double = _stock_logits(stock, in_double)
    text = _continued(stock, _spread_ids(config.vocab_size, greedy), wanted)
    del stock
    gc.collect()
    model = load_model(checkpoint)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    single = _compare_logits(model, prompts, theirs, SINGLE)
    double = _compare_logits(model.double(), [in_double], [theirs_in_double], DOUBLE)
    _compare_choices(model, text, greedy, double[1])
    return Agreement(*single, *double, tuple(map(len, prompts)), wanted)


def check_memory(config: ModelConfig) -> None:
    """Raise HuggingFaceError if memory has no room for a model in fp64 and the logits of both."""
    parameters = sum(map(math.prod, expected_shapes(config).values()))
    # All logits of one implementation are kept; of the other, those of one prompt at a time.
    single = 3 * sum(_lengths(config)) * config.vocab_size
    double = 3 * _at_most(config, DOUBLE_LENGTH) * config.vocab_size
    needed_bytes = 8 * (parameters + double) + 4 * single
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


def load_transformers_model(
    folder: Path, *, strict: bool, dtype: torch.dtype = torch.float32
) -> Any:
    """Load a folder with transformers' AutoModelForCausalLM, on the CPU, in evaluation mode.

    Args:
        folder: a folder with config.json and weights.
        strict: whether it is an error if the files have a tensor that the model does not use.
        dtype: dtype of the model's weights.

    Raises:
        HuggingFaceError: transformers cannot load it, or a tensor of the model is missing.
    """
    with quiet_transformers():
        try:
            keys = read_keys(str(folder))
            # transformers refuses a file without a model_type.
            known = {**keys, "model_type": family_of(keys)}
            config = None if keys.get("model_type") else transformers.AutoConfig.for_model(**known)
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
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


@torch.no_grad()
def _stock_logits(stock: Any, ids: Tensor) -> Tensor:
    """Their logits (S, V) of one prompt (S,)."""
    with _StayDouble():
        logits: Tensor = stock(ids[None], use_cache=False).logits[0]
    return logits


@torch.no_grad()
def _continued(stock: Any, ids: Tensor, tokens: int) -> Tensor:
    """The prompt (S,) followed by that many tokens, each with the largest of their logits."""
    text, unread, cache = ids, ids, None
    for _ in range(tokens):
        with _StayDouble():
            answer = stock(unread[None], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        unread = answer.logits[0, -1].argmax()[None]
        text = torch.cat((text, unread))
    return text


def _at_most(config: ModelConfig, length: int) -> int:
    return min(length, config.max_position_embeddings)


def _lengths(config: ModelConfig) -> list[int]:
    return sorted({_at_most(config, length) for length in LENGTHS})


def _spread_ids(vocab_size: int, count: int) -> Tensor:
    """Ids (count,) from all parts of the vocabulary, each far from the one before.

    The multiples of the golden ratio, modulo 1, are spread evenly, for any count.
    """
    return torch.tensor([int(vocab_size * (_GOLDEN * i % 1)) for i in range(1, count + 1)])


@torch.no_grad()
def _compare_logits(
    model: GPT, prompts: Sequence[Tensor], theirs: Sequence[Tensor], limit: Limit
) -> tuple[float, float]:
    """(largest difference, tolerance). Raises Disagreement if the difference is too large."""
    largest = float(torch.stack([logits.abs().max() for logits in theirs]).max())
    if not math.isfinite(largest):
        raise Disagreement(
            f"logits must be finite to be compared, but transformers computes {largest} from these "
            "weights; nothing was written. Use another model, or omit the comparison with "
            "--no-verify"
        )
    tolerance = limit.of(largest)
    differences = []
    for prompt, expected in zip(prompts, theirs, strict=True):
        difference = float((model(prompt[None])[0] - expected).abs().max())
        differences.append(difference)
        if not difference <= tolerance:  # true for NaN
            raise Disagreement(
                f"transformers and megaspeed disagree: on a prompt of {len(prompt)} tokens their "
                f"logits differ by {difference:.3g} in {limit.precision}, but rounding explains "
                f"only {tolerance:.3g} (the largest logit is {largest:.3g}). The weights are not "
                "mapped correctly; nothing was written."
            )
    return max(differences), tolerance


@torch.no_grad()
def _compare_choices(model: GPT, text: Tensor, prompt: int, tolerance: float) -> None:
    """Raise Disagreement unless each token of ``text`` after the prompt is our greedy choice.

    If two logits are closer than the tolerance, either token is a greedy choice.
    """
    if len(text) == prompt:
        return
    logits = model(text[None, :-1])[0, prompt - 1 :]  # (tokens, V)
    chosen = text[prompt:]
    below = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    wrong = torch.nonzero(~(below <= 2 * tolerance))  # true for NaN
    if len(wrong):
        at = int(wrong[0])
        raise Disagreement(
            f"transformers and megaspeed disagree: greedy token {at + 1} of {len(chosen)} is "
            f"{int(chosen[at])} in transformers and {int(logits[at].argmax())} in megaspeed, and "
            "rounding does not explain it; nothing was written."
        )
