"""A launch that costs speed causes a warning with its remedy. No other launch causes one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaspeed.job.console import launch_warnings
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.tiny import MOE
from tests.zero.one_rank import OFFLOAD, small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
BY_SRUN = LaunchEnvironment(
    rank=0, world_size=16, local_rank=0, local_world_size=8, source="SLURM_*"
)
BY_TORCHRUN = replace(BY_SRUN, source="RANK/WORLD_SIZE")


OFFLOADED = {"zero_optimization": {"stage": 1, **OFFLOAD}}
DROPOUTS = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.25}


def warnings(
    launch: LaunchEnvironment, changes: dict[str, Any] | None = None, **machine: Any
) -> list[str]:
    all_of_it = {"visible_gpus": 8, "has_bf16": False, "processors": 96, "threads": 12, **machine}
    return list(launch_warnings(launch, small_run(TEXT, **(changes or {})), **all_of_it))


def test_srun_that_shows_each_rank_its_own_gpu_alone_loses_nvlink() -> None:
    (warning,) = warnings(BY_SRUN, visible_gpus=1)
    assert "NVLink" in warning and "--gpus-per-node=8" in warning


@pytest.mark.parametrize(
    ("launch", "machine"),
    [
        (BY_SRUN, {}),
        (BY_TORCHRUN, {"visible_gpus": 1}),  # this is refused: seven ranks find no GPU
        (replace(BY_SRUN, local_world_size=1), {"visible_gpus": 1}),
        (BY_TORCHRUN, {"threads": 1}),  # nothing is computed on the CPU
    ],
)
def test_other_launches_are_fine(launch: LaunchEnvironment, machine: dict[str, Any]) -> None:
    assert warnings(launch, **machine) == []


def test_an_offloaded_optimizer_with_one_thread_is_slow() -> None:
    (warning,) = warnings(BY_TORCHRUN, OFFLOADED, threads=1)
    assert "1 thread a rank" in warning and "OMP_NUM_THREADS=12" in warning
    assert warnings(BY_TORCHRUN, OFFLOADED, threads=12) == []
    assert warnings(BY_TORCHRUN, OFFLOADED, threads=1, processors=8) == [], "one for each rank"


def test_a_gpu_with_bf16_and_no_stated_precision_is_slow() -> None:
    (warning,) = warnings(BY_TORCHRUN, has_bf16=True)
    assert "trains in fp32" in warning and "bf16.enabled=true" in warning
    for stated in ({"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}):
        assert warnings(BY_TORCHRUN, stated, has_bf16=True) == []


def test_dropout_is_named_with_its_cost_and_how_to_do_without() -> None:
    changes = {"model": DROPOUTS, "train_batch_size": 2400}
    (warning,) = warnings(BY_TORCHRUN, changes)
    assert "without its fused kernel" in warning
    for name, rate in DROPOUTS.items():
        assert f"model.{name} {rate:g}" in warning and f"model.{name}=0" in warning


def test_dropout_without_attention_dropout_keeps_the_fused_attention() -> None:
    (warning,) = warnings(BY_TORCHRUN, {"model": {"residual_dropout": 0.1}})
    assert "fused" not in warning and warning.endswith("--set model.residual_dropout=0")


def test_experts_without_balance_are_reported_with_a_fix() -> None:
    (warning,) = warnings(BY_TORCHRUN, {"model": MOE})
    assert "a few of them may get most tokens" in warning
    for key in ("router_bias_rate", "router_aux_loss_coef"):
        assert warnings(BY_TORCHRUN, {"model": {**MOE, key: 0.001}}) == []


def test_a_tensor_axis_across_machines_is_reported() -> None:
    run = small_run(TEXT, dp=4, tp=4)
    crossing = replace(BY_TORCHRUN, local_world_size=2)
    (warning,) = launch_warnings(
        crossing, run, visible_gpus=2, has_bf16=False, processors=8, threads=4
    )
    assert "parallel.tensor is 4, but 2 ranks run on this machine" in warning
    within = replace(BY_TORCHRUN, local_world_size=4)
    assert not list(
        launch_warnings(within, run, visible_gpus=4, has_bf16=False, processors=8, threads=4)
    )


def test_torchrun_does_not_restart_because_of_the_configuration() -> None:
    restart = {"training": {"restart": 4}}
    (warning,) = warnings(BY_TORCHRUN, restart, torchrun_restarts=0)
    assert "--max-restarts 4" in warning
    assert warnings(BY_TORCHRUN, restart, torchrun_restarts=4) == []
    assert warnings(BY_TORCHRUN, restart) == [], "deepspeed sets the same variables"
