"""Law 2: which ids sample i is depends on (seed, corpus, i), not on the layout nor on the past.

Three epochs of ids, read by the loaders of every data rank, are the same lists of numbers.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspeed.cli import main
from megaspeed.config.data import DataConfig
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from tests.data.numbered_corpus import numbered_corpus, numbered_mixture

TEXT = Path(__file__).parents[2] / "LICENSE"
S = 6
SAMPLES = 3 * 24  # three epochs: the mixture's components have 23 sequences, the single source 24


def read(
    corpus: PreparedCorpus, dp_size: int, micro_batch_size: int, steps: int, start: int = 0
) -> dict[int, list[int]]:
    """{sample: its S + 1 ids} of the first samples of a run that goes on after `start` samples."""
    found: dict[int, list[int]] = {}
    for dp_rank in range(dp_size):
        shape = LoaderShape(micro_batch_size, 2, dp_rank, dp_size)
        loader = TrainingLoader(corpus, shape)
        for step in range(steps):
            for micro_batch in range(2):
                batch = loader.micro_batch(start + step * shape.train_batch_size, micro_batch)
                for sample, ids, targets in zip(
                    batch.samples.tolist(),
                    batch.tokens.tolist(),
                    batch.targets.tolist(),
                    strict=True,
                ):
                    found[sample] = [*ids, targets[-1]]
    return found


def ids(found: dict[int, list[int]], samples: range) -> list[list[int]]:
    return [found[sample] for sample in samples]


@pytest.fixture(params=["one source", "mixture"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PreparedCorpus]:
    if request.param == "mixture":
        yield numbered_mixture(tmp_path, S)
    else:
        yield numbered_corpus(
            tmp_path, train_tokens=24 * S + 3, validation_tokens=S + 1, sequence_length=S
        )


def test_three_epochs_are_the_same_ids_at_every_data_degree_and_after_a_resume(
    corpus: PreparedCorpus,
) -> None:
    serial = ids(read(corpus, dp_size=1, micro_batch_size=1, steps=SAMPLES // 2), range(SAMPLES))
    for dp_size in (2, 3, 4):
        for micro_batch_size in (1, 3):
            steps = -(-SAMPLES // (2 * dp_size * micro_batch_size))
            other = read(corpus, dp_size, micro_batch_size, steps)
            assert ids(other, range(SAMPLES)) == serial
    # A run at data degree 2 with batches of 8 stops after 5 steps; one at 3 with 12 goes on.
    before = read(corpus, dp_size=2, micro_batch_size=2, steps=5)
    after = read(corpus, dp_size=3, micro_batch_size=2, steps=3, start=40)
    assert before.keys().isdisjoint(after)
    assert ids(before | after, range(SAMPLES)) == serial


def test_a_text_and_the_tokens_made_from_it_give_the_same_stream(tmp_path: Path) -> None:
    vocabulary, tokens = tmp_path / "vocabulary", tmp_path / "tokens"
    to_vocabulary = ["--vocab-size", "300", "--output", str(vocabulary)]
    assert main(["train-tokenizer", str(TEXT), *to_vocabulary]) == 0
    to_tokens = ["--tokenizer", str(vocabulary), "--output", str(tokens), "--processes", "1"]
    assert main(["tokenize", str(TEXT), *to_tokens]) == 0

    def stream(train: Path, tokenizer: str) -> dict[int, list[int]]:
        data = DataConfig(
            train=(str(train),), tokenizer=tokenizer, validation_fraction=0.0, sequence_length=S
        )
        corpus = prepare_corpus(data, 300, cache_dir=tmp_path / "cache")
        return read(corpus, dp_size=2, micro_batch_size=2, steps=9)

    assert stream(tokens, "train") == stream(TEXT, str(vocabulary))


def test_an_epoch_of_one_source_has_every_sequence_once(tmp_path: Path) -> None:
    corpus = numbered_corpus(
        tmp_path, train_tokens=24 * S + 3, validation_tokens=S + 1, sequence_length=S
    )
    found = read(corpus, dp_size=1, micro_batch_size=1, steps=SAMPLES // 2)
    for epoch in range(3):
        starts = [row[0] for row in ids(found, range(epoch * 24, epoch * 24 + 24))]
        assert sorted(starts) == [sequence * S for sequence in range(24)]


def test_a_component_of_a_mixture_has_every_sequence_once_before_any_twice(tmp_path: Path) -> None:
    corpus = numbered_mixture(tmp_path, S)
    found = read(corpus, dp_size=1, micro_batch_size=1, steps=SAMPLES // 2)
    of_c_and_d = [row[0] for row in ids(found, range(SAMPLES)) if row[0] >= 20_000]
    sequences = [*range(20_000, 20_024, S), *range(30_000, 30_018, S)]
    assert len(of_c_and_d) >= 21  # 0.3 of 72 samples: three epochs of 7 sequences
    for epoch in range(3):
        assert sorted(of_c_and_d[epoch * 7 : epoch * 7 + 7]) == sequences
