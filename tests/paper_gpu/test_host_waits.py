"""In a step, the host waits for the device once: for the norm, the loss and the flags together.

While the host waits, it launches nothing, so the device has no work after the wait.
"""

from typing import Any

import pytest
from deepspeed.comm.comm import comms_logger

from megaspeed.model.dropout import random_key
from megaspeed.tensor_parallel.drawing import Draw
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import engine, workarounds
from tests.paper_gpu.accelerator import paper_accelerator
from tests.paper_gpu.cases import CASES, experts, zero
from tests.paper_gpu.fake_world import batches, fake_rank, paper_run
from tests.paper_gpu.paper_step import paper_step
from tests.paper_gpu.recorder import Recorder
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_the_device_once_a_step(pool: RankPool, case: str) -> None:
    step = paper_step(pool, **CASES[case])
    assert step.device_waits == {}
    # Ranks that share experts read how many tokens they exchange.
    assert all("tensor_parallel/experts.py" in place for place in step.event_waits)
    ((place, count),) = step.reads.items()
    assert "all_gather_numbers" in place and count == 1


@pytest.mark.parametrize("recomputation", ["none", "full"])
@pytest.mark.parametrize(("exchange", "waits"), [("all_to_all", 2 * 3), ("all_gather", 0)])
def test_the_host_waits_for_exchanged_tokens_once_for_each_block_and_micro_batch(
    pool: RankPool, exchange: str, waits: int, recomputation: str
) -> None:
    """There are 2 blocks and 3 micro-batches. A recomputation and a backward do not wait."""
    shared = {"activation_checkpointing": recomputation}
    step = paper_step(pool, **experts(exchange, 1, parallel=shared), gradient_accumulation_steps=3)
    assert step.device_waits == {} and sum(step.event_waits.values()) == waits
    assert all(place.endswith(" wait") for place in step.event_waits)
    ((place, count),) = step.reads.items()
    assert "all_gather_numbers" in place and count == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_offload_the_host_waits_for_the_gradients_that_it_reads(
    pool: RankPool, stage: int
) -> None:
    # The norm and the optimizer step run on the host. Before them, the host waits for the stream
    # that copies. Otherwise it would read old memory.
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    step = paper_step(pool, **zero(stage, **offload))
    ((place, count),) = step.device_waits.items()
    assert "gradients.py" in place and count == 1


def _reads_of_a_new_token(launch: LaunchEnvironment, case: str) -> tuple[dict[str, int], ...]:
    changes = {**CASES[case]}
    rank = changes.pop("rank", 0)
    run = paper_run(**changes)
    with paper_accelerator() as accelerator, fake_rank(run, rank) as worker:
        batch, draw = batches(run)(0), Draw(random_key("sample"), 0.8, top_k=5)
        worker.next_tokens([batch], draw)
        accelerator.waits.clear()
        with Recorder() as recorder:
            worker.next_tokens([batch, batch], draw)
    return accelerator.device_waits, dict(recorder.reads)


@pytest.mark.parametrize("case", ["zero3", "3d-first", "3d-last", "zero3-all-gather"])
def test_a_sample_reads_the_device_once_a_token(pool: RankPool, case: str) -> None:
    ((waits, reads),) = pool.run(1, _reads_of_a_new_token, case)
    assert waits == {}
    ((place, count),) = reads.items()
    assert "all_gather_numbers" in place and count == 1


def _reads_with_deepspeeds_overflow_check(launch: LaunchEnvironment) -> dict[str, int]:
    run = paper_run(**zero(1))

    def use_norm(optimizer: Any, norm: float) -> None:
        workarounds.use_norm(optimizer, norm)
        # Deletes the attribute of the instance; the method of the class is used again.
        del optimizer.check_overflow

    with pytest.MonkeyPatch.context() as patch, paper_accelerator(), fake_rank(run, 0) as worker:
        patch.setattr(engine, "use_norm", use_norm)
        worker.train_step(batches(run), 1e-3)
        with Recorder() as recorder:
            worker.train_step(batches(run), 1e-3)
    return dict(recorder.reads)


def test_deepspeeds_own_overflow_check_reads_the_device_once_more(pool: RankPool) -> None:
    (reads,) = pool.run(1, _reads_with_deepspeeds_overflow_check)
    assert any("has_overflow" in place for place in reads)


def test_deepspeeds_logger_and_timer_which_wait_for_the_device_are_never_on(
    pool: RankPool,
) -> None:
    assert pool.run(1, _instruments) == [(False, False)]


def _instruments(launch: LaunchEnvironment) -> tuple[bool, bool]:
    with fake_rank(paper_run(comms_logger={"enabled": True}), 0) as worker:
        return comms_logger.enabled, worker.engine._engine.tput_timer.config.enabled
