"""Blocks of token files are held out, between documents. No token is on both sides."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.data.errors import DataError
from megaspeed.data.hold_out import document_span, hold_out_tokens
from megaspeed.data.token_file import TokenFile, TokenIndex

END = 0


def token_file(folder: Path, documents: list[int], end_of_text: int | None = END) -> TokenFile:
    """Write documents of these lengths. Their ids are 1, 2, 3 ... up to 60,000, and END at last."""
    ids = [
        token
        for length in documents
        for token in (*(1 + i % 60_000 for i in range(length - 1)), END)
    ]
    path = folder / "tokens.bin"
    path.write_bytes(np.array(ids, dtype="<u2").tobytes())
    index = TokenIndex(
        tokens=len(ids),
        documents=len(documents),
        dtype="<u2",
        largest_id=max(ids),
        end_of_text=end_of_text,
        tokenizer_fingerprint=None,
        corpus_fingerprint="all",
    )
    return TokenFile(path, index)


def sides(file: TokenFile, fraction: float, seed: int = 1) -> tuple[list[TokenFile], float]:
    """Return (the held-out spans, their share). Assert that both sides make up the file."""
    train, validation = hold_out_tokens([file], fraction, seed)
    parts = sorted((*train, *validation), key=lambda part: part.first_token)
    assert np.concatenate([part.map() for part in parts]).tolist() == file.map().tolist()
    assert train and validation
    assert len({part.index.corpus_fingerprint for part in parts}) == len(parts)
    return list(validation), sum(part.index.tokens for part in validation) / file.index.tokens


def skewed(documents: int, longest: int) -> list[int]:
    """Return lengths of documents: most are short and a few are long."""
    generator = np.random.default_rng(3)
    return [2 + int(longest / rank) for rank in 1 + generator.permutation(documents)]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
@pytest.mark.parametrize(
    "documents",
    [[29_000, 33_000, 38_000], skewed(2000, 40_000), [10] * 20_000, [200_000]],
    ids=["three", "skewed", "short", "one"],
)
def test_the_share_held_out_is_the_fraction_however_long_documents_are(
    tmp_path: Path, documents: list[int], fraction: float
) -> None:
    _, share = sides(token_file(tmp_path, documents), fraction)
    assert 0.999 * fraction <= share <= 1.021 * fraction


def test_blocks_begin_and_end_between_documents_if_these_are_short(tmp_path: Path) -> None:
    file = token_file(tmp_path, skewed(300, 900) * 400)
    held_out, _ = sides(file, 0.5)
    ids = file.map()
    assert len(held_out) > 3, "several blocks"
    for part in held_out:
        for cut in (part.first_token, part.first_token + part.index.tokens):
            assert cut in (0, len(ids)) or ids[cut - 1] == END


def test_blocks_are_chosen_by_their_ids_and_the_seed_not_by_their_place(tmp_path: Path) -> None:
    text = np.random.default_rng(5).integers(1, 60_000, (20, 10_000))
    text[:, -1] = END

    def held_out_of(folder: str, order: list[int], seed: int) -> list[int]:
        (tmp_path / folder).mkdir()
        file = token_file(tmp_path / folder, [10_000] * 20)
        file.path.write_bytes(text[order].astype("<u2").tobytes())
        (part,), _ = sides(file, 0.05, seed)
        return part.map()[:10].tolist()

    forwards = list(range(20))
    first = held_out_of("a", forwards, 1)
    assert held_out_of("b", forwards[::-1], 1) == first
    assert {tuple(held_out_of(str(seed), forwards, seed)) for seed in range(2, 8)} != {tuple(first)}


def test_an_id_beyond_the_vocabulary_is_reported_for_the_side_that_has_it(tmp_path: Path) -> None:
    file = token_file(tmp_path, [25])
    first, second = file.stretch(0, 5), file.stretch(5, 20)
    assert first.large_id(10) is None  # the largest id of the file, 24, is in the other part
    assert "has id 10 at token 9 (byte 18)" in str(second.large_id(10))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 1),
    st.one_of(st.sampled_from([1e-9, 0.5, 0.9999999]), st.floats(0.001, 0.999)),
    st.integers(0, 9),
)
def test_both_sides_have_tokens_and_make_up_the_file(
    tmp_path: Path, documents: list[int], fraction: float, seed: int
) -> None:
    file = token_file(tmp_path, documents)
    _, share = sides(file, fraction, seed)
    tokens = file.index.tokens
    assert (
        abs(share - min(max(fraction, 1 / tokens), 1 - 1 / tokens)) <= 0.5 / tokens + 0.02 * share
    )


def test_nothing_is_held_out_for_a_fraction_of_zero_and_one_token_cannot_be_split(
    tmp_path: Path,
) -> None:
    file = token_file(tmp_path, [10] * 50)
    assert hold_out_tokens([file], 0.0, 1) == ((file,), ())
    with pytest.raises(DataError, match="needs at least 2 tokens, but it has 1"):
        hold_out_tokens([token_file(tmp_path, [1])], 0.5, 1)


def test_a_documents_ids_are_found_by_its_number(tmp_path: Path) -> None:
    file = token_file(tmp_path, [3, 7, 2_000_000, 5])
    spans = [document_span(file, number) for number in range(4)]
    assert spans == [(0, 3), (3, 10), (10, 2_000_010), (2_000_010, 2_000_015)]
