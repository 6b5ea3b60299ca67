"""Loss, perplexity and bits per byte: what transformers' model gives, token by token."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import Piece
from megaspeed.inference import text_model
from megaspeed.inference.perplexity import Score, evaluate
from megaspeed.inference.text_model import TextModel
from tests.inference.tiny_text import LICENSE, both_models
from tests.model.tiny_gpt import gpt2, llama

TEXT = LICENSE.read_text()
DOCUMENTS = [TEXT[:300], "", "Grüße, 世界 \N{SNOWMAN}!", TEXT[300:307], TEXT[1000:1400]]
SAME = 1e-6  # relative: both add up fp32 logits
MODELS = {"gpt2": gpt2(), "llama": llama()}
WINDOWS = [(24, 24), (24, 10), (7, 7)]


def pieces(documents: Sequence[str]) -> list[Piece]:
    """Of documents, each in one piece."""
    return [Piece(text, ends_document=True) for text in documents]


@torch.no_grad()
def plain_nats(
    stock: PreTrainedModel, documents: Sequence[Sequence[int]], length: int, stride: int
) -> float:
    """One forward pass for each token, over what its window shows before it."""
    nats = 0.0
    for ids in documents:
        row = torch.tensor([0, *ids])
        for place in range(1, len(row)):
            window = 0 if place <= length else math.ceil((place - length) / stride)
            logits = stock(row[None, window * stride : place]).logits[0, -1]
            nats -= float(logits.double().log_softmax(dim=0)[row[place]])
    return nats


@pytest.mark.parametrize(("length", "stride"), WINDOWS)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_it_is_what_transformers_gives_token_by_token(
    config: ModelConfig, length: int, stride: int, tmp_path: Path
) -> None:
    model, stock = both_models(config, tmp_path)
    encoded = model.tokenizer.encode(DOCUMENTS)
    score = evaluate(model, pieces(DOCUMENTS), length=length, stride=stride, batch_size=3)
    nats = plain_nats(stock, encoded, length, stride)
    tokens = sum(map(len, encoded))
    size = len("".join(DOCUMENTS).encode())
    assert (score.documents, score.tokens, score.text_bytes) == (5, tokens, size)
    assert score.nats == pytest.approx(nats, rel=SAME)
    assert score.loss == pytest.approx(nats / tokens, rel=SAME)
    assert score.perplexity == pytest.approx(math.exp(nats / tokens), rel=10 * SAME)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=SAME)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return both_models(gpt2(), tmp_path_factory.mktemp("model"))[0]


def score(model: TextModel, documents: Sequence[str], **how: int) -> Score:
    return evaluate(
        model, pieces(documents), **{"length": 24, "stride": 24, "batch_size": 4, **how}
    )


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_how_many_windows_are_computed_at_once_does_not_matter(
    model: TextModel, batch_size: int
) -> None:
    assert score(model, DOCUMENTS, batch_size=batch_size).nats == pytest.approx(
        score(model, DOCUMENTS).nats, rel=SAME
    )


def test_of_a_large_vocabulary_fewer_windows_are_computed_at_once(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 4 windows of 8,192 tokens in Llama 3's vocabulary would take 17 GB."""
    monkeypatch.setattr(text_model, "_LARGEST_LOGITS_BYTES", 2 * 4 * 24 * model.config.vocab_size)
    computed: list[int] = []
    compute = TextModel.logits

    def logits(self: TextModel, rows: Sequence[Sequence[int]]) -> Tensor:
        computed.append(len(rows))
        return compute(self, rows)

    monkeypatch.setattr(TextModel, "logits", logits)
    score(model, [TEXT[:300]], batch_size=4)
    assert set(computed[:-1]) == {2}


def test_documents_add_up(model: TextModel) -> None:
    alone = [score(model, [text]).nats for text in DOCUMENTS if text]
    assert score(model, DOCUMENTS).nats == pytest.approx(sum(alone), rel=SAME)


def test_more_to_predict_from_is_another_loss(model: TextModel) -> None:
    losses = {round(score(model, DOCUMENTS, stride=stride).loss, 3) for stride in (24, 12, 1)}
    assert len(losses) == 3


def test_a_long_document_may_come_in_pieces(model: TextModel) -> None:
    # Words do not cross these borders, so that the pieces have the tokens of the whole.
    words = ["every", " piece", " is", " a", " word"] * 20
    together = [Piece("".join(words), ends_document=True)]
    apart = [Piece(word, ends_document=False) for word in words] + [Piece("", ends_document=True)]
    how = {"length": 24, "stride": 24, "batch_size": 4}
    assert evaluate(model, apart, **how) == evaluate(model, together, **how)


def test_the_score_so_far_is_shown_after_each_batch(model: TextModel) -> None:
    shown: list[int] = []
    how = {"length": 24, "stride": 24, "batch_size": 1}
    whole = evaluate(
        model, pieces([TEXT[:200]]), **how, watch=lambda so_far: shown.append(so_far.tokens)
    )
    assert shown == [*range(24, whole.tokens, 24), whole.tokens]


def test_text_without_a_token_has_no_loss(model: TextModel) -> None:
    with pytest.raises(DataError, match="2 documents of 0 bytes have none; name files with text"):
        score(model, ["", ""])


def test_a_perplexity_that_no_float_holds_is_infinite() -> None:
    assert Score(nats=2000.0, tokens=1, text_bytes=1).perplexity == math.inf
    assert Score(nats=2 * math.log(7), tokens=2, text_bytes=1).perplexity == pytest.approx(7)
