"""The batch equation: two numbers give the third, and train_batch_size never changes."""

import re

import pytest

from megaspeed.config.layout import Batch, StatedBatch, explain_batch, solve_batch
from tests.config.small import only_problem


@pytest.mark.parametrize(
    ("stated", "dp", "batch"),
    [
        (StatedBatch(256, 2, 16), 8, Batch(256, 2, 16)),
        (StatedBatch(256, 2, None), 8, Batch(256, 2, 16)),
        (StatedBatch(256, None, 16), 8, Batch(256, 2, 16)),
        (StatedBatch(None, 2, 16), 8, Batch(256, 2, 16)),
        (StatedBatch(256, None, None), 8, Batch(256, 32, 1)),
        (StatedBatch(None, 2, None), 8, Batch(16, 2, 1)),
        (StatedBatch(256, 2, 15), 8, None),
        (StatedBatch(250, 2, None), 8, None),
        (StatedBatch(250, None, 16), 8, None),
        (StatedBatch(4, None, None), 8, None),
        (StatedBatch(None, None, 16), 8, None),
        (StatedBatch(None, None, None), 8, None),
    ],
)
def test_any_two_give_the_third(stated: StatedBatch, dp: int, batch: Batch | None) -> None:
    assert solve_batch(stated, dp) == batch


def test_the_batch_of_a_step_is_the_same_at_every_data_degree() -> None:
    stated = StatedBatch(48, 2, None)
    solved = [solve_batch(stated, dp) for dp in (1, 2, 3, 4, 6, 8, 12, 24)]
    assert {batch.train_batch_size for batch in solved if batch} == {48}
    assert [batch.gradient_accumulation_steps for batch in solved if batch] == [
        *(24, 12, 8, 6),
        *(4, 3, 2, 1),
    ]


def test_a_triple_that_does_not_multiply_shows_the_equation_and_the_nearest_values() -> None:
    message = only_problem(
        "parallel.tensor=2",
        "train_batch_size=250",
        "gradient_accumulation_steps=16",
        world_size=16,
    )
    assert message == (
        "train_batch_size 250 != train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 16 "
        "x dp 8 (= 256). Nearest: 256 (gradient_accumulation_steps 16) or 240 "
        "(gradient_accumulation_steps 15). dp 8 = world 16 / (pipeline 1 x tensor 2), world from "
        "WORLD_SIZE"
    )


def test_an_anchor_that_does_not_divide_offers_another_micro_batch() -> None:
    assert explain_batch(StatedBatch(250, 2, None), 10, "dp 10") == (
        "train_batch_size 250 is not a multiple of train_micro_batch_size_per_gpu 2 x dp 10 (= "
        "20). Nearest: 240 (gradient_accumulation_steps 12) or 260 (gradient_accumulation_steps "
        "13); or keep 250 with train_micro_batch_size_per_gpu 1, 5, 25. dp 10"
    )


def test_an_undetermined_batch_asks_for_two_keys() -> None:
    message = only_problem(train_batch_size=None, train_micro_batch_size_per_gpu=None, world_size=2)
    assert message.startswith("the batch is not determined: write train_batch_size; ")


def test_every_value_that_is_offered_is_valid() -> None:
    """All small triples: what the message calls nearest must solve the equation."""
    offered = 0
    for dp in (1, 2, 3, 8):
        for train in range(1, 40):
            for micro in (None, 1, 2, 3, 5):
                for steps in (None, 1, 2, 4):
                    stated = StatedBatch(train, micro, steps)
                    if solve_batch(stated, dp) is None:
                        offered += _check_offers(stated, dp)
    assert offered > 1000


def _check_offers(stated: StatedBatch, dp: int) -> int:
    """Solves each offer of the message. Returns their number."""
    message = explain_batch(stated, dp, "")
    offers = re.findall(r"(\d+) \((\w+) (\d+)\)", message)
    for total, key, value in offers:
        if key == "gradient_accumulation_steps":
            offer = StatedBatch(int(total), stated.micro, int(value))
        else:
            offer = StatedBatch(int(total), int(value), stated.accumulation)
        assert solve_batch(offer, dp) is not None, message
    kept = re.search(r"or keep (\d+) with (\w+) ([\d, ]+)", message)
    values = [int(value) for value in kept[3].split(",")] if kept else []
    for value in values:
        micro_is_kept = kept is not None and kept[2] == "train_micro_batch_size_per_gpu"
        offer = StatedBatch(
            stated.train, value if micro_is_kept else None, None if micro_is_kept else value
        )
        assert solve_batch(offer, dp) is not None, message
    assert offers or values, message
    return len(offers) + len(values)
