"""The tolerance of later steps is measured on one process. It has a lower limit, that of step 1,
and an upper limit.
"""

import functools
import math
from pathlib import Path

import pytest
import torch

from megaspeed.measurement.verification.comparison import (
    FACTOR,
    LARGEST_WIDENING,
    allowed_at_steps,
    compare_numbers,
    shuffled,
)
from megaspeed.measurement.verification.reference import train_reference
from megaspeed.measurement.verification.verify import train_shuffled, whole_batch
from megaspeed.model.documents import Documents
from megaspeed.model.micro_batch import MicroBatch
from tests.support.tiny import short_documents, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[3] / "LICENSE"


def test_without_a_second_run_every_step_is_allowed_the_same() -> None:
    assert allowed_at_steps(1e-5, [3.0, 2.0, 1.0], []) == [1e-5, 1e-5, 1e-5]


def test_a_later_step_is_allowed_a_multiple_of_the_largest_distance_so_far() -> None:
    reference = [1.0, 2.0, 4.0, 8.0]
    again = [[1.0, 2.0, 4.0 + 4 * 5e-6, 8.0], [1.0, 2.0 + 2 * 2e-6, 4.0, 8.0]]
    allowed = allowed_at_steps(1e-5, reference, again)
    assert allowed == pytest.approx([1e-5, FACTOR * 2e-6, FACTOR * 5e-6, FACTOR * 5e-6])


def test_a_small_distance_narrows_no_limit() -> None:
    assert allowed_at_steps(1e-5, [1.0, 1.0], [[1.0, 1.0 + 1e-9]]) == [1e-5, 1e-5]


def test_step_1_is_never_allowed_more() -> None:
    first, second = allowed_at_steps(1e-5, [1.0, 1.0], [[1.5, 1.0]])
    assert first == 1e-5
    assert second == LARGEST_WIDENING * 1e-5, "the distance stays in the weights"


@pytest.mark.parametrize("wild", [2.0, 1e30, math.inf])
def test_an_unstable_training_is_allowed_no_more_than_the_cap(wild: float) -> None:
    assert allowed_at_steps(1e-5, [1.0, 1.0], [[1.0, wild]])[1] == LARGEST_WIDENING * 1e-5


@pytest.mark.parametrize(("reference", "again"), [(1.0, math.nan), (math.nan, math.nan)])
def test_a_nan_widens_no_limit(reference: float, again: float) -> None:
    allowed = allowed_at_steps(1e-5, [1.0, reference, 1.0], [[1.0, again, 1.0]])
    assert allowed == [1e-5, 1e-5, 1e-5]


# GPT-2, 5 layers x 96, 6 heads, vocabulary 1003, lr 1e-3, 16 samples of 32 tokens a step, fp32:
# gradient norms of steps 7 to 12 in one process, in one process with its samples shuffled three
# times, and on two tensor ranks. pp 2 x dp 2 x tp 2 with ZeRO-3 gives 8.734482 at step 11.
ONE_PROCESS = [1.13473189, 0.968495786, 1.08534956, 0.952282786, 8.73741722, 1.12175429]
SHUFFLED = [
    [1.13473189, 0.968495667, 1.08534992, 0.952283263, 8.7375412, 1.12175655],
    [1.13473189, 0.968495786, 1.08535516, 0.952286839, 8.73858452, 1.12177122],
    [1.13473189, 0.968495727, 1.08535123, 0.952283561, 8.73760509, 1.12175775],
]
TWO_RANKS = [1.13473189, 0.968495548, 1.08533895, 0.95227319, 8.73450184, 1.12171543]


def test_a_step_that_amplifies_rounding_in_one_process_may_differ_between_layouts() -> None:
    strict = compare_numbers("norm", TWO_RANKS, ONE_PROCESS, [1e-5] * 6)
    assert max(d.relative for d in strict) > 30 * 1e-5, "a correct layout was reported as different"
    allowed = allowed_at_steps(1e-5, ONE_PROCESS, SHUFFLED)
    assert all(d.equal for d in compare_numbers("norm", TWO_RANKS, ONE_PROCESS, allowed))
    assert allowed[:2] == [1e-5, 1e-5], "before the first step that amplifies"
    assert allowed[-1] < 1e-2


def test_shuffled_samples_are_the_same_rows_in_another_order() -> None:
    tokens = torch.arange(24).view(6, 4)
    parts = [
        MicroBatch(
            tokens=tokens[rows],
            targets=tokens[rows] + 100,
            samples=torch.arange(rows.start, rows.stop),
            documents=Documents.beginning_at(tokens[rows] % 7 == 0),
        )
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6))
    ]
    documents = Documents.beginning_at(tokens % 7 == 0)
    again = shuffled(parts, seed=1)
    assert [len(part.samples) for part in again] == [2, 2, 2]
    samples = torch.cat([part.samples for part in again]).tolist()
    assert sorted(samples) == list(range(6)) and samples != list(range(6))
    for part in again:
        for row, sample in enumerate(part.samples):
            assert torch.equal(part.tokens[row], tokens[sample])
            assert torch.equal(part.targets[row], tokens[sample] + 100)
            assert part.documents is not None
            assert torch.equal(part.documents.positions[row], documents.positions[sample])

    def order(seed: int) -> list[int]:
        return torch.cat([part.samples for part in shuffled(parts, seed=seed)]).tolist()

    assert order(1) == samples
    assert order(2) != samples


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_process_on_shuffled_samples_differs_by_rounding_alone(
    micro_batches: int, tmp_path: Path
) -> None:
    # This tests dropout and documents separately. Each must stay with its sample.
    run = tiny_run(
        short_documents(TEXT, tmp_path),
        model={"attention_dropout": 0.2, "residual_dropout": 0.2},
        data={"reset_at_documents": True},
        gradient_accumulation_steps=micro_batches,
    )
    corpus = tiny_corpus(run, tmp_path / "cache")
    reference = train_reference(run, functools.partial(whole_batch, run, corpus), 3)
    for other in train_shuffled(run, corpus, 3):
        assert other.losses == pytest.approx(reference.losses, rel=1e-6)
        assert other.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
        gradients = zip(
            other.first_gradients.values(), reference.first_gradients.values(), strict=True
        )
        assert any(not torch.equal(a, b) for a, b in gradients), "the order changed no bit"
