"""The order of samples: a permutation, a function of the sample alone, the same at every layout."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from megaspeed.cli import main
from megaspeed.config.data import DataConfig
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.data.mixture import count_sequences
from megaspeed.data.sampler import Permutation, Sampler
from tests.data.numbered_corpus import numbered_corpus, numbered_mixture


def image(size: int, key: bytes = b"key") -> list[int]:
    permutation = Permutation.keyed(size, key)
    return [permutation(index) for index in range(size)]


def test_every_size_up_to_300_is_a_bijection() -> None:
    for size in range(1, 301):
        assert sorted(image(size)) == list(range(size)), size


@pytest.mark.parametrize("size", [1023, 1024, 1025, 4096, 4097, 10_007, 65_537])
def test_sizes_around_powers_of_two_and_four_are_bijections(size: int) -> None:
    assert sorted(image(size)) == list(range(size))


def test_the_permutation_is_the_same_on_every_platform() -> None:
    # Written down once: a change of any of these changes the data order of every run.
    assert image(10, b"1234") == [4, 6, 2, 9, 8, 0, 3, 5, 1, 7]
    assert Permutation.keyed(10**12, b"1234")(123_456_789_012) == 858_449_674_907


def test_two_keys_agree_about_as_often_as_two_random_orders() -> None:
    # Two independent random permutations agree in 1 place on average, in more than 8 with p < 2e-6.
    agreements = sum(a == b for a, b in zip(image(4096, b"0"), image(4096, b"1"), strict=True))
    assert agreements <= 8


def test_every_start_reaches_every_position_equally_often_over_keys() -> None:
    # Element 0 of 16 over 3,200 keys: 200 expected in each place, 6 standard deviations are 82.
    counts = [0] * 16
    for key in range(3200):
        counts[Permutation.keyed(16, str(key).encode())(0)] += 1
    assert all(abs(count - 200) < 82 for count in counts), counts


def test_both_parities_occur_even_if_the_domain_is_tiny() -> None:
    # The permutations of 3 elements: all 6 of them are reached.
    assert len({tuple(image(3, str(key).encode())) for key in range(200)}) == 6


def test_neighbours_are_not_neighbours_afterwards() -> None:
    # For a random order of n the mean distance of neighbours is n/3, here 3,333 +- 24.
    size = 10_000
    shuffled = image(size)
    mean = sum(abs(a - b) for a, b in pairwise(shuffled)) / (size - 1)
    assert abs(mean - size / 3) < 6 * 24


def test_a_position_far_into_a_huge_domain_costs_no_more_than_the_first() -> None:
    size = 10**15
    permutation = Permutation.keyed(size, b"key")
    values = {permutation(index) for index in range(size - 2000, size)}
    assert len(values) == 2000
    assert all(0 <= value < size for value in values)


def test_sequences_are_complete_and_each_needs_its_last_target() -> None:
    assert [count_sequences(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9, 10)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_every_epoch_has_every_sequence_once_in_an_order_of_its_own() -> None:
    sampler = Sampler(seed=7, fingerprint="f", sequences=101)
    epochs = [[sampler.sequence_of(e * 101 + p) for p in range(101)] for e in range(3)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed_and_on_the_corpus() -> None:
    def order(seed: int, fingerprint: str) -> list[int]:
        return [Sampler(seed, fingerprint, 50).sequence_of(sample) for sample in range(50)]

    assert order(1, "a") == order(1, "a")
    assert order(1, "a") != order(2, "a")
    assert order(1, "a") != order(1, "b")


def test_the_order_is_the_same_on_every_platform() -> None:
    sampler = Sampler(seed=1234, fingerprint="corpus", sequences=8)
    assert [sampler.sequence_of(sample) for sample in range(16)] == [
        2,
        3,
        6,
        0,
        5,
        7,
        4,
        1,
        7,
        2,
        0,
        4,
        5,
        6,
        3,
        1,
    ]


def test_a_sample_far_ahead_needs_none_before_it() -> None:
    sampler = Sampler(seed=1, fingerprint="f", sequences=1_000_003)
    assert 0 <= sampler.sequence_of(10**18) < 1_000_003


TEXT = Path(__file__).parents[2] / "LICENSE"
S = 6
SAMPLES = 3 * 24  # three epochs: the mixture's components have 23 sequences, the single source 24


def read(
    corpus: PreparedCorpus, dp_size: int, micro_batch_size: int, steps: int, start: int = 0
) -> dict[int, list[int]]:
    """{sample: its S + 1 ids} of the first samples of a run that resumes after `start` samples."""
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
    # A run at data degree 2 with batches of 8 stops after 5 steps. A run at 3 with 12 resumes.
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
