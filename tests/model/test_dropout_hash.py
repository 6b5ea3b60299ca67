"""The hash of dropout masks: its definition, and a test that masks look like independent draws.

Every bound is five standard deviations of independent draws. Seeds are fixed, so a test always
gives the same result. The tests use the upper 16 bits of a hash. The lower bits decide only if all
upper bits equal those of the probability.
"""

import math

import pytest
import torch
from torch import Tensor

from megaspeed.model.dropout import SampleDropout, element_hashes, row_words

ROWS, COLUMNS = 1024, 1024
SIGMAS = 5


def dropout(probability: float = 0.1, *, name: str = "blocks.0.x", seed: int = 1) -> SampleDropout:
    return SampleDropout(probability, name=name, seed=seed)


def hashes(layer: SampleDropout, sample: int = 4) -> Tensor:
    """Return the hashes (ROWS, COLUMNS) of one sample."""
    assert layer.key is not None
    words = row_words(layer.key, torch.tensor([sample]), torch.arange(ROWS), full_rows=ROWS)
    return element_hashes(words, COLUMNS)[0]


def standardised_mask(layer: SampleDropout, sample: int = 4) -> Tensor:
    """Return the mask (ROWS, COLUMNS) scaled to mean 0 and variance 1, if the
    probability is right.
    """
    y = layer(torch.ones(1, ROWS, COLUMNS), torch.tensor([sample]))[0]
    p = layer.probability
    return ((y == 0).double() - p) / math.sqrt(p * (1 - p))


def assert_uncorrelated(a: Tensor, b: Tensor, what: object) -> None:
    assert abs(float((a * b).sum())) < SIGMAS * math.sqrt(a.numel()), what


# --- definition -----------------------------------------------------------------------------------


def test_words_of_rows_are_the_published_outputs_of_splitmix64() -> None:
    """The first outputs of Vigna's splitmix64.c with the seed 1234567."""
    words = row_words(torch.tensor(1234567), torch.tensor([0]), torch.arange(1, 6), full_rows=6)
    assert [word % 2**64 for word in words[0].tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_rows_are_numbered_through_all_samples_in_64_bits() -> None:
    key = torch.tensor(99)
    sample, rows = 2**33 + 5, 7  # beyond 2^32 samples
    one = row_words(key, torch.tensor([sample]), torch.arange(rows), full_rows=rows)
    same = row_words(key, torch.tensor([0]), sample * rows + torch.arange(rows), full_rows=1)
    assert torch.equal(one, same)
    assert not torch.equal(
        one, row_words(key, torch.tensor([5]), torch.arange(rows), full_rows=rows)
    )


def lowbias32(x: int) -> int:
    """lowbias32 as in github.com/skeeto/hash-prospector."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_hashes_of_elements_are_lowbias32() -> None:
    """The equality is exact for a word below 2^16, whose first xor-shift and second key are zero.
    The hash omits the last xor-shift of lowbias32.
    """
    word = 54321
    found = [h % 2**32 for h in element_hashes(torch.tensor([[word]]), 5000)[0, 0].tolist()]
    assert [h ^ h >> 16 for h in found] == [lowbias32(word ^ column) for column in range(5000)]


def test_both_halves_of_a_word_count() -> None:
    word = 0x123456789ABCDEF0
    one, lower, upper = element_hashes(torch.tensor([[word, word ^ 1, word ^ (1 << 32)]]), 64)[0]
    assert not torch.equal(one, lower) and not torch.equal(one, upper)
    assert torch.equal(one.view(32, 2).flip(1).flatten(), lower), "columns exchange places"
    assert not torch.equal(one.sort().values, upper.sort().values), "a second key does more"


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_the_right_share_is_kept_and_scaled_so_that_the_mean_stays(probability: float) -> None:
    y = dropout(probability)(torch.full((1, ROWS, COLUMNS), 3.0), torch.tensor([0]))
    kept = y != 0
    spread = math.sqrt(probability * (1 - probability) / y.numel())
    assert float(kept.double().mean()) == pytest.approx(1 - probability, abs=SIGMAS * spread)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 3.0 / (1 - probability)))


@pytest.mark.parametrize("byte", [3, 2])
def test_hashes_fill_256_bins_evenly(byte: int) -> None:
    """Pearson's chi-square has a mean of 255 and a variance of 510."""
    values = (hashes(dropout()) >> (8 * byte)) & 255
    counts = torch.bincount(values.flatten(), minlength=256).double()
    expected = values.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_neighbours_in_a_row_and_in_a_column_are_uncorrelated(probability: float) -> None:
    mask = standardised_mask(dropout(probability))
    for distance in (1, 2, 3, 4, 7, 8, 16, 31, 64, 128, 512):
        assert_uncorrelated(mask[:, distance:], mask[:, :-distance], f"columns {distance} apart")
        assert_uncorrelated(mask[distance:], mask[:-distance], f"rows {distance} apart")


@pytest.mark.parametrize("distance", [1, 2, 8, 64])
def test_no_row_has_a_pattern_of_its_own(distance: int) -> None:
    """If the sign of a correlation differs between rows, it cancels in the sum over all rows. It
    does not cancel in the variance of the rows' sums.
    """
    mask = standardised_mask(dropout(0.5))
    products = mask[:, distance:] * mask[:, :-distance]
    for what, terms in {"elements": mask, "products of neighbours": products}.items():
        variance = float((terms.sum(dim=1) ** 2 / terms.shape[1]).mean())
        assert variance == pytest.approx(1, abs=SIGMAS * math.sqrt(2 / ROWS)), what


def test_pairs_of_rows_and_of_columns_are_uncorrelated() -> None:
    """Of 500,000 correlations, the largest reaches 6.5 deviations once in 20,000 such sets."""
    mask = standardised_mask(dropout(0.5))
    for what, products in {"rows": mask @ mask.T, "columns": mask.T @ mask}.items():
        products.fill_diagonal_(0)
        assert float(products.abs().max()) < 6.5 * math.sqrt(COLUMNS), what


OTHERS = {
    "the next sample": (dropout(), 5),
    "a far sample": (dropout(), 4 + 2**32),
    "padding": (dropout(), -1),
    "another name": (dropout(name="blocks.1.x"), 4),
    "another seed": (dropout(seed=2), 4),
}


@pytest.mark.parametrize("other", OTHERS)
def test_samples_names_and_seeds_have_masks_of_their_own(other: str) -> None:
    layer, sample = OTHERS[other]
    assert_uncorrelated(standardised_mask(dropout()), standardised_mask(layer, sample), other)


@pytest.mark.parametrize("other", OTHERS)
def test_each_bit_differs_in_half_of_the_elements(other: str) -> None:
    layer, sample = OTHERS[other]
    different = hashes(dropout()) ^ hashes(layer, sample)
    for bit in range(16, 32):
        share = float(((different >> bit) & 1).double().mean())
        spread = 0.5 / math.sqrt(different.numel())
        assert share == pytest.approx(0.5, abs=SIGMAS * spread), f"bit {bit}"
