"""Throughput, MFU, days and cost from a step time."""

import math
from dataclasses import replace

import pytest

from megaspeed.config.resolve import Run
from megaspeed.planning.cluster import read_cluster
from megaspeed.planning.forecast import TYPICAL_FACTOR, complete_training, forecast
from tests.planning.tiny_runs import FOLDER, a100s, from_file, tiny


def run_of_file(name: str, world_size: int, *overrides: str) -> Run:
    return from_file(FOLDER / f"{name}.json", *overrides, world_size=world_size).run


def test_mfu_is_that_of_korthikantis_formula() -> None:
    """Korthikanti et al. 2022, appendix A: 72 B L S H^2 (1 + S / 6H + V / 12LH) FLOPs a step."""
    run = run_of_file("gpt3_175b", 1024)
    made, model = forecast(run, a100s()), run.config.model
    batch, length = run.batch.train_batch_size, run.config.data.sequence_length
    hidden, layers = model.hidden_size, model.num_hidden_layers
    terms = 1 + length / (6 * hidden) + model.vocab_size / (12 * layers * hidden)
    flops = 72 * batch * layers * length * hidden**2 * terms
    full, causal = made.mfu, made.mfu_causal
    assert full is not None and causal is not None
    assert full == pytest.approx(flops / made.seconds / (1024 * 311.8e12), rel=1e-3)
    assert 0.9 * full < causal < full
    assert made.tokens_per_second == pytest.approx(batch * length / made.seconds)


def test_the_ends_of_the_interval_are_the_stated_factor_away() -> None:
    made = forecast(run_of_file("gpt3_175b", 1024), a100s())
    low, high = made.interval_seconds
    assert low < made.seconds < high
    assert made.seconds / low == pytest.approx(TYPICAL_FACTOR)
    assert high / made.seconds == pytest.approx(TYPICAL_FACTOR)
    assert made.warnings == ()


def test_a_short_step_is_less_certain() -> None:
    made = forecast(tiny("bf16.enabled=true", world_size=1).run, a100s())
    assert made.seconds < 0.5 and made.factor > 1.3
    assert any("shorter than 0.5 s" in warning for warning in made.warnings)


def test_a_slow_network_gives_a_warning() -> None:
    run = run_of_file("llama2_70b_64", 64)
    slow = replace(a100s(), network_bandwidth=1.0)
    assert forecast(run, a100s()).step.communication < 0.3 < forecast(run, slow).step.communication
    assert any("communication takes" in each for each in forecast(run, slow).warnings)


def test_days_and_cost_are_those_of_all_steps() -> None:
    made = forecast(run_of_file("gpt3_175b", 1024), a100s())
    tokens = 10**6 * made.run.tokens_per_step
    stated = {"device": "a100-80gb", "nodes": 129, "dollars_per_gpu_hour": 2.0}
    time = complete_training(made, read_cluster(stated), tokens)
    seconds = tokens / made.tokens_per_second
    assert (time.steps, time.gpus) == (10**6, 1032)
    assert time.days == pytest.approx(seconds / 86_400)
    assert time.gpu_hours == pytest.approx(1032 * seconds / 3600)
    assert time.dollars == pytest.approx(2 * time.gpu_hours)
    free = complete_training(made, read_cluster({"device": "a100-80gb"}))
    assert (free.gpus, free.dollars) == (1024, None)


def test_a_window_leaves_fewer_operations() -> None:
    """With the full square, the MFU was 290 % for a window of 64 of 65,536 tokens."""
    window = ("model.sliding_window=64", "model.max_position_embeddings=65536")
    long = ("data.sequence_length=65536", "train_batch_size=8", "train_micro_batch_size_per_gpu=1")
    made = forecast(run_of_file("gpt2_1.5b", 8, *window, *long), a100s())
    full, causal = made.mfu, made.mfu_causal
    assert full is not None and full > 1
    assert causal is not None and causal < 0.7


def test_what_is_not_predicted_is_warned_of() -> None:
    offloaded = run_of_file("zero3_offload", 4)
    assert any("offloading" in warning for warning in forecast(offloaded, a100s()).warnings)
    tf32 = run_of_file("gpt2_1.5b", 8, "bf16.enabled=false", "training.allow_tf32=true")
    assert any("allow_tf32" in warning for warning in forecast(tf32, a100s()).warnings)


def test_the_tokens_of_a_training_are_those_that_it_states() -> None:
    stated = read_cluster({"device": "a100-80gb"})
    run = run_of_file("gpt3_175b", 1024, "training.tokens=300.5B", "train_batch_size=1024")
    time = complete_training(forecast(run, a100s()), stated)
    assert (time.tokens, time.steps) == (300_500_000_000, run.steps)
    assert run.steps == math.ceil(300.5e9 / 1024 / 2048)


def test_each_phase_of_a_batch_schedule_has_its_own_step_time() -> None:
    """Phases of 10B and 90B tokens; the second has four times as many samples in a step."""
    keys = ("train_batch_size=null", "train_batch_size_schedule=0:512,10B:2048")
    run = run_of_file("gpt3_175b", 1024, *keys, "training.steps=null", "training.tokens=100B")
    stated, whole = read_cluster({"device": "a100-80gb"}), forecast(run, a100s(), simulates=True)
    time = complete_training(whole, stated)
    first, second = time.phases
    assert (first.train_batch_size, second.train_batch_size) == (512, 2048)
    assert (first.first_step, first.steps) == (1, math.ceil(10e9 / 512 / 2048))
    assert second.first_step == first.steps + 1
    assert first.steps + second.steps == time.steps == run.steps
    smaller = run_of_file("gpt3_175b", 1024, "train_batch_size=512")
    assert first.step_seconds == forecast(smaller, a100s(), simulates=True).seconds
    assert second.step_seconds == whole.seconds > 3 * first.step_seconds
    assert time.days == pytest.approx(first.days + second.days)
    assert second.days == pytest.approx(second.steps * whole.seconds / 86_400)
