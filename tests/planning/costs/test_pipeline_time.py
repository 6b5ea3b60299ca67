"""The closed form of the pipeline's time, compared with a simulation of its schedule."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspeed.config.model import ModelConfig
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.pipeline.simulation import Durations, simulate
from megaspeed.pipeline.visits import holds_of
from megaspeed.planning.costs import network_time
from megaspeed.planning.costs.network_time import Network, pipeline_seconds
from megaspeed.planning.costs.step_time import (
    LayerParts,
    LayerTime,
    Rates,
    predict_step_time,
    stage_times,
)
from megaspeed.planning.costs.workload import (
    Cluster,
    Measured,
    Workload,
    block_parameters,
    workload_of,
)
from megaspeed.topology.devices import device_named
from megaspeed.topology.grid import Grid
from tests.planning.tiny_runs import FOLDER, from_file, tiny
from tests.support.machine import limit

NOTHING = LayerTime(forward_parts=LayerParts(), backward_parts=LayerParts())

BLOCKS = {
    "equal": (8, 8, 8, 8),
    "more at the start": (10, 8, 8, 6),
    "more in the middle": (6, 8, 11, 7),
    "more at the end": (6, 8, 8, 10),
    "two stages": (16, 16),
    "eight stages": (5, 3, 4, 4, 4, 5, 4, 3),
}


def workload(vocab_size: int = 32_000, **changes: object) -> Workload:
    """Return 32 blocks. With a vocabulary of 256,000, the head takes as long as several blocks."""
    blocks = changes["blocks"]
    assert isinstance(blocks, tuple)
    model = ModelConfig.model_validate(
        {
            "architecture": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11_008,
            "max_position_embeddings": 2048,
        }
    )
    work = Workload(
        model=model,
        sequence_length=2048,
        grid=Grid(pp=len(blocks), dp=8, tp=1, replicate=8),
        micro_batch_size=1,
        micro_batches=8,
        blocks=blocks,
    )
    return replace(work, **changes)  # type: ignore[arg-type]


def cluster(network_bandwidth: float = 50.0) -> Cluster:
    return Cluster(device=device_named("h100-80gb"), network_bandwidth=network_bandwidth)


@pytest.mark.parametrize("vocab_size", [8, 256_000], ids=["no head", "large head"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8, 64])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_the_closed_form_is_that_of_the_timetable(
    blocks: str, schedule: str, micro_batches: int, vocab_size: int
) -> None:
    """The bubbles are equal for gpipe. For 1f1b, they differ by less than 2 % of the pipeline's
    time. With fewer micro-batches than stages, the closed form is up to 11 % too long.

    In the closed form, each stage waits for two messages a micro-batch. But the first and the last
    stage have one neighbour, a stage that waits anyway loses nothing, and a message may arrive
    while its receiver computes. So the closed form is never too short, and at most 2.7 times as
    long.
    """
    work = workload(
        vocab_size,
        blocks=BLOCKS[blocks],
        schedule=schedule,
        micro_batches=micro_batches,
    )
    step = predict_step_time(work, cluster())
    simulated = predict_step_time(work, cluster(), simulates=True)
    pipeline = simulated.total - simulated.dp - simulated.optimizer
    too_long = (step.bubble - simulated.bubble) / pipeline
    has_enough = micro_batches >= work.grid.pp
    if schedule == "gpipe":
        assert too_long == pytest.approx(0, abs=1e-9)
    else:
        assert abs(too_long) < 0.02 if has_enough else -1e-9 < too_long < 0.11
    assert 1 <= step.p2p / simulated.p2p < 2.7
    assert step.total / simulated.total - 1 < (0.02 if has_enough else 0.11)


def test_slow_messages_between_equal_stages_take_the_time_of_the_closed_form() -> None:
    work = workload(8, blocks=(4,) * 8, micro_batches=64)
    step = predict_step_time(work, cluster(1.0))
    simulated = predict_step_time(work, cluster(1.0), simulates=True)
    assert step.p2p > 0.2 * step.total
    assert simulated.p2p == pytest.approx(step.p2p, rel=0.05)


def test_own_work_bubble_and_messages_are_the_length_of_the_timetable() -> None:
    work = workload(blocks=BLOCKS["equal"])
    step = predict_step_time(work, cluster())
    simulated = predict_step_time(work, cluster(), simulates=True)
    forward, backward = stage_times(work, step.layers)
    message = Network(work, cluster()).message
    terms = simulated.terms
    assert sum(terms.values()) - terms["dp"] - terms["optimizer"] == pytest.approx(
        pipeline_seconds(work, Durations(forward=forward, backward=backward, message=message))
    )
    unchanged = {name: step.terms[name] for name in terms if name not in ("bubble", "p2p")}
    assert unchanged == {name: terms[name] for name in unchanged}


def test_a_step_without_a_pipeline_keeps_its_terms() -> None:
    work = workload(blocks=(32,))
    step = predict_step_time(work, cluster())
    assert predict_step_time(work, cluster(), simulates=True) == step


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    forward=st.lists(st.floats(0.9, 1.1), min_size=2, max_size=8),
    further=st.integers(1, 90),
    message=st.sampled_from([0.0, 0.02, 0.3]),
)
@settings(max_examples=40)
def test_many_micro_batches_are_not_all_simulated(
    schedule: str, forward: list[float], further: int, message: float
) -> None:
    """Stages and messages may take any time, so any stage can be the slowest."""
    pp = len(forward)
    work = workload(blocks=(4,) * pp, schedule=schedule, micro_batches=7 * pp + further)
    backward = [2 * each for each in forward]
    durations = Durations(forward=forward, backward=backward, message=message)
    short = pipeline_seconds(work, durations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_time, "_SIMULATED", 1000)
        complete = pipeline_seconds(work, durations)
    assert short == pytest.approx(complete, rel=0.002)


CHUNKS = {
    "equal": (4,) * 8,
    "more at the end": (3, 3, 4, 4, 4, 4, 5, 5),
    "first chunks are larger": (5, 4, 5, 4, 4, 3, 3, 4),
    "three chunks": (3, 3, 2, 3, 3, 2, 3, 3, 2, 3, 2, 3),
}


def chunked(blocks: tuple[int, ...], groups: int, **changes: object) -> Workload:
    """Return 32 blocks in chunks of four pipeline stages."""
    work = workload(changes.pop("vocab_size", 8), blocks=blocks)  # type: ignore[arg-type]
    grid = Grid(pp=4, dp=8, tp=1, replicate=1 if "zero_stage" in changes else 8)
    return replace(work, grid=grid, groups=groups, **changes)  # type: ignore[arg-type]


SHAPES = [(4, 1), (8, 1), (8, 2), (13, 3), (32, 1), (32, 4), (32, 8), (170, 4), (170, 42)]
"""(micro-batches, groups). Of the last two, not all are simulated."""


@pytest.mark.parametrize("vocab_size", [8, 256_000], ids=["no head", "large head"])
@pytest.mark.parametrize(("micro_batches", "groups"), SHAPES)
@pytest.mark.parametrize("blocks", CHUNKS)
def test_the_closed_form_of_chunks_is_that_of_the_timetable(
    blocks: str, micro_batches: int, groups: int, vocab_size: int
) -> None:
    """The closed form of the bubble assumes that all stages wait for the slowest one in each tick.
    So it is too long, but by less than 8 % of the pipeline's time. A closed form of messages that
    is too short, too, would choose too many chunks.
    """
    work = chunked(CHUNKS[blocks], groups, vocab_size=vocab_size, micro_batches=micro_batches)
    step, simulated = (predict_step_time(work, cluster(), simulates=s) for s in (False, True))
    pipeline = simulated.total - simulated.dp - simulated.optimizer
    assert -0.005 < (step.bubble - simulated.bubble) / pipeline < 0.08
    assert step.p2p / simulated.p2p > 0.99
    assert (step.p2p - simulated.p2p) / pipeline < 0.06


@pytest.mark.parametrize(("micro_batches", "groups"), SHAPES)
@pytest.mark.parametrize("chunks", [2, 4])
def test_the_bubble_of_equal_chunks_is_divided_by_their_number(
    chunks: int, micro_batches: int, groups: int
) -> None:
    """(P - 1) / (v M) of the computation, for any number of groups (Narayanan et al. 2021)."""
    work = chunked((2,) * 4 * chunks, groups, micro_batches=micro_batches)
    rates = Rates(work, cluster())
    layers = rates.layers()._replace(embedding=NOTHING, head=NOTHING)
    for simulates in (False, True):
        step = rates.step(layers, simulates=simulates)
        busy = step.products + step.attention + step.pointwise
        assert step.bubble / busy == pytest.approx(3 / (chunks * micro_batches), abs=1e-9)


@pytest.mark.parametrize(
    ("network_bandwidth", "error"), [(400, 0.03), (150, 0.08), (50, 0.22)], ids=str
)
@pytest.mark.parametrize("gathers", ["chunks", "chunks_ahead"])
@pytest.mark.parametrize(("micro_batches", "groups"), SHAPES[:-2])
def test_what_collectives_of_chunks_add_is_that_of_the_timetable(
    micro_batches: int, groups: int, gathers: str, network_bandwidth: float, error: float
) -> None:
    """The more of them are not hidden, the larger is the error: stages also wait for each other's
    collectives. At 50 GB/s they take up to two thirds of the step.
    """
    work = chunked(
        (2,) * 16,
        groups,
        zero_stage=3,
        micro_batches=micro_batches,
        overlaps_dp=True,
        reductions=groups,
        gather_policy=gathers,
    )
    nodes = replace(cluster(network_bandwidth), gpus_per_node=1)
    step, simulated = (predict_step_time(work, nodes, simulates=s) for s in (False, True))
    # Messages are not compared here.
    assert step.total - step.p2p == pytest.approx(simulated.total - simulated.p2p, rel=error)
    slower = predict_step_time(replace(work, gather_policy="chunks"), nodes, simulates=True)
    assert simulated.dp <= slower.dp + 1e-9


def test_collectives_of_chunks_and_computation_take_turns_on_processors() -> None:
    """Without overlap, a step takes as much longer as its gathers and reductions take."""
    measured = Measured(
        pointwise=3.0, optimizer=7e-9, latency=1e-3, message_bandwidth=1e9, host=1e-3
    )
    processors = replace(cluster(), measured=measured)
    work = chunked(
        (2,) * 16, 2, zero_stage=3, gather_policy="chunks", reductions=2, overlaps_dp=True
    )
    network = Network(work, processors)
    weights = block_parameters(work.model)
    gather = network.collective("shard", "all_gather", 2 * weights)
    reduce = network.collective("shard", "reduce_scatter", 4 * weights)
    gathered = sum(2 for _ in holds_of(work.pipeline, 0))  # the slowest, with the embedding
    expected = gathered * gather + 2 * 8 * reduce
    for simulates in (False, True):
        step = predict_step_time(work, processors, simulates=simulates)
        assert step.dp == pytest.approx(expected)


def test_visits_reduce_as_often_as_there_are_groups() -> None:
    keys = ("parallel.pipeline=2", "parallel.virtual_stages=2", "zero_optimization.stage=2")
    groups = "parallel.micro_batch_groups=2"
    work = workload_of(tiny(*keys, groups, "train_micro_batch_size_per_gpu=1", world_size=4).run)
    assert (work.chunks, work.groups, work.reductions, work.micro_batches) == (2, 2, 2, 8)
    assert (work.blocks, work.blocks_of_stages) == ((1, 1, 1, 1), [2, 2])
    assert work.gather_policy == "layers"
    at_3 = tiny(*keys[:2], groups, "zero_optimization.stage=3", world_size=4).run
    assert workload_of(at_3).gather_policy == "chunks"


@given(
    times=st.lists(st.floats(0.9, 1.1), min_size=24, max_size=24),
    groups=st.sampled_from([1, 3, 6, 20]),
    size=st.integers(4, 30),
    message=st.sampled_from([0.0, 0.02, 0.3]),
)
@settings(max_examples=25, deadline=None)
def test_of_many_groups_or_large_ones_not_all_are_simulated(
    times: list[float], groups: int, size: int, message: float
) -> None:
    work = chunked((2,) * 12, groups, micro_batches=groups * size + groups // 2)
    backward = [2 * each for each in times[:12]]
    durations = Durations(forward=times[12:], backward=backward, message=message)
    complete = simulate(work.pipeline, durations).length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_time, "_CHEAP", 0)
        assert pipeline_seconds(work, durations) == pytest.approx(complete, rel=0.02)


def test_a_timetable_of_35_stages_takes_seconds() -> None:
    run = from_file(FOLDER / "mt_nlg_530b.json", world_size=2240).run
    work = replace(workload_of(run), micro_batches=1920)
    step = predict_step_time(work, cluster())
    began = time.process_time()
    simulated = predict_step_time(work, cluster(), simulates=True)
    assert time.process_time() - began < limit(4)
    assert simulated.total == pytest.approx(step.total, rel=0.01)
