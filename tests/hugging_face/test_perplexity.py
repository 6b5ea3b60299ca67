"""Loss, perplexity and bits per byte agree with one forward pass for each token.

Every token of a document is predicted once, from all earlier tokens in its window.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

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
from megaspeed.hugging_face.weights import ComputationError
from tests.hugging_face.tiny_text import LICENSE, tiny_model
from tests.model.tiny_gpt import gpt2, llama

TEXT = LICENSE.read_text()
DOCUMENTS = [TEXT[:300], "", "Grüße, 世界 \N{SNOWMAN}!", TEXT[300:307], TEXT[1000:1400]]
SAME = 1e-6  # relative, because both add up fp32 logits
MODELS = {"gpt2": gpt2(), "llama": llama()}


def pieces(documents: Sequence[str]) -> list[Piece]:
    """Return one piece for each document."""
    return [Piece(text, ends_document=True) for text in documents]


@torch.no_grad()
def plain_nats(stock: PreTrainedModel, documents: Sequence[Sequence[int]], length: int) -> float:
    """Return the nats, from one forward pass for each token over the earlier ids in its window."""
    nats = 0.0
    for ids in documents:
        row = torch.tensor([0, *ids])
        for place in range(1, len(row)):
            start = (place - 1) // length * length
            logits = stock(row[None, start:place]).logits[0, -1]
            nats -= float(logits.double().log_softmax(dim=0)[row[place]])
    return nats


@pytest.mark.parametrize("length", [24, 7])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_it_is_what_one_forward_pass_for_each_token_gives(
    config: ModelConfig, length: int, tmp_path: Path
) -> None:
    model, stock = tiny_model(config, tmp_path)
    encoded = model.tokenizer.encode(DOCUMENTS)
    score = evaluate(model, pieces(DOCUMENTS), length=length)
    nats = plain_nats(stock, encoded, length)
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


def score(model: TextModel, documents: Sequence[str]) -> Score:
    return evaluate(model, pieces(documents), length=24)


@pytest.mark.parametrize("together", [1, 2, 100])
def test_how_many_windows_are_computed_at_once_does_not_matter(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    expected = score(model, DOCUMENTS).nats
    monkeypatch.setattr(perplexity, "WINDOWS_TOGETHER", together)
    assert score(model, DOCUMENTS).nats == pytest.approx(expected, rel=SAME)


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
    score(model, [TEXT[:300]])
    assert set(computed[:-1]) == {2}


def test_documents_add_up(model: TextModel) -> None:
    alone = [score(model, [text]).nats for text in DOCUMENTS if text]
    assert score(model, DOCUMENTS).nats == pytest.approx(sum(alone), rel=SAME)


def test_a_long_document_may_come_in_pieces(model: TextModel) -> None:
    # Words do not cross these borders, so the pieces have the tokens of the complete text.
    words = ["every", " piece", " is", " a", " word"] * 20
    together = [Piece("".join(words), ends_document=True)]
    apart = [Piece(word, ends_document=False) for word in words] + [Piece("", ends_document=True)]
    assert evaluate(model, apart, length=24) == evaluate(model, together, length=24)


def test_the_score_so_far_is_shown_after_each_batch(model: TextModel) -> None:
    shown: list[int] = []
    whole = evaluate(
        model, pieces([TEXT]), length=6, watch=lambda so_far: shown.append(so_far.tokens)
    )
    assert shown == [*range(24, whole.tokens, 24), whole.tokens]


def test_an_end_of_text_precedes_a_document_if_nothing_else_does(model: TextModel) -> None:
    assert score(replace(model, opening=()), DOCUMENTS) == score(model, DOCUMENTS)


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


def test_the_drawing_of_the_module() -> None:
    document = [END, *range(1, 9)]
    disjoint = [Window([END, 1, 2, 3, 4], 4), Window([4, 5, 6, 7, 8], 4)]
    assert list(cut_windows(document, opening=1, length=4)) == disjoint


@given(st.data())
def test_each_token_is_predicted_once_from_its_window(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 8), "length")
    opening = data.draw(st.integers(1, 6), "ids before the document")
    document = list(range(opening + data.draw(st.integers(0, 40), "tokens")))
    windows = list(cut_windows(document, opening=opening, length=length))
    assert all(window.counted > 0 for window in windows)
    reported = predictions(windows)
    assert [token for token, _ in reported] == document[opening:]
    for place, (_, seen) in enumerate(reported, start=opening):
        assert list(seen) == document[(place - 1) // length * length : place]
