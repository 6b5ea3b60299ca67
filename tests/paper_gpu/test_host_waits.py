"""In a step, the host waits for the device once: for the norm, the loss and the flags together.

While the host waits, it launches nothing, so the device has no work after the wait.
"""

from typing import Any

import pytest
from deepspeed.comm.comm import comms_logger

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import engine, workarounds
from tests.paper_gpu.accelerator import paper_accelerator
from tests.paper_gpu.fake_world import GPT2, LLAMA, batches, fake_rank, paper_run
from tests.paper_gpu.paper_step import paper_step
from tests.paper_gpu.recorder import Recorder
from tests.support.rank_pool import RankPool

OVERLAP = {"overlap_comm": True}
PER_MICRO_BATCH = {"gradient_reduction": "per_micro_batch"}
INT8: dict[str, Any] = {"type": "int8"}
POWER_SGD: dict[str, Any] = {"type": "powersgd", "start_step": 1}
RECOMPUTE = {"activation_checkpointing": "full"}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.1}
ONE_KEY_VALUE_HEAD = {**LLAMA, "num_key_value_heads": 1}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return a run with ZeRO on two data ranks."""
    return {"dp": 2, "zero_optimization": {"stage": stage, **more}}


def replicas(stage: int, *, parallel: Any = None, **more: Any) -> dict[str, Any]:
    """Return a run with ZeRO on two shards and two replicas."""
    hybrid = {"replicate": 2, "gradient_reduction": "per_micro_batch", **(parallel or {})}
    return {**zero(stage, **more), "dp": 4, "parallel": hybrid}


def chunks(number: int, stage: int, rank: int, **more: Any) -> dict[str, Any]:
    """Return a run with ZeRO on two data ranks, and chunks on two pipeline stages."""
    run = zero(stage, **more) | {"pp": 2, "rank": rank, "gradient_accumulation_steps": 4}
    model = {**LLAMA, "num_hidden_layers": 2 * number}
    parallel = {"virtual_stages": number, "micro_batch_groups": 2}
    return {**run, "model": model, "parallel": parallel}


def context(method: str, stage: int, *, parallel: Any = None, **more: Any) -> dict[str, Any]:
    """Return a run with ZeRO on two data ranks, each of which shares sequences with another one."""
    shared = {"context_method": method, **(parallel or {})}
    return {**zero(stage, **OVERLAP), "cp": 2, "model": LLAMA, "parallel": shared, **more}


DOCUMENTS = {"data": {"reset_at_documents": True}}
SELECTIVE = {"activation_checkpointing": "selective"}
OFFLOADED = {"activation_checkpointing": "full_offloaded"}
CASES: dict[str, dict[str, Any]] = {
    "zero0": zero(0),
    "zero0-overlap": zero(0, **OVERLAP),
    "zero1": zero(1),
    "zero1-overlap": zero(1, **OVERLAP),
    "zero2": zero(2),
    "zero2-overlap": zero(2, **OVERLAP) | {"parallel": PER_MICRO_BATCH},
    "zero2-overlap-all-reduce": zero(2, **OVERLAP, use_multi_rank_bucket_allreduce=True)
    | {"parallel": PER_MICRO_BATCH},
    "zero3": zero(3),
    "zero3-overlap": zero(3, **OVERLAP),
    "zero3-per-micro-batch": zero(3) | {"parallel": PER_MICRO_BATCH},
    "zero3-one-rank": {"zero_optimization": {"stage": 3}},
    # The first stage of a pipeline has the embedding, the last one the loss.
    "3d-first": zero(3) | {"pp": 2, "tp": 2, "rank": 0},
    "3d-last": zero(3) | {"pp": 2, "tp": 2, "rank": 7},
    "middle-of-a-pipeline": {"pp": 3, "rank": 1, "model": {"num_hidden_layers": 4}},
    "dropout": {"tp": 2, "model": {**GPT2, **DROPOUT}},
    "sequence-parallel": {"tp": 2, "model": LLAMA, "parallel": {"sequence_parallel": True}},
    "one-key-value-head": {"tp": 2, "model": ONE_KEY_VALUE_HEAD},
    "recompute": {"model": {**LLAMA, **DROPOUT}, "parallel": RECOMPUTE},
    "recompute-selective": {
        "tp": 2,
        "model": LLAMA,
        "parallel": {"sequence_parallel": True, "activation_checkpointing": "selective"},
    },
    **{
        f"{how['type']}-zero{stage}": zero(stage) | {"parallel": {"gradient_compression": how}}
        for how in (INT8, POWER_SGD)
        for stage in (0, 1, 3)
    },
    **{f"zero{stage}-replicas": replicas(stage) for stage in (1, 2, 3)},
    **{f"zero{stage}-replicas-overlap": replicas(stage, **OVERLAP) for stage in (1, 2, 3)},
    "zero3-replicas-once-a-step": replicas(3, parallel={"gradient_reduction": "per_step"}),
    "zero1-replicas-of-all": replicas(1, **OVERLAP, parallel={"replicate": 4}),
    **{
        f"zero{stage}-replicas-{how['type']}": replicas(
            stage, **OVERLAP, parallel={"gradient_compression": how}
        )
        for how in (INT8, POWER_SGD)
        for stage in (1, 3)
    },
    "zero2-chunks-overlap": chunks(2, 2, 2, **OVERLAP),
    "zero3-chunks": chunks(2, 3, 0),
    "zero3-chunks-overlap": chunks(2, 3, 3, **OVERLAP),
    "zero3-chunks-ahead-overlap": chunks(3, 3, 2, **OVERLAP),
    "zero3-ulysses": context("ulysses", 3, tp=2, rank=7),
    "zero3-ulysses-documents": context("ulysses", 3, parallel=SELECTIVE, **DOCUMENTS),
    "zero3-all-gather": context("all_gather", 3, rank=3),
    "zero2-all-gather-documents": context("all_gather", 2, parallel=OFFLOADED, **DOCUMENTS),
    "zero3-norms-of-all-heads": zero(3)
    | {"tp": 2, "model": {**LLAMA, "architecture": "olmo2"}, "parallel": SELECTIVE},
    "zero3-full-offloaded": zero(3) | {"parallel": OFFLOADED},
    "zero1-chunks-full-offloaded": chunks(2, 1, 2, **OVERLAP)
    | {"parallel": {"virtual_stages": 2, **OFFLOADED}},
    "fp32": {"dp": 2, "bf16": {"enabled": False}, "gradient_clipping": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_the_device_once_a_step(pool: RankPool, case: str) -> None:
    step = paper_step(pool, **CASES[case])
    assert step.device_waits == {}
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
        batch = batches(run)(0)
        worker.likeliest_tokens([batch])
        accelerator.waits.clear()
        with Recorder() as recorder:
            worker.likeliest_tokens([batch, batch])
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
