"""The order of samples is a permutation in each epoch, and a function of the sample's number."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megaspeed.data.mixture import count_sequences
from megaspeed.data.sampler import permuted, shuffled


def image(size: int, key: bytes = b"key") -> list[int]:
    return [permuted(index, size, key) for index in range(size)]


def test_a_permutation_is_a_bijection() -> None:
    for size in (*range(1, 301), 1023, 1024, 1025, 4096, 4097, 10_007, 65_537):
        assert sorted(image(size)) == list(range(size)), size


@given(st.binary(max_size=20), st.integers(1, 10**18), st.data())
def test_two_positions_of_a_huge_domain_have_two_values(
    key: bytes, size: int, data: st.DataObject
) -> None:
    """A position far into the domain costs no more than the first."""
    positions = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    values = {permuted(position, size, key) for position in positions}
    assert len(values) == len(positions) and all(0 <= value < size for value in values)


def test_the_order_is_the_same_on_every_platform() -> None:
    # Written down once: a change of any of these changes the data order of every run.
    assert image(10, b"1234") == [4, 6, 2, 9, 8, 0, 3, 5, 1, 7]
    assert permuted(123_456_789_012, 10**12, b"1234") == 858_449_674_907
    drawn = "".join(str(shuffled(sample, 8, "1234:corpus")) for sample in range(16))
    assert drawn == "2360574172045631"


def test_two_keys_agree_about_as_often_as_two_random_orders() -> None:
    # Two independent random permutations agree in 1 place on average, in more than 8 with p < 2e-6.
    agreements = sum(a == b for a, b in zip(image(4096, b"0"), image(4096, b"1"), strict=True))
    assert agreements <= 8


def test_every_start_reaches_every_position_equally_often_over_keys() -> None:
    # Element 0 of 16 over 3,200 keys: 200 expected in each place, 6 standard deviations are 82.
    counts = [0] * 16
    for key in range(3200):
        counts[permuted(0, 16, str(key).encode())] += 1
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


def test_sequences_are_complete_and_each_needs_its_last_target() -> None:
    counts = [count_sequences(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9, 10)]
    assert counts == [0, 0, 0, 1, 1, 2, 2]


def test_every_epoch_has_every_sequence_once_in_an_order_of_its_own() -> None:
    """The order depends on the seed, on the corpus and on the epoch."""
    orders = []
    for key, first in (("7:f", 0), ("7:f", 1), ("7:f", 10**15), ("8:f", 0)):
        orders.append([shuffled(first * 101 + position, 101, key) for position in range(101)])
    orders.append([shuffled(position, 101, "7:g") for position in range(101)])
    assert all(sorted(order) == list(range(101)) for order in orders)
    assert len(set(map(tuple, orders))) == len(orders)
