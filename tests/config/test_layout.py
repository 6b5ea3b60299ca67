"""The layout of a run over the processes: the batch equation, the grid, and spare ranks."""

import itertools
import re
from pathlib import Path

import pytest

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import (
    Batch,
    StatedBatch,
    World,
    explain_batch,
    find_grid,
    solve_batch,
)
from megaspeed.config.loading import parse_config
from megaspeed.config.rules import divisors
from megaspeed.topology.grid import Grid
from tests.config.small import load, patch, problems, small, write


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


def test_every_value_that_is_offered_is_valid() -> None:
    """This tests all small triples. The values that the message calls nearest must solve the
    equation.
    """
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
    """Check that each offer of the message solves the equation. Return their number."""
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


def test_auto_data_degree_is_what_remains() -> None:
    config = parse_config(small(train_batch_size=24, parallel={"pipeline": 2, "tensor": 4}))
    assert find_grid(config, World(24, "x")) == Grid(pp=2, dp=3, tp=4, replicate=3)
    assert find_grid(config, World(20, "x")) is None


def test_a_world_has_at_least_one_process() -> None:
    with pytest.raises(ConfigError, match=r"world size 0 \(from --world-size\)"):
        World(0, "--world-size")


def test_divisors_are_all_and_ascending() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize(
    ("world", "overrides", "grid", "spare"),
    [
        # 16 samples in micro-batches of 2: dp 5, 6 and 7 do not divide
        (7, (), Grid(1, 4, 1, 4), 3),
        (8, (), Grid(1, 8, 1, 8), 0),
        (7, ("parallel.tensor=2",), Grid(1, 2, 2, 2), 3),
        (7, ("parallel.tensor=2", "parallel.pipeline=2"), Grid(2, 1, 2), 3),
        (7, ("parallel.data=2",), Grid(1, 2, 1, 2), 5),
        # dp is a multiple of the replicas.
        (7, ("parallel.replicate=2", "zero_optimization.stage=1"), Grid(1, 4, 1, 2), 3),
    ],
)
def test_spare_ranks_are_those_beyond_the_largest_layout_that_keeps_the_batch(
    tmp_path: Path, world: int, overrides: tuple[str, ...], grid: Grid, spare: int
) -> None:
    file = write(tmp_path / "run.json", small())
    run = load(file, "parallel.spare_ranks=true", *overrides, world_size=world)
    assert (run.grid, run.spare_ranks) == (grid, spare)
    assert (run.batch.train_batch_size, run.batch.micro_batch_size) == (16, 2)
    written = write(tmp_path / "resolved.json", run.as_json())
    again = load(written, world_size=world)
    assert (again.grid, again.spare_ranks) == (grid, spare)


EXPERTS = (
    "model.architecture=mixtral",
    "model.intermediate_size=384",
    "model.num_experts=12",
    "model.num_experts_per_tok=2",
)


@pytest.mark.parametrize(
    ("overrides", "grid"),
    [
        ("", Grid(1, 12, 1, ep=4, expert_shard=3)),
        ("parallel.expert=12", Grid(1, 12, 1, ep=12)),
        ("zero_optimization.stage=0", Grid(1, 12, 1, 12, ep=4)),
        ("parallel.tensor=2", Grid(1, 6, 2, ep=4, expert_shard=3)),
        ("parallel.context=2 parallel.tensor=2", Grid(1, 3, 2, cp=2, ep=4, expert_shard=3)),
        ("parallel.pipeline=3", Grid(3, 4, 1, ep=4)),
        # The 6 ranks of a replica hold all experts three times, once, or a half of them once.
        ("parallel.replicate=2 parallel.expert=2", Grid(1, 12, 1, 2, ep=2, expert_shard=3)),
        ("parallel.replicate=2 parallel.expert=6", Grid(1, 12, 1, 2, ep=6)),
        ("parallel.replicate=2 parallel.expert=12", Grid(1, 12, 1, 2, ep=12)),
        ("parallel.replicate=12 parallel.expert=4", Grid(1, 12, 1, 12, ep=4)),
    ],
)
def test_copies_of_experts_are_partitioned_over_the_ranks_of_a_replica(
    overrides: str, grid: Grid
) -> None:
    words = ("zero_optimization.stage=1", "parallel.expert=4", *overrides.split())
    config = parse_config(small(**patch(*EXPERTS, *words), train_batch_size=24))
    assert find_grid(config, World(12, "x")) == grid
    copies = grid.expert_copies
    assert copies.ranks * (grid.ep or 1) == grid.dp_cp * grid.tp
    # The partitions of an expert are within one replica of the other parameters.
    for group in grid.groups_along(copies.shard_axis):
        assert len({grid.index_along(rank, "replica") for rank in group}) == 1 or grid.shard == 1


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("spare", ["false", "true"])
def test_valid_expert_degrees_are_those_that_pass(stage: int, spare: str) -> None:
    """Every degree is tried. A wrong expert degree hides no other mistake."""
    refused = 0
    for world, cp, tp, replicate in itertools.product((4, 6, 7, 12), (1, 2), (1, 2), (1, 2, 3)):
        words = (
            *EXPERTS,
            f"zero_optimization.stage={stage}",
            f"parallel.spare_ranks={spare}",
            f"parallel.context={cp}",
            f"parallel.tensor={tp}",
            f"parallel.replicate={replicate if stage else 1}",
            "train_batch_size=24",
        )
        found = {
            ep: problems(*words, f"parallel.expert={ep}", world_size=world) for ep in range(1, 14)
        }
        passing = [ep for ep, messages in found.items() if not messages]
        if found[1]:  # the processes, the batch or the replicas do not fit
            assert all(set(found[1]) <= set(messages) for messages in found.values())
            continue
        for message in itertools.chain(*found.values()):
            assert message.endswith(f"valid parallel.expert: {', '.join(map(str, passing))}")
            refused += 1
    assert refused > 50
