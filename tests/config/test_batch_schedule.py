"""A batch schedule: its phases, the steps of each, and the micro-batches that fit all of them."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.config.batch_schedule import BatchSchedule, Phase, Stretch
from megaspeed.config.layout import StatedBatch, World, solve_batch
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.pipeline.schedules import pipeline_of
from megaspeed.planning.prediction import predict
from tests.config.small import small


def run_with(schedule: str, world: int = 1, **keys: object) -> Run:
    values = small(train_batch_size=None, train_batch_size_schedule=schedule, **keys)
    return resolve_run(parse_config(values), World(world, "test"), name="run")


def test_starts_are_tokens_if_they_have_a_unit_and_otherwise_steps() -> None:
    tokens = BatchSchedule.of("0:512 1.5B:1024, 80b:2048", None)
    assert tokens.counts_tokens
    assert tokens.phases == (Phase(0, 512), Phase(1_500_000_000, 1024), Phase(80 * 10**9, 2048))
    steps = BatchSchedule.of("0:512 1000:256", None)
    assert not steps.counts_tokens and steps.batches == [256, 512]
    assert BatchSchedule.of(None, 7).phases == (Phase(0, 7),)


def test_a_phase_begins_with_the_first_step_after_its_start() -> None:
    """With 10 tokens a sample, steps of 2 samples end at 20, 40, 60 tokens."""
    schedule = BatchSchedule.of("0:2 0.05K:3 0.06K:5", None)
    stretches = list(schedule.stretches(10, last_step=5))
    assert stretches == [Stretch(0, 0, 3, 2), Stretch(3, 60, 2, 5)], "50 and 60 are reached at 60"
    assert list(schedule.first_steps(10, 5)) == [(0, 2), (2, 2), (4, 2), (6, 5), (11, 5)]
    assert list(schedule.stretches(10, step=4, tokens=110, last_step=4)) == []


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9)), max_size=5),
    st.booleans(),
    st.integers(1, 60),
)
def test_stretches_are_the_steps_one_after_the_other(
    parts: list[tuple[int, int]], counts_tokens: bool, last_step: int
) -> None:
    starts = itertools.accumulate(length for length, _ in parts)
    later = (Phase(start, batch) for start, (_, batch) in zip(starts, parts, strict=True))
    schedule = BatchSchedule((Phase(0, 4), *later), counts_tokens)
    step = tokens = 0
    expected = []
    while step < last_step:
        batch = schedule.batch(step, tokens)
        expected.append((tokens // 3, batch))
        step, tokens = step + 1, tokens + 3 * batch
    assert list(schedule.first_steps(3, last_step)) == expected
    by_tokens = schedule.stretches(3, all_tokens=tokens)
    assert sum(stretch.steps for stretch in by_tokens) == last_step
    # From the middle, the same steps follow.
    half = last_step // 2
    done = 3 * sum(batch for _, batch in expected[:half])
    rest = schedule.stretches(3, step=half, tokens=done, last_step=last_step)
    assert [s.batch for s in rest for _ in range(s.steps)] == [b for _, b in expected[half:]]


def test_the_largest_batch_is_that_of_the_run_and_micro_batches_fit_all() -> None:
    run = run_with("0:8 10:24", world=2)
    assert (run.batch.train_batch_size, run.batch.micro_batch_size) == (24, 2)
    numbers = {b: phase.batch.gradient_accumulation_steps for b, phase in run.phases.items()}
    assert numbers == {8: 2, 24: 6}
    assert run.phases[24] is run
    assert run.phases[8].tokens_per_step == 8 * 32
    again = resolve_run(parse_config(run.as_json()), World(2, "test"), name="run")
    assert again.config == run.config, "config.json is the same run"


@pytest.mark.parametrize(
    ("train", "others", "dp", "fewest", "expected"),
    [
        (48, (32,), 2, 1, (8, 3)),  # both are multiples of 16
        (48, (32,), 2, 4, (4, 6)),  # 4 micro-batches in the batch of 32, 6 in that of 48
        (48, (32,), 2, 3, (4, 6)),
        (48, (20,), 4, 1, (1, 12)),
        (48, (18,), 4, 1, None),
    ],
)
def test_an_omitted_micro_batch_divides_every_batch(
    train: int, others: tuple[int, ...], dp: int, fewest: int, expected: tuple[int, int] | None
) -> None:
    found = solve_batch(StatedBatch(train, None, None, fewest, others), dp)
    numbers = found and (found.micro_batch_size, found.gradient_accumulation_steps)
    assert numbers == expected


def test_the_groups_of_micro_batches_follow_the_batch_only_if_they_are_auto() -> None:
    keys = {"pipeline": 2, "virtual_stages": 2}
    run = run_with("0:8 10:24", world=2, parallel=keys)
    groups = {batch: pipeline_of(phase).groups for batch, phase in run.phases.items()}
    assert groups == {8: 2, 24: 6}
    again = resolve_run(parse_config(run.as_json()), World(2, "test"), name="run")
    assert again.as_json() == run.as_json(), "the file in the run folder is valid"
    stated = run_with("0:8 10:24", world=2, parallel={**keys, "micro_batch_groups": 2})
    assert {pipeline_of(phase).groups for phase in stated.phases.values()} == {2}


def test_a_length_in_tokens_counts_the_steps_of_each_phase() -> None:
    """A step has 8 x 32 = 256 tokens, and 768 after step 10."""
    run = run_with("0:8 10:24", training={"steps": None, "tokens": 5_000})
    assert run.steps == 10 + 4
    assert list(run.stretches()) == [Stretch(0, 0, 10, 8), Stretch(10, 2_560, 4, 24)]


def test_the_predicted_memory_is_that_of_the_batch_that_keeps_the_most_activations() -> None:
    """15 micro-batches are one group of 15 for each of 8 stages, and 16 are two groups of 8."""
    model = {"num_hidden_layers": 16, "max_position_embeddings": 64}
    keys: dict[str, Any] = {"model": model, "parallel": {"pipeline": 8, "virtual_stages": 2}}
    keys |= {"train_micro_batch_size_per_gpu": 1}
    run = run_with("0:15 9:16", world=8, **keys)
    alone = (run_with(f"0:{batch}", world=8, **keys) for batch in (15, 16))
    of_15, of_16 = (predict(each, "cuda").fullest.peak_bytes for each in alone)
    assert predict(run, "cuda").fullest.peak_bytes == of_15 > of_16
