"""Law 2: sample i is a function of (seed, fingerprint, i) alone."""

from megaspeed.data.mixture import count_sequences
from megaspeed.data.sampler import Sampler


def test_sequences_are_whole_and_each_needs_its_last_target() -> None:
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
