"""How well a model predicts text: loss, perplexity and bits per byte.

    nats           = sum over all tokens t of -ln p(t | the tokens before it in its window)
    loss           = nats / tokens                     nats per token
    perplexity     = e^loss                            equally likely tokens to choose from
    bits per byte  = nats / ln 2 / bytes of UTF-8      independent of the tokenizer

A document is cut into windows of the model's length. Every token of it is predicted exactly once,
from the ids before the document (here one, e) and from the tokens before it in its window. With
windows of 4 ids:

    e 1 2 3            predicts 1 2 3 4
            4 5 6 7             5 6 7 8

Compare perplexities only between models with the same tokenizer, and bits per byte between any
models.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.nn.functional as F

from megaspeed.data.errors import DataError
from megaspeed.data.pieces import Piece
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.hugging_face.text_model import TextModel

WINDOWS_TOGETHER = 4
LARGEST_LOGITS_BYTES = 1 << 30
"""Largest size of the logits of the windows that are computed together, unless it is one."""


@dataclass(frozen=True)
class Window:
    """Ids that the model sees at once, and the id after them."""

    # At most one more than the model's positions. Each but the first is predicted from those
    # before it.
    ids: Sequence[int]
    counted: int  # how many of the last ids are predicted; the others precede the document


@dataclass
class Score:
    """The predictions so far."""

    nats: float = 0.0  # sum over the predicted tokens
    tokens: int = 0  # predicted
    documents: int = 0  # read
    text_bytes: int = 0  # of their text in UTF-8

    @property
    def loss(self) -> float:
        """Mean over tokens, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e^loss; infinite if it exceeds the range of a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text if it is compressed with these predictions."""
        return self.nats / math.log(2) / self.text_bytes


def evaluate(
    model: TextModel,
    pieces: Iterable[Piece],
    *,
    length: int,
    watch: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Predict every token of the documents. Memory holds the ids of one document at a time.

    If no id precedes a document, an end-of-text does, so that the first token is predicted, too.

    Args:
        model: the model.
        pieces: the text of the documents, in order.
        length: ids that the model sees in a window, at most its positions.
        watch: called with the score after each batch.

    Raises:
        DataError: there is no token to predict.
        ComputationError: the model computes NaN or infinite logits.
    """
    score = Score()
    opening = model.opening or (model.tokenizer.end_of_text,)
    windows = chain.from_iterable(
        cut_windows(ids, opening=len(opening), length=length)
        for ids in _documents(model.tokenizer, opening, pieces, score)
    )
    row_bytes = 4 * length * model.model.config.vocab_size
    at_once = max(1, min(WINDOWS_TOGETHER, LARGEST_LOGITS_BYTES // row_bytes))
    while batch := list(islice(windows, at_once)):
        score.nats += _nats(model, batch)
        score.tokens += sum(window.counted for window in batch)
        watch(score)
    if not score.tokens:
        raise DataError(
            f"at least one token is needed to predict, but {score.documents} documents of "
            f"{score.text_bytes} bytes have none; name files with text"
        )
    return score


def _documents(
    tokenizer: TextTokenizer, opening: Sequence[int], pieces: Iterable[Piece], score: Score
) -> Iterator[MutableSequence[int]]:
    """The ids of each document, after those that precede it; counts what is read."""
    document = array("I", opening)
    for piece in pieces:
        score.text_bytes += len(piece.text.encode("utf-8"))
        continues = len(document) > len(opening)
        encode = tokenizer.encode_continued if continues else tokenizer.encode
        (ids,) = encode([piece.text])
        document.extend(ids)
        if piece.ends_document:
            score.documents += 1
            yield document
            document = array("I", opening)


def cut_windows(ids: Sequence[int], *, opening: int, length: int) -> Iterator[Window]:
    """The windows of a document.

    Args:
        ids: the ids before the document, then those of the document.
        opening: how many ids are before the document, at least 1. They are not predicted.
        length: ids that the model sees in a window, at least 1.
    """
    for start in range(0, len(ids), length):
        seen = ids[start : start + length + 1]
        counted = start + len(seen) - max(opening, start + 1)
        if counted > 0:  # with a long opening, a window may have nothing to predict
            yield Window(seen, counted)


@torch.no_grad()
def _nats(model: TextModel, windows: Sequence[Window]) -> float:
    """The sum over all ids that count, in fp64."""
    ids = torch.zeros(len(windows), max(len(window.ids) for window in windows), dtype=torch.long)
    for row, window in zip(ids, windows, strict=True):
        row[: len(window.ids)] = torch.tensor(list(window.ids))
    ids = ids.to(model.model.device)
    # Causal attention: the zeros after a shorter window do not change its logits.
    logits = model.model(ids[:, :-1], use_cache=False).logits  # (B, S, V)
    total = 0.0
    for row, row_logits, window in zip(ids, logits, windows, strict=True):
        counted = slice(len(window.ids) - 1 - window.counted, len(window.ids) - 1)
        predictions = row_logits[counted].float()
        model.finite(row, predictions)
        losses = F.cross_entropy(predictions, row[1:][counted], reduction="none")
        total += float(losses.double().sum())
    return total
