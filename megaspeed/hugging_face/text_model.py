"""Continuations of prompts by the model of a checkpoint, which transformers computes.

    checkpoint --StockModel.load--> transformers' model, in memory --> TextModel

The ids before a document are the same as in training, because otherwise the model predicts the text
worse:

    trained here    e t o   b e e n o t ...    packing puts an end-of-text (e) between documents
    imported        b t o   b e                whatever the tokenizer's template puts before a text,
                                               for example Llama's begin-of-text (b)
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from megaspeed.checkpoint.inspection import checkpoint_named
from megaspeed.checkpoint.run_state import RunState
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.hugging_face.exporting import Precision, StockModel
from megaspeed.hugging_face.tokenizer import quiet_transformers
from megaspeed.hugging_face.weights import ComputationError

_LOWEST_TEMPERATURE = 1e-6
"""Below it the likeliest token is taken, because logits divided by it could overflow in fp32."""


@dataclass(frozen=True)
class TextModel:
    """A model, and what converts text to its ids and back."""

    source: Path  # the checkpoint
    model: Any  # a causal language model of transformers, in evaluation mode
    tokenizer: TextTokenizer  # every id of it is below the model's vocabulary size
    opening: tuple[int, ...]  # the ids before each document
    ends: tuple[int, ...]  # each of these ids ends a document
    positions: int  # the largest number of ids that the model can see at once

    def finite(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the logits after they are checked. This is a logits processor for ``generate``.

        Raises ComputationError if one is NaN or infinite.
        """
        if not logits.isfinite().all():
            raise ComputationError(
                f"logits must be finite, but the model of {self.source} computes others: its "
                "weights are too large for the precision; use an earlier checkpoint, or float32"
            )
        return logits


def load_text_model(
    place: Path,
    *,
    tokenizer: Path | None,
    precision: Precision,
    report: Callable[[str], None] = lambda line: None,
) -> TextModel:
    """Load the model of a checkpoint and its tokenizer, on a GPU if there is one.

    Args:
        place: a checkpoint, a folder of checkpoints, or the folder of a run. Of several
            checkpoints, the newest complete one is used.
        tokenizer: a folder or a tokenizer.json that replaces the model's own.
        precision: dtype of the weights and of the computation.
        report: receives a line about each checkpoint that is not complete.

    Raises:
        CheckpointError: no checkpoint is complete.
        ConfigError: transformers' class of the family cannot compute the model.
        DataError: there is no tokenizer, or it has ids that the model does not have.
    """
    source = checkpoint_named(place, report)
    stock = StockModel(source, tokenizer=tokenizer, precision=precision)
    words = stock.tokenizer.loaded
    if words is None:
        raise DataError(
            f"text must be converted to tokens, but {source} has no tokenizer for it; name the one "
            "it was trained with in --tokenizer"
        )
    trained_here = RunState.read(source).imported_from is None
    opening = (words.end_of_text,) if trained_here else ids_before_text(words)
    stated = stock.generation.get("eos_token_id")
    ends = {words.end_of_text, *(stated if isinstance(stated, list) else [stated])}
    model = stock.load().to("cuda" if torch.cuda.is_available() else "cpu")
    return TextModel(source, model, words, opening, (*ends,), stock.ours.max_position_embeddings)


def ids_before_text(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """What the template puts before a text. What it puts after one is ignored.

    This can only be seen in an encoded text. Texts are tried until one has an id of its own.
    """
    for text in ("a", *tokenizer.tokenizer.get_vocab()):
        encoding = tokenizer.tokenizer.encode(text)
        added = encoding.special_tokens_mask  # 1 for each id that the template added
        if 0 in added:
            return tuple(encoding.ids[: added.index(0)])
    return ()


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8  # logits are divided by it; 0 takes the likeliest token
    # only this many likeliest tokens are drawn (Fan et al. 2018); 0 for all
    top_k: int = 50
    max_tokens: int = 100  # the largest number of tokens of a continuation
    seed: int = 0  # of all draws


@dataclass(frozen=True)
class Continuation:
    """One sample."""

    prompt: str  # the text that is continued
    number: int  # of the sample among those of the prompt, from 1
    text: str  # what the model wrote, without the prompt
    ids: tuple[int, ...]  # its tokens, without the one that ends the document
    ended: bool  # whether the model ended the document; if not, the limit of tokens did


def continue_prompt(model: TextModel, prompt: str, number: int, sampling: Sampling) -> Continuation:
    """Continue a prompt. The result is a function of (seed, prompt, number) up to rounding.

    Of a long prompt, the model sees the last tokens, so that the continuation fits its positions.
    If the prompt is empty and no id precedes a document, it begins with an end-of-text.

    Raises:
        ComputationError: the model computes NaN or infinite logits.
    """
    (text,) = model.tokenizer.encode([prompt])
    before = [*model.opening, *text] or [model.tokenizer.end_of_text]
    most = min(sampling.max_tokens, model.positions)
    before = before[-(model.positions + 1 - most) :]  # the last token is drawn, but not seen
    digest = hashlib.sha256(f"sample/{sampling.seed}/{number}/{prompt}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    how: dict[str, Any] = {"do_sample": sampling.temperature >= _LOWEST_TEMPERATURE}
    if how["do_sample"]:
        how |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
    seen = torch.tensor([before], device=model.model.device)
    with quiet_transformers():
        found = model.model.generate(
            seen,
            attention_mask=torch.ones_like(seen),
            generation_config=GenerationConfig(
                max_new_tokens=most, eos_token_id=[*model.ends], pad_token_id=model.ends[0], **how
            ),
            logits_processor=[model.finite],
        )
    drawn: list[int] = found[0, len(before) :].tolist()
    ended = drawn[-1] in model.ends
    if ended:
        drawn.pop()
    written = model.tokenizer.text_after(before, drawn)
    return Continuation(prompt, number, written, tuple(drawn), ended)
