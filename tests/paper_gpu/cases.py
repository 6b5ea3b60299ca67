"""Runs with each feature, one rank of which takes a step on paper."""

from typing import Any

from tests.paper_gpu.fake_world import GPT2, LLAMA, MOE

OVERLAP = {"overlap_comm": True}
PER_MICRO_BATCH = {"gradient_reduction": "per_micro_batch"}
INT8: dict[str, Any] = {"type": "int8"}
POWER_SGD: dict[str, Any] = {"type": "powersgd", "start_step": 1}
RECOMPUTE = {"activation_checkpointing": "full"}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.1}
ONE_KEY_VALUE_HEAD = {**LLAMA, "num_key_value_heads": 1}
MUON = {"type": "Muon", "params": {"lr": 0.01}}


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


def experts(exchange: str, stage: int, *, parallel: Any = None, **more: Any) -> dict[str, Any]:
    """Return a run with ZeRO on two data ranks, which share the experts of a block."""
    shared = {"expert": 2, "expert_exchange": exchange, **(parallel or {})}
    return {**zero(stage, **more), "model": MOE, "parallel": shared}


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
    # One shard: the replicas share the sections, and gather the results.
    "zero0-muon": zero(0) | {"model": LLAMA, "optimizer": MUON},
    "zero0-muon-tensor": zero(0) | {"tp": 2, "rank": 3, "model": LLAMA, "optimizer": MUON},
    "zero1-muon-tensor": zero(1, **OVERLAP) | {"tp": 2, "model": LLAMA, "optimizer": MUON},
    "zero3-muon": zero(3) | {"rank": 1, "model": LLAMA, "optimizer": MUON},
    "zero3-experts": zero(3, **OVERLAP) | {"model": MOE, "parallel": SELECTIVE},
    "zero1-experts-recomputed": context("ulysses", 1, rank=1)
    | {"model": MOE}
    | {"parallel": {"context_method": "ulysses", **RECOMPUTE}},
    "zero2-experts-muon": zero(2) | {"rank": 1, "model": MOE, "optimizer": MUON},
    "zero1-expert-axis": experts("all_to_all", 1, **OVERLAP),
    "zero3-expert-axis-recomputed": experts("all_to_all", 3, parallel=RECOMPUTE) | {"dp": 4},
    "zero2-expert-axis-tensor": experts("all_to_all", 2, parallel={"expert": 4})
    | {"tp": 2, "rank": 3},
    "zero3-expert-axis-gathered": experts("all_gather", 3, **OVERLAP) | {"tp": 2, "rank": 2},
    "zero0-expert-axis-gathered-recomputed": experts("all_gather", 0, parallel=RECOMPUTE),
    "zero1-expert-axis-muon": experts("all_to_all", 1) | {"dp": 4, "optimizer": MUON},
    "fp32": {"dp": 2, "bf16": {"enabled": False}, "gradient_clipping": 0.0},
}
"""Name -> JSON keys of ``paper_run``; ``rank`` is the rank whose step is taken."""
