"""Loss, perplexity and bits per byte agree with one forward pass for each token.

Every token of a document is predicted once, from all earlier tokens in its window.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import Piece
from megaspeed.hugging_face import perplexity
from megaspeed.hugging_face.perplexity import Score, Window, cut_windows, evaluate
from megaspeed.hugging_face.text_model import TextModel
from megaspeed.hugging_face.weight_files import ComputationError
from tests.hugging_face.tiny_text import LICENSE, tiny_model
from tests.model.tiny_gpt import gpt2, llama

TEXT = LICENSE.read_text()
DOCUMENTS = [TEXT[:300], "", "Grüße, 世界 \N{SNOWMAN}!", TEXT[300:307], TEXT[1000:1400]]
SAME = 1e-6  # relative, because both add up fp32 logits
MODELS = {"gpt2": gpt2(), "llama": llama()}
WINDOWS = [(24, 24), (24, 10), (7, 7)]


def pieces(documents: Sequence[str]) -> list[Piece]:
    """Return one piece for each document."""
    return [Piece(text, ends_document=True) for text in documents]


@torch.no_grad()
def plain_nats(
    stock: PreTrainedModel, documents: Sequence[Sequence[int]], length: int, stride: int
) -> float:
    """Return the nats, from one forward pass for each token over the earlier ids in its window."""
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
def test_it_is_what_one_forward_pass_for_each_token_gives(
    config: ModelConfig, length: int, stride: int, tmp_path: Path
) -> None:
    model, stock = tiny_model(config, tmp_path)
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
    return tiny_model(gpt2(), tmp_path_factory.mktemp("model"))[0]


def score(model: TextModel, documents: Sequence[str], **how: Any) -> Score:
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


def test_a_large_vocabulary_computes_fewer_windows_at_once(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 4 windows of 8,192 tokens in Llama 3's vocabulary would take 17 GB."""
    monkeypatch.setattr(perplexity, "LARGEST_LOGITS_BYTES", 2 * 4 * 24 * 301)
    computed: list[int] = []
    nats = perplexity._nats

    def count(model: TextModel, windows: Sequence[Window]) -> float:
        computed.append(len(windows))
        return nats(model, windows)

    monkeypatch.setattr(perplexity, "_nats", count)
    score(model, [TEXT[:300]], batch_size=4)
    assert set(computed[:-1]) == {2}


def test_documents_add_up(model: TextModel) -> None:
    alone = [score(model, [text]).nats for text in DOCUMENTS if text]
    assert score(model, DOCUMENTS).nats == pytest.approx(sum(alone), rel=SAME)


def test_more_context_changes_the_loss(model: TextModel) -> None:
    losses = {round(score(model, DOCUMENTS, stride=stride).loss, 3) for stride in (24, 12, 1)}
    assert len(losses) == 3


def test_a_long_document_may_come_in_pieces(model: TextModel) -> None:
    # Words do not cross these borders, so the pieces have the tokens of the complete text.
    words = ["every", " piece", " is", " a", " word"] * 20
    together = [Piece("".join(words), ends_document=True)]
    apart = [Piece(word, ends_document=False) for word in words] + [Piece("", ends_document=True)]
    how: dict[str, Any] = {"length": 24, "stride": 24, "batch_size": 4}
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


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    model, stock = tiny_model(llama(), tmp_path)
    with torch.no_grad():
        stock.get_output_embeddings().weight[7] = torch.inf
    with pytest.raises(ComputationError, match=f"the model of {tmp_path} computes others"):
        score(model, [TEXT[:100]])


# --- windows --------------------------------------------------------------------------------------

END = 0


def predictions(windows: Iterable[Window]) -> list[tuple[int, tuple[int, ...]]]:
    """Return (token, the tokens that predict it) of all tokens that count."""
    return [
        (window.ids[place], tuple(window.ids[:place]))
        for window in windows
        for place in range(len(window.ids) - window.counted, len(window.ids))
    ]


def test_the_two_drawings_of_the_module() -> None:
    document = [END, *range(1, 9)]
    disjoint = [Window([END, 1, 2, 3, 4], 4), Window([4, 5, 6, 7, 8], 4)]
    assert list(cut_windows(document, opening=1, length=4, stride=4)) == disjoint
    overlapping = [
        Window([END, 1, 2, 3, 4], 4),
        Window([2, 3, 4, 5, 6], 2),
        Window([4, 5, 6, 7, 8], 2),
    ]
    assert list(cut_windows(document, opening=1, length=4, stride=2)) == overlapping


@given(st.data())
def test_each_token_is_predicted_once_from_its_window(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 8), "length")
    stride = data.draw(st.integers(1, length), "stride")
    opening = data.draw(st.integers(1, 6), "ids before the document")
    document = list(range(opening + data.draw(st.integers(0, 40), "tokens")))
    windows = list(cut_windows(document, opening=opening, length=length, stride=stride))
    assert all(window.counted > 0 for window in windows)
    reported = predictions(windows)
    assert [token for token, _ in reported] == document[opening:]
    for place, (_, seen) in enumerate(reported, start=opening):
        # A token counts in the first window that reaches it.
        window = 0 if place <= length else -(-(place - length) // stride)
        assert list(seen) == document[window * stride : place]
