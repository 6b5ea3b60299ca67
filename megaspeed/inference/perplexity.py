"""How well a model predicts text: loss, perplexity, bits per byte.

    nats           = sum over all tokens t of -ln p(t | what its window shows before it)
    loss           = nats / tokens                     nats per token
    perplexity     = e^loss                            of tokens as likely as each other
    bits per byte  = nats / ln 2 / bytes of UTF-8      of the text, whatever the tokenizer

Each document is predicted by itself, from what opens it (``opening.py``) on (``windows.py``).
Perplexities compare only models of one tokenizer; bits per byte compare any two.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F

from megaspeed.data.errors import DataError
from megaspeed.data.pieces import Piece
from megaspeed.inference.text_model import TextModel
from megaspeed.inference.windows import Window, WindowCutter


@dataclass
class Score:
    """What was predicted, and how well.

    Attributes:
        nats: of all predictions.
        tokens: predicted.
        documents: that they are from.
        text_bytes: of these documents in UTF-8.
        read_tokens: of the text read so far; all of them are predicted in the end.
    """

    nats: float = 0.0
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    read_tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean over tokens, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e^loss; infinite where no float holds it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that the text takes when it is coded by these predictions, for each of its bytes."""
        return self.nats / math.log(2) / self.text_bytes


def evaluate(
    model: TextModel,
    pieces: Iterable[Piece],
    *,
    length: int,
    stride: int,
    batch_size: int,
    watch: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Predicts every token of the documents; memory stays flat however long they are.

    Args:
        model: what predicts; at least one id opens its documents.
        pieces: of documents, in order.
        length: tokens of a window, at most the model's positions.
        stride: from window to window, 1 to ``length``.
        batch_size: windows computed at once, unless their logits would take too much memory.
        watch: is shown the score so far after each batch.

    Raises:
        DataError: there is no token to predict.
        InferenceError: the model gives logits that are not finite.
    """
    score = Score()
    cutter = WindowCutter(opening=model.opening, length=length, stride=stride)
    windows = _windows(model, pieces, cutter, score)
    at_once = min(batch_size, model.rows_at_once(length))
    while batch := list(islice(windows, at_once)):
        score.nats += _nats(model, batch)
        score.tokens += sum(window.counted for window in batch)
        watch(score)
    assert score.tokens == score.read_tokens, score
    if not score.tokens:
        raise DataError(
            f"at least one token is needed to predict, and {score.documents} documents of "
            f"{score.text_bytes} bytes have none; name files with text"
        )
    return score


def _windows(
    model: TextModel, pieces: Iterable[Piece], cutter: WindowCutter, score: Score
) -> Iterator[Window]:
    """The windows of all documents; counts what is read."""
    within_document = False
    for piece in pieces:
        score.text_bytes += len(piece.text.encode("utf-8"))
        encode = model.tokenizer.encode_continued if within_document else model.tokenizer.encode
        within_document = not piece.ends_document
        (ids,) = encode([piece.text])
        score.read_tokens += len(ids)
        yield from cutter.feed(ids)
        if piece.ends_document:
            score.documents += 1
            yield from cutter.end()


def _nats(model: TextModel, windows: Sequence[Window]) -> float:
    """Of all targets that count, summed in fp64."""
    logits = model.logits([window.seen for window in windows])
    total = 0.0
    for row, window in zip(logits, windows, strict=True):
        counted = slice(len(window.targets) - window.counted, len(window.targets))
        targets = torch.tensor(window.targets[counted], device=row.device)
        total += float(F.cross_entropy(row[counted], targets, reduction="none").double().sum())
    return total
