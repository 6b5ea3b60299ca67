"""What-if against brute force, which loads and predicts every variant of 8 ranks from a file."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from rich.table import Table

from megaspeed.config.errors import ConfigError
from megaspeed.config.rules import divisors
from megaspeed.planning.costs.reserved_memory import reserved_memory, verdict
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.step_time import predict_step_time
from megaspeed.planning.costs.workload import Cluster, workload_of
from megaspeed.planning.forecast import forecast
from megaspeed.planning.prediction import predict
from megaspeed.planning.report import what_if_report
from megaspeed.planning.what_if import Variant, WhatIf, what_if
from tests.planning.tiny_runs import FOLDER, a100s, from_file, tiny, tiny_file

Key = tuple[int, int, int, int, str, str, str, int]
Figures = dict[Key, tuple[float, int]]


def key_of(variant: Variant) -> Key:
    run, grid = variant.run, variant.run.grid
    parallel = run.config.parallel
    return (
        *(grid.pp, grid.dp, grid.tp, run.zero_stage),
        *(run.gradient_reduction if run.zero_stage >= 2 else "", parallel.schedule),
        *(parallel.activation_checkpointing, run.batch.micro_batch_size),
    )


def figures_of(found: WhatIf) -> Figures:
    """The figures of the variants with one chunk that keep no extra micro-batches in flight."""
    return {
        key_of(variant): (variant.seconds, variant.peak_bytes)
        for variant in found.variants
        if variant.settings.virtual_stages == 1 and variant.settings.extra_in_flight == 0
    }


def by_brute_force(file: Path, world_size: int, cluster: Cluster) -> Figures:
    """Return time and peak of every variant that the configuration accepts, even if it does not
    fit.
    """
    figures: Figures = {}
    degrees, kinds = range(1, world_size + 1), ("none", "selective", "full")
    reductions = [(0, ""), (1, "")]
    reductions += [(stage, f"per_{each}") for stage in (2, 3) for each in ("step", "micro_batch")]
    schedules, sizes = ("gpipe", "1f1b"), (1, 2, 4, 8, 16)
    for pp, tp, (zero, reduction), schedule, kind, size in product(
        degrees, degrees, reductions, schedules, kinds, sizes
    ):
        dp = world_size // (pp * tp)
        if pp * dp * tp != world_size:
            continue
        if (dp == 1 and zero > 0) or (pp == 1 and schedule == "gpipe"):
            continue  # the same as without ZeRO; the same as 1f1b
        changes = (
            f"parallel.pipeline={pp}",
            f"parallel.tensor={tp}",
            f"parallel.schedule={schedule}",
            f"zero_optimization.stage={zero}",
            f"parallel.gradient_reduction={reduction or 'auto'}",
            f"parallel.activation_checkpointing={kind}",
            f"train_micro_batch_size_per_gpu={size}",
        )
        try:
            run = from_file(file, *changes, world_size=world_size).run
        except ConfigError:
            continue
        seconds = predict_step_time(workload_of(run), cluster).total
        peak = max(StageMemory(run, stage).peak.total for stage in range(pp))
        figures[pp, dp, tp, zero, reduction, schedule, kind, size] = seconds, peak
    return figures


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("what_if"), "zero_optimization.stage=0")


@pytest.fixture(scope="module")
def brute(file: Path) -> Figures:
    return by_brute_force(file, 8, a100s())


def test_every_variant_is_there_with_its_figures(file: Path, brute: Figures) -> None:
    found = what_if(from_file(file, world_size=8), a100s())
    assert figures_of(found) == brute
    assert found.too_large == 0
    # (pp, dp, tp): 4 blocks rule out pp 8 and 12 heads rule out tp 8, so 8 of the 10 products
    # remain.
    assert len({key[:3] for key in brute}) == 8


def test_variants_that_are_too_large_are_omitted(file: Path, brute: Figures) -> None:
    """Reserved memory differs between layouts, so each has its own bound."""
    peaks = sorted(peak for _, peak in brute.values())
    some = from_file(file, world_size=8)
    reserved = reserved_memory(some.run, a100s().device, 8, 0).total
    cluster = a100s(memory_bytes=reserved + peaks[len(peaks) // 2])
    found = what_if(some, cluster)
    for variant in found.variants:
        beside = reserved_memory(variant.run, cluster.device, 8, variant.peak_bytes)
        assert variant.verdict == verdict(variant.peak_bytes, beside, cluster.device)
    assert 0 < len(found.variants) < len(brute)
    assert len(figures_of(found)) + found.too_large == len(brute)
    assert found.best is not None and found.best.verdict == "fits"


def test_if_nothing_fits_the_smallest_is_still_reported(file: Path, brute: Figures) -> None:
    found = what_if(from_file(file, world_size=8), a100s(memory_bytes=1000))
    assert (found.variants, found.best) == ((), None)
    assert found.least_peak_bytes == min(peak for _, peak in brute.values())


def test_the_variants_are_ranked_by_time(file: Path) -> None:
    found = what_if(from_file(file, world_size=8), a100s())
    times = [variant.seconds for variant in found.variants]
    assert times == sorted(times)
    assert found.best is found.variants[0]
    fastest = found.fastest_of_each_grid()
    grids = [variant.run.grid for variant in fastest]
    assert len(set(grids)) == len(grids) == 8
    for variant in fastest:
        same = [each.seconds for each in found.variants if each.run.grid == variant.run.grid]
        assert variant.seconds == min(same)


def test_processes_that_share_the_work_find_the_same(file: Path) -> None:
    training, shares = from_file(file, world_size=8), list[float]()
    with ProcessPoolExecutor(2) as executor:
        found = what_if(training, a100s(), executor, shares.append)
    assert found.as_json() == what_if(training, a100s()).as_json()
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_tensor_groups_are_at_most_as_wide_as_a_node(file: Path) -> None:
    variants = what_if(from_file(file, world_size=8), a100s(gpus_per_node=2)).variants
    assert max(variant.run.grid.tp for variant in variants) == 2


def test_a_variant_is_reached_by_its_text(file: Path) -> None:
    training = from_file(file, world_size=8)
    for variant in what_if(training, a100s()).variants[::17]:
        assert from_file(file, *variant.set_text, world_size=8).run == variant.run


def test_no_variant_is_faster_on_more_nodes() -> None:
    """No variant is faster if the four ranks are on two nodes instead of one."""
    training = tiny("zero_optimization.stage=3", world_size=4)
    fast = what_if(training, a100s(gpus_per_node=4)).variants
    slow = what_if(training, a100s(gpus_per_node=2)).variants
    times = {key_of(variant): variant.seconds for variant in slow}
    same = [variant for variant in fast if key_of(variant) in times]
    assert same and all(times[key_of(variant)] >= variant.seconds for variant in same)


def test_replicas_are_listed_with_the_number_that_is_fastest() -> None:
    """On two nodes of four GPUs, the number of replicas is tried for dp 4 and dp 8."""
    stated, cluster = "zero_optimization.stage=3", a100s(gpus_per_node=4)
    variants = what_if(tiny(stated, world_size=8), cluster).variants
    alone = {key_of(variant): variant for variant in variants if variant.run.grid.replicate == 1}
    several = {key_of(variant): variant for variant in variants if variant.run.grid.is_hybrid}
    assert several and several.keys() <= alone.keys()
    for key, variant in alone.items():
        grid, zero_stage = variant.run.grid, variant.run.zero_stage
        seconds = {}
        for count in divisors(grid.dp)[1:-1] if zero_stage > 0 else []:
            keys = (stated, *variant.set_text, f"parallel.replicate={count}")
            seconds[count] = forecast(tiny(*keys, world_size=8).run, cluster).seconds
        fastest = min(seconds, key=seconds.__getitem__, default=1)
        if seconds and seconds[fastest] < 0.99 * variant.seconds:
            assert several[key].run.grid.replicate == fastest
            assert several[key].seconds == seconds[fastest]
        else:
            assert key not in several


def of_7_5b(*stated: str, network_bandwidth: float, **machine: int) -> WhatIf:
    training = from_file(FOLDER / "zero_7.5b.json", *stated, world_size=8)
    return what_if(training, replace(a100s(**machine), network_bandwidth=network_bandwidth))


def test_chunks_win_if_the_bubble_is_large() -> None:
    """8 stages have 16 micro-batches. Everything else is slow on nodes of one GPU."""
    keys = ("train_batch_size=16", "train_micro_batch_size_per_gpu=1")
    found = of_7_5b(*keys, network_bandwidth=12, gpus_per_node=1)
    best, one_chunk = found.best, figures_of(found).values()
    assert best is not None and best.run.grid.pp == 8
    assert best.settings.virtual_stages == best.run.config.parallel.virtual_stages == 2
    assert best.seconds < 0.95 * min(seconds for seconds, _ in one_chunk)
    typed = from_file(FOLDER / "zero_7.5b.json", *keys, *best.set_text, world_size=8)
    assert typed.run == best.run
    # Other variants with several chunks are listed only if they are the fastest of their degrees.
    fastest = {variant.run.grid: variant for variant in found.fastest_of_each_grid()}
    for variant in found.variants:
        if variant.settings.virtual_stages > 1 and variant.verdict == "fits":
            assert fastest[variant.run.grid].settings.virtual_stages > 1


def test_one_group_of_chunks_wins_at_zero_3_on_a_slow_network() -> None:
    """It gathers each chunk twice a step, not twice a micro-batch."""
    found = of_7_5b(
        "train_batch_size=64",
        "train_micro_batch_size_per_gpu=null",
        "parallel.pipeline=2",
        network_bandwidth=1,
        gpus_per_node=2,
        memory_bytes=int(26.5 * 2**30),
    )
    at_2_4_1 = [each for each in found.variants if (each.settings.pp, each.settings.tp) == (2, 1)]
    best = at_2_4_1[0]
    assert (best.run.zero_stage, best.settings.virtual_stages) == (3, 4)
    assert best.run.config.parallel.micro_batch_groups == workload_of(best.run).reductions == 1
    one_chunk = [each for each in at_2_4_1 if each.settings.virtual_stages == 1]
    assert best.seconds < 0.7 * one_chunk[0].seconds


def test_more_micro_batches_in_flight_win_if_messages_are_slow() -> None:
    """They hide half of the messages of 8 stages, and need more memory."""
    keys = ("train_batch_size=64", "train_micro_batch_size_per_gpu=null")
    found = of_7_5b(*keys, network_bandwidth=3, gpus_per_node=1)
    best = found.best
    assert best is not None and best.run.grid.pp == 8
    assert best.run.config.parallel.extra_in_flight == 5
    seconds, peak_bytes = min(figures_of(found).values())
    assert best.seconds < 0.95 * seconds and best.peak_bytes > 1.2 * peak_bytes
    step = predict_step_time(workload_of(best.run), best.forecast.cluster, simulates=True)
    assert best.seconds == pytest.approx(step.total)
    typed = from_file(FOLDER / "zero_7.5b.json", *keys, *best.set_text, world_size=8)
    assert typed.run == best.run
    parts = list(what_if_report(found))
    (table,) = (part for part in parts if isinstance(part, Table))
    assert next(iter(table.columns[0].cells)) == "8+5"
    assert any(str(part).startswith("pp 8+7: up to 7 more micro-batches") for part in parts)


def test_no_more_micro_batches_are_in_flight_than_hide_as_much() -> None:
    """Of 7 more, two hide nothing: the step is as long, but needs more memory. With one less, it is
    longer.
    """
    keys = ("train_batch_size=64", "train_micro_batch_size_per_gpu=null")
    best = of_7_5b(*keys, network_bandwidth=3, gpus_per_node=1).best
    assert best is not None and best.settings.pp == 8
    training, most = from_file(FOLDER / "zero_7.5b.json", *keys, world_size=8), 7
    runs = [training.under(replace(best.settings, extra_in_flight=n)) for n in range(most + 1)]
    seconds = [forecast(run, best.forecast.cluster).seconds for run in runs]
    assert seconds == sorted(seconds, reverse=True)
    fewest = min(n for n in range(most + 1) if seconds[n] < 1.001 * seconds[most])
    assert 0 < best.settings.extra_in_flight == fewest < most
    assert best.peak_bytes < predict(runs[most], "cuda").fullest.peak_bytes


@pytest.mark.parametrize("extra", [0, 1])
def test_stated_micro_batches_in_flight_are_listed_with_and_without(
    extra: int, tmp_path: Path
) -> None:
    stated = ("parallel.pipeline=2", f"parallel.extra_in_flight={extra}")
    file = tiny_file(tmp_path, *stated, "train_micro_batch_size_per_gpu=1")
    variants = what_if(from_file(file, world_size=4), a100s()).variants
    assert len([variant for variant in variants if not variant.set_text]) == 1
    for variant in variants:
        assert from_file(file, *variant.set_text, world_size=4).run == variant.run
    found = {(variant.run.grid.pp, variant.settings.extra_in_flight) for variant in variants}
    assert {(1, 0), (2, 0), (2, extra), (4, 0)} <= found


@pytest.mark.parametrize("groups", ["auto", "1", "2"])
def test_stated_chunks_are_listed_with_and_without(groups: str, tmp_path: Path) -> None:
    stated = ("parallel.pipeline=2", "parallel.virtual_stages=2", "zero_optimization.stage=2")
    changes = (f"parallel.micro_batch_groups={groups}", "parallel.gradient_reduction=per_visit")
    file = tiny_file(tmp_path, *stated, "train_micro_batch_size_per_gpu=1")
    training = from_file(file, *changes, world_size=4)
    variants = what_if(training, a100s()).variants
    assert [variant.run for variant in variants if not variant.set_text] == [training.run]
    for variant in variants:
        assert from_file(file, *changes, *variant.set_text, world_size=4).run == variant.run
    chunks = {(variant.run.grid.pp, variant.settings.virtual_stages) for variant in variants}
    assert {(1, 1), (2, 1), (2, 2), (4, 1)} <= chunks


@pytest.mark.parametrize(
    "stated",
    [
        ("zero_optimization.stage=1", "parallel.replicate=4"),
        (
            "zero_optimization.stage=3",
            "parallel.replicate=2",
            "parallel.gradient_compression=int8",
            "zero_optimization.overlap_comm=true",
        ),
    ],
    ids=["every rank", "compression that is refused with one replica"],
)
def test_the_stated_number_of_replicas_is_listed(stated: tuple[str, ...]) -> None:
    variants = what_if(tiny(*stated, world_size=4), a100s()).variants
    assert [variant for variant in variants if not variant.set_text]


def test_replicas_that_zero_0_states_are_no_replicas_of_another_stage(tmp_path: Path) -> None:
    file = tiny_file(tmp_path, "zero_optimization.stage=0", "parallel.replicate=4")
    training = from_file(file, world_size=4)
    variants = what_if(training, a100s()).variants
    for variant in variants:
        assert from_file(file, *variant.set_text, world_size=4).run.grid == variant.run.grid
    assert [variant for variant in variants if not variant.set_text]


def test_experts_are_shared_by_none_and_by_as_many_ranks_as_can() -> None:
    """On nodes of 2 GPUs. Each variant is what the configuration with its settings predicts."""
    training = from_file(FOLDER / "experts.json", world_size=8)
    found = what_if(training, cluster := a100s(gpus_per_node=2))
    shared = {(v.settings.pp, v.settings.tp): set[int]() for v in found.variants}
    for variant in found.variants:
        shared[variant.settings.pp, variant.settings.tp].add(variant.settings.ep)
    assert shared == {
        (1, 1): {1, 2, 8},
        (1, 2): {1, 2, 8},
        (2, 1): {1, 2, 4},
        (2, 2): {1, 2, 4},
        (4, 1): {1, 2},
        (4, 2): {1, 2},
    }
    fastest = next(each for each in found.variants if each.settings.ep > 1)
    path = FOLDER / "experts.json"
    again = from_file(path, *fastest.set_text, world_size=8).run
    assert again.grid == fastest.run.grid and again.grid.ep == fastest.settings.ep
    assert forecast(again, cluster).seconds == fastest.seconds
    assert predict(again).fullest.peak_bytes == fastest.peak_bytes
