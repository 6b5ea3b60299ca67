"""The same training with other settings, and the options that give it from a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from megaspeed.config.errors import ConfigError
from tests.planning.tiny_runs import from_file, tiny, tiny_file


def test_the_settings_of_a_run_give_the_run() -> None:
    training = tiny("parallel.pipeline=2", "parallel.tensor=2", "bf16.enabled=true", world_size=8)
    assert training.under(training.settings) == training.run
    assert training.set_text(training.settings) == ()


def test_the_train_batch_stays_and_the_micro_batches_follow() -> None:
    training = tiny(world_size=8)  # 16 samples = 2 x 1 x dp 8
    settings = replace(training.settings, dp=2, tp=4)
    batch = training.under(settings).batch
    assert (batch.train_batch_size, batch.gradient_accumulation_steps) == (16, 4)
    assert training.set_text(settings) == ("parallel.tensor=4",)


@pytest.mark.parametrize(
    ("stated", "batch_text"),
    [
        ((), ("train_micro_batch_size_per_gpu=1",)),
        (
            ("train_micro_batch_size_per_gpu=null", "gradient_accumulation_steps=1"),
            ("gradient_accumulation_steps=8",),
        ),
        (
            ("train_batch_size=null", "gradient_accumulation_steps=1"),
            ("train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=8"),
        ),
        (
            ("gradient_accumulation_steps=1",),
            ("train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=8"),
        ),
        (
            ("parallel.data=8", "parallel.gradient_reduction=per_step"),
            ("parallel.data=2", "train_micro_batch_size_per_gpu=1"),
        ),
    ],
    ids=["micro", "accumulation", "no train batch", "all three", "data"],
)
def test_the_text_is_the_shortest_that_gives_the_variant(
    stated: tuple[str, ...], batch_text: tuple[str, ...], tmp_path: Path
) -> None:
    file = tiny_file(tmp_path)
    training = from_file(file, *stated, world_size=8)
    settings = replace(
        training.settings,
        dp=2,
        pp=2,
        tp=2,
        zero_stage=3,
        sequence_parallel=True,
        micro_batch_size=1,
    )
    text = training.set_text(settings)
    assert text == (
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "parallel.sequence_parallel=true",
        "zero_optimization.stage=3",
        *batch_text,
    )
    typed = from_file(file, *stated, *text, world_size=8)
    assert typed.run.as_json() == training.under(settings).as_json()


def test_gradient_reduction_follows_the_zero_stage_unless_it_is_stated() -> None:
    training = tiny("zero_optimization.stage=1", world_size=4)
    at_2 = training.under(replace(training.settings, zero_stage=2))
    assert training.run.gradient_reduction == "per_step"
    assert at_2.gradient_reduction == "per_micro_batch"

    chosen = tiny("zero_optimization.stage=1", "parallel.gradient_reduction=per_step", world_size=4)
    at_3 = chosen.under(replace(chosen.settings, zero_stage=3))
    assert at_3.gradient_reduction == "per_step"


def test_values_that_the_file_does_not_state_follow_from_the_variant() -> None:
    """A bucket has the matrices of one block on one rank. With twice the tp, the bucket is half as
    large.
    """
    training = tiny("parallel.tensor=2", "model.hidden_size=3072", world_size=4)
    wider = training.under(replace(training.settings, tp=4, dp=1))
    here = training.run.config.zero_optimization.reduce_bucket_size
    there = wider.config.zero_optimization.reduce_bucket_size
    assert here is not None and there is not None
    assert here == 2 * there


def test_settings_that_break_a_rule_are_refused() -> None:
    training = tiny(world_size=8)
    with pytest.raises(
        ConfigError, match=r"num_hidden_layers 4 must be at least parallel\.pipeline"
    ):
        training.under(replace(training.settings, pp=8, dp=1))
    with pytest.raises(ConfigError, match="train_batch_size 16 is not a multiple"):
        training.under(replace(training.settings, micro_batch_size=4))
