"""A run folder that some ranks do not share is found before anything is trained."""

import os
from pathlib import Path

from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.meeting import RanksDisagree
from megaspeed.training import run_folder
from megaspeed.training.run_folder import check_shared_folder
from tests.rank_pool import RankPool

RANKS = 4
RUN_DIR = Path("runs/tiny")


def complaint(launch: LaunchEnvironment, disks: list[Path]) -> str | None:
    """What this rank says, which has a disk of its own or shares one."""
    os.chdir(disks[launch.rank])
    run_folder._SECONDS_TO_BE_SEEN = 0.3
    grid = Grid(pp=1, dp=RANKS, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=30) as context:
        try:
            check_shared_folder(RUN_DIR, context)
        except RanksDisagree as error:
            return str(error)
    return None


def test_a_folder_that_all_see_is_made_and_left_empty(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(RANKS, complaint, [tmp_path] * RANKS) == [None] * RANKS
    assert list((tmp_path / RUN_DIR).iterdir()) == []


def test_ranks_with_a_disk_of_their_own_are_named(pool: RankPool, tmp_path: Path) -> None:
    """Ranks 2 and 3 are on a second node, on whose disk there is such a folder, too."""
    first, second = nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        (node / RUN_DIR).mkdir(parents=True)
    everyones = pool.run(RANKS, complaint, [first, first, second, second])
    said = everyones[0]
    assert said is not None and everyones == [said] * RANKS
    assert "ranks [2, 3] do not see what rank 0 writes to runs/tiny" in said
    assert "training.run_dir must be on a file system that all nodes share" in said
    assert all(list((node / RUN_DIR).iterdir()) == [] for node in nodes)
