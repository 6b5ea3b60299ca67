"""What-if against brute force: every layout of 8 ranks is loaded from a file and predicted."""

from itertools import product
from pathlib import Path

import pytest

from megaspeed.analysis.costs.stage_memory import predict_memory
from megaspeed.analysis.costs.traffic import predict_traffic
from megaspeed.analysis.planning.plan import Layout, WhatIf, what_if
from megaspeed.config.errors import ConfigError
from megaspeed.topology.devices import Device
from tests.analysis.planning.tiny_runs import from_file, tiny, tiny_file

Figures = dict[tuple[int, int, int, int, str], tuple[int, int]]


def key_of(layout: Layout) -> tuple[int, int, int, int, str]:
    grid = layout.run.grid
    recomputed = layout.run.config.parallel.activation_checkpointing
    return grid.pp, grid.dp, grid.tp, layout.run.zero_stage, recomputed


def figures_of(found: WhatIf) -> Figures:
    return {key_of(layout): (layout.peak_bytes, layout.sent_bytes) for layout in found.layouts}


def by_brute_force(file: Path, world_size: int) -> Figures:
    figures: Figures = {}
    degrees = range(1, world_size + 1)
    for pp, dp, tp, zero, recompute in product(
        degrees, degrees, degrees, range(4), ("none", "selective", "full")
    ):
        if pp * dp * tp != world_size:
            continue
        changes = (
            f"parallel.pipeline={pp}",
            f"parallel.tensor={tp}",
            f"zero_optimization.stage={zero}",
            f"parallel.activation_checkpointing={recompute}",
        )
        try:
            run = from_file(file, *changes, world_size=world_size).run
        except ConfigError:
            continue
        peak = max(predict_memory(run, stage).peak.total for stage in range(pp))
        sent = max(sum(predict_traffic(run, stage).values()) for stage in range(pp))
        figures[pp, dp, tp, zero, recompute] = peak, sent
    return figures


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("what_if"))


@pytest.fixture(scope="module")
def brute(file: Path) -> Figures:
    return by_brute_force(file, 8)


def test_every_layout_is_there_with_its_figures(file: Path, brute: Figures) -> None:
    found = what_if(from_file(file, world_size=8), None, 8)
    assert figures_of(found) == brute
    # (pp, dp, tp): 4 blocks and 12 heads leave out pp 8 and tp 8: 8 of the 10 products.
    assert len(found.layouts) == 8 * 4 * 3
    assert found.too_large == 0


def test_layouts_that_are_too_large_are_omitted(file: Path, brute: Figures) -> None:
    middle = sorted(peak for peak, _ in brute.values())[len(brute) // 2]
    device = Device(name="tiny", memory_bytes=int(middle / 0.92))
    found = what_if(from_file(file, world_size=8), device, 8)
    fitting = {key: each for key, each in brute.items() if each[0] <= device.usable_bytes}
    assert figures_of(found) == fitting
    assert 0 < len(fitting) < len(brute)
    assert found.too_large == len(brute) - len(fitting)


def test_if_nothing_fits_the_smallest_is_still_reported(file: Path, brute: Figures) -> None:
    found = what_if(from_file(file, world_size=8), Device(name="tiny", memory_bytes=1000), 8)
    assert (found.layouts, found.too_large) == ((), len(brute))
    assert found.least_peak_bytes == min(peak for peak, _ in brute.values())


def test_the_best_are_those_that_no_other_beats(file: Path, brute: Figures) -> None:
    found = what_if(from_file(file, world_size=8), None, 8)

    def is_beaten(peak: int, sent: int) -> bool:
        return any(
            other_peak <= peak and other_sent <= sent and (other_peak, other_sent) != (peak, sent)
            for other_peak, other_sent in brute.values()
        )

    best = {key for key, (peak, sent) in brute.items() if not is_beaten(peak, sent)}
    assert {key_of(layout) for layout in found.layouts if layout.is_best} == best
    assert 1 <= len(best) < len(brute)


def test_the_layouts_are_ranked_by_their_peak(file: Path) -> None:
    found = what_if(from_file(file, world_size=8), None, 8)
    peaks = [layout.peak_bytes for layout in found.layouts]
    assert peaks == sorted(peaks)


def test_tensor_groups_are_as_wide_as_a_node_unless_stated_otherwise(file: Path) -> None:
    training = from_file(file, world_size=8)

    def widest(gpus_per_node: int, largest_tensor: int | None = None) -> int:
        layouts = what_if(training, None, gpus_per_node, largest_tensor).layouts
        return max(layout.run.grid.tp for layout in layouts)

    assert (widest(2), widest(2, 4), widest(8, 1)) == (2, 4, 1)


def test_a_layout_is_reached_by_its_text(file: Path) -> None:
    training = from_file(file, world_size=8)
    for layout in what_if(training, None, 8).layouts[::7]:
        assert from_file(file, *layout.set_text, world_size=8).run == layout.run


def test_traffic_across_nodes_is_that_of_the_axes_that_cross() -> None:
    training = tiny("train_micro_batch_size_per_gpu=1", world_size=4)
    layouts = {key_of(layout): layout for layout in what_if(training, None, 2).layouts}
    inside = layouts[1, 2, 2, 0, "none"]  # tp 0 1 | 2 3 within a node, dp 0 2 across
    assert 0 < inside.sent_across_nodes_bytes < inside.sent_bytes
    across = layouts[1, 4, 1, 0, "none"]  # dp 0 1 2 3 over both nodes
    assert across.sent_across_nodes_bytes == across.sent_bytes
    one_node = what_if(training, None, 4).layouts
    assert {layout.sent_across_nodes_bytes for layout in one_node} == {0}
