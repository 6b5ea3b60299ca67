"""How well a model predicts text: loss, perplexity and bits per byte.

    nats           = sum over all tokens t of -ln p(t | the tokens before it in its window)
    loss           = nats / tokens                     nats per token
    perplexity     = e^loss                            equally likely tokens to choose from
    bits per byte  = nats / ln 2 / bytes of UTF-8      independent of the tokenizer

A document is cut into windows of the model's length. Every token of it is predicted exactly once,
from the ids before the document (here one, e) and from the tokens before it in its window. With
windows of 4 ids:

    stride 4    e 1 2 3            predicts 1 2 3 4
                        4 5 6 7             5 6 7 8
    stride 2    e 1 2 3            predicts 1 2 3 4
                    2 3 4 5                     5 6     3 and 4 were predicted before
                        4 5 6 7                     7 8

A smaller stride predicts each token from more tokens, for length / stride times the work. Compare
perplexities only between models with the same tokenizer, and bits per byte between any models.
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
from megaspeed.hugging_face.text_model import TextModel

LARGEST_LOGITS_BYTES = 1 << 30
"""Largest size of the logits of the windows that are computed together."""


@dataclass(frozen=True)
class Window:
    """Ids that the model sees at once, and the id after them."""

    # At most one more than the model's positions. Each but the first is predicted from those
    # before it.
    ids: Sequence[int]
    counted: int  # how many of the last ids count; the others were predicted in earlier windows


@dataclass
class Score:
    """The predictions so far."""

    nats: float = 0.0  # sum over the predicted tokens
    tokens: int = 0  # predicted
    documents: int = 0  # read
    text_bytes: int = 0  # of their text in UTF-8
    read_tokens: int = 0  # in the end all of them are predicted
    read_bytes: int = 0  # of the files on disk

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

    @property
    def done_bytes(self) -> int:
        """The share of ``read_bytes`` whose tokens are predicted."""
        return self.read_bytes * self.tokens // max(1, self.read_tokens)


def evaluate(
    model: TextModel,
    pieces: Iterable[Piece],
    *,
    length: int,
    stride: int,
    batch_size: int,
    watch: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Predict every token of the documents. Memory holds the ids of one document at a time.

    Args:
        model: the model; it has at least one id before a document.
        pieces: the text of the documents, in order.
        length: ids that the model sees in a window, at most its positions.
        stride: ids from the start of one window to the start of the next, 1 to ``length``.
        batch_size: number of windows computed together; fewer if their logits exceed
            LARGEST_LOGITS_BYTES.
        watch: called with the score after each batch.

    Raises:
        DataError: there is no token to predict.
        ComputationError: the model computes NaN or infinite logits.
    """
    score = Score()
    windows = chain.from_iterable(
        cut_windows(ids, opening=len(model.opening), length=length, stride=stride)
        for ids in _documents(model, pieces, score)
    )
    row_bytes = 4 * length * model.model.config.vocab_size
    at_once = max(1, min(batch_size, LARGEST_LOGITS_BYTES // row_bytes))
    while batch := list(islice(windows, at_once)):
        score.nats += _nats(model, batch)
        score.tokens += sum(window.counted for window in batch)
        watch(score)
    assert score.tokens == score.read_tokens, score
    if not score.tokens:
        raise DataError(
            f"at least one token is needed to predict, but {score.documents} documents of "
            f"{score.text_bytes} bytes have none; name files with text"
        )
    return score


def _documents(
    model: TextModel, pieces: Iterable[Piece], score: Score
) -> Iterator[MutableSequence[int]]:
    """The ids of each document, after those that precede it; counts what is read."""
    document = array("I", model.opening)
    for piece in pieces:
        score.text_bytes += len(piece.text.encode("utf-8"))
        score.read_bytes = piece.read_bytes
        continues = len(document) > len(model.opening)
        encode = model.tokenizer.encode_continued if continues else model.tokenizer.encode
        (ids,) = encode([piece.text])
        score.read_tokens += len(ids)
        document.extend(ids)
        if piece.ends_document:
            score.documents += 1
            yield document
            document = array("I", model.opening)


def cut_windows(ids: Sequence[int], *, opening: int, length: int, stride: int) -> Iterator[Window]:
    """The windows of a document.

    Args:
        ids: the ids before the document, then those of the document.
        opening: how many ids are before the document, at least 1. They are not predicted.
        length: ids that the model sees in a window, at least 1.
        stride: ids from the start of one window to the start of the next, 1 to ``length``.
    """
    assert opening >= 1 and 1 <= stride <= length, (opening, stride, length)
    predicted = opening
    for start in range(0, len(ids), stride):
        seen = ids[start : start + length + 1]
        end = start + len(seen)
        if end > predicted:  # with a long opening, a window may have nothing to predict
            yield Window(seen, end - predicted)
            predicted = end


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
