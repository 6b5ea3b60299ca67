"""The permutation is a bijection of every size, looks random, and is the same everywhere."""

from itertools import pairwise

import pytest

from megaspeed.data.sampler import Permutation


def image(size: int, key: bytes = b"key") -> list[int]:
    permutation = Permutation.keyed(size, key)
    return [permutation(index) for index in range(size)]


def test_every_size_up_to_300_is_a_bijection() -> None:
    for size in range(1, 301):
        assert sorted(image(size)) == list(range(size)), size


@pytest.mark.parametrize("size", [1023, 1024, 1025, 4096, 4097, 10_007, 65_537])
def test_sizes_around_powers_of_two_and_four_are_bijections(size: int) -> None:
    assert sorted(image(size)) == list(range(size))


def test_the_order_is_the_same_on_every_platform() -> None:
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


def test_both_parities_occur_also_where_the_domain_is_tiny() -> None:
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
