"""Everything that prevents training on prepared data is reported before training."""

from dataclasses import replace
from pathlib import Path

import pytest

from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.errors import DataError
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.token_file import TokenFile
from tests.data.numbered_corpus import alone, numbered_mixture, write_numbered_tokens

S = 6


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return write_numbered_tokens(tmp_path, 20, "a")


def with_index(file: TokenFile, **facts: object) -> TokenFile:
    return replace(file, index=replace(file.index, **facts))  # type: ignore[arg-type]


def corpus_of(*files: TokenFile, reset: bool = False) -> PreparedCorpus:
    return PreparedCorpus(alone(*files), None, None, S, seed=5, reset_at_documents=reset)


def problems_of(corpus: PreparedCorpus, vocab_size: int = 10**6) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        corpus.check(vocab_size)
    return caught.value.problems


def test_a_correct_mixture_has_no_problem(tmp_path: Path) -> None:
    corpus = numbered_mixture(tmp_path, S)
    corpus.check(40_000)
    assert corpus.training_sequences == 23
    assert corpus.tokenizer_fingerprint == "numbers"


def test_every_file_with_an_id_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    problems = problems_of(numbered_mixture(tmp_path, S), vocab_size=15_000)
    assert [problem.split(" has id ")[0].rsplit("/")[-1] for problem in problems] == [
        "c.bin", "d.bin", "vc.bin",
    ]  # fmt: skip
    assert "has id 20000 at token 0 (byte 0)" in problems[0]


def test_a_component_that_fills_no_sequence_is_named(file: TokenFile, tmp_path: Path) -> None:
    short = write_numbered_tokens(tmp_path, S, "short")
    mixture = Mixture((Component((file,), 1.0, "books"), Component((short, short), 1.0, "code")))
    (problem,) = problems_of(PreparedCorpus(mixture, None, None, S, seed=5))
    assert "sequence_length + 1 = 7 tokens, in its source code, but has 12;" in problem


def test_resetting_at_documents_needs_one_known_end(file: TokenFile) -> None:
    nameless = with_index(file, end_of_text=None)
    other = with_index(file, end_of_text=9)
    corpus_of(file, nameless, other).check(10**6)
    corpus_of(file, file, reset=True).check(10**6)
    unknown, differing = problems_of(corpus_of(file, nameless, other, reset=True))
    assert "states none; make it with `megaspeed tokenize`" in unknown
    assert "has 9 instead of 0" in differing


def test_a_file_that_is_held_out_in_part_is_reported_once(file: TokenFile) -> None:
    nameless = with_index(file, end_of_text=None)
    train, validation = alone(nameless.stretch(0, 10)), alone(nameless.stretch(10, 10))
    corpus = PreparedCorpus(train, validation, None, S, seed=5, reset_at_documents=True)
    vocabulary, ends = problems_of(corpus, vocab_size=1)
    assert "must be below model.vocab_size (1)" in vocabulary
    assert "states none; make it with `megaspeed tokenize`" in ends
