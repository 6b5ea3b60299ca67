"""A launch that costs speed is reported with its mend, and no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.launch_warnings import launch_warnings
from tests.zero.one_rank import OFFLOAD, small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
BY_SRUN = LaunchEnvironment(
    rank=0, world_size=16, local_rank=0, local_world_size=8, source="SLURM_*"
)
BY_TORCHRUN = replace(BY_SRUN, source="RANK/WORLD_SIZE")


def warnings(launch: LaunchEnvironment, *, offload: bool = False, **machine: int) -> list[str]:
    changes: dict[str, Any] = {"zero_optimization": {"stage": 1, **OFFLOAD}} if offload else {}
    all_of_it = {"visible_gpus": 8, "processors": 96, "threads": 12, **machine}
    return launch_warnings(launch, small_run(TEXT, **changes), **all_of_it)


def test_srun_that_shows_each_rank_its_own_gpu_alone_loses_nvlink() -> None:
    (warning,) = warnings(BY_SRUN, visible_gpus=1)
    assert "NVLink" in warning and "--gpus-per-node=8" in warning


@pytest.mark.parametrize(
    ("launch", "machine"),
    [
        (BY_SRUN, {}),
        (BY_TORCHRUN, {"visible_gpus": 1}),  # that is refused: seven ranks find no GPU
        (replace(BY_SRUN, local_world_size=1), {"visible_gpus": 1}),
        (BY_TORCHRUN, {"threads": 1}),  # nothing is computed on the CPU
    ],
)
def test_other_launches_are_fine(launch: LaunchEnvironment, machine: dict[str, int]) -> None:
    assert warnings(launch, **machine) == []


def test_an_offloaded_optimizer_with_one_thread_is_slow() -> None:
    (warning,) = warnings(BY_TORCHRUN, offload=True, threads=1)
    assert "1 thread a rank" in warning and "OMP_NUM_THREADS=12" in warning
    assert warnings(BY_TORCHRUN, offload=True, threads=12) == []
    assert warnings(BY_TORCHRUN, offload=True, threads=1, processors=8) == [], "one for each rank"
