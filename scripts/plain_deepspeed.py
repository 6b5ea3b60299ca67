"""Hugging Face's model under plain DeepSpeed: the baseline for megaspeed's step time.

    python scripts/plain_deepspeed.py --config ds_configs/gpt2_1.5b.json --json figures.json
    torchrun --nproc-per-node 8 scripts/plain_deepspeed.py --config ds_configs/gpt2_1.5b.json

The loop is what a user of transformers writes around ``deepspeed.initialize``: the model in bf16,
torch's fused AdamW, and no other optimization. Shape, batch, ZeRO stage and clipping are those of
the configuration, which must be in bf16 and may only use the data axis. The tokens are random.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import read_launch_environment
from megaspeed.zero.workarounds import declare_no_compiled_ops

Step = Callable[[], object]
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def main() -> int:
    """Times the steps of one run and prints, or writes, the figures."""
    options = parse_arguments()
    launch = read_launch_environment(os.environ)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    run = load_run(
        options.config,
        options.overrides,
        world_size=launch.world_size,
        world_source="launcher",
        device_type=device_type,
    )
    if run.precision != "bf16" or run.grid.dp != launch.world_size:
        problem = "plain DeepSpeed needs bf16.enabled, parallel.pipeline 1 and parallel.tensor 1"
        raise ConfigError([problem], where=options.config)
    grid = Grid(pp=1, dp=launch.world_size, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=600) as context:
        figures = measure(run, context, options.steps)
    if launch.rank == 0:
        text = json.dumps(figures, indent=2)
        print(text)
        if options.json is not None:
            with open(options.json, "w") as file:
                file.write(text + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config_options(parser)
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed (5)")
    parser.add_argument("--json", help="write the figures there too")
    return parser.parse_args()


def measure(run: Run, context: ParallelContext, steps: int) -> dict[str, Any]:
    """Median seconds of a step after one that warms up, and the CUDA allocator's peak."""
    batches = [random_batch(run, context, m) for m in range(run.batch.gradient_accumulation_steps)]
    step = plain_deepspeed_step(run, context, batches)
    time_steps(step, 1, context)
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    seconds = statistics.median(time_steps(step, 1, context) for _ in range(steps))
    return {
        "step_time_seconds": seconds,
        "tokens_per_second": run.tokens_per_step / seconds,
        "allocator_peak_bytes": torch.cuda.max_memory_allocated(context.device) if on_gpu else None,
    }


def random_batch(run: Run, context: ParallelContext, micro_batch: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(1000 * context.dp_rank + micro_batch)
    shape = (run.batch.micro_batch_size, run.config.data.sequence_length + 1)
    ids = torch.randint(run.config.model.vocab_size, shape, generator=generator)
    rows = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(shape[0]))
    return rows.to(context.device)


def plain_deepspeed_step(run: Run, context: ParallelContext, batches: list[MicroBatch]) -> Step:
    """A user's loop over ``deepspeed.initialize(AutoModelForCausalLM)``."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    declare_no_compiled_ops()  # a compiler's half minute, and none of it is in a step
    config = AutoConfig.for_model(
        **hugging_face_config(run.config.model), **NO_TOKENS, use_cache=False
    )
    with context.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    params = run.config.optimizer.params
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": params.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True
        ),
        config=plain_deepspeed_json(run),
    )
    return functools.partial(plain_step, engine, batches)


def plain_deepspeed_json(run: Run) -> dict[str, Any]:
    """The run's JSON, with portions that let ZeRO-3 gather two blocks at a time, as ours does.

    With its own defaults, DeepSpeed would keep a small model gathered from forward to backward.
    """
    values = run.config.deepspeed_json()
    for key in ("optimizer", "scheduler"):
        values.pop(key, None)
    block = 12 * run.config.model.hidden_size**2
    values["zero_optimization"] = {
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        **values["zero_optimization"],
    }
    return values


def plain_step(engine: Any, batches: list[MicroBatch]) -> None:
    engine.train()
    for batch in batches:
        logits = engine(batch.tokens).logits
        engine.backward(F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten()))
        engine.step()


def time_steps(step: Step, count: int, context: ParallelContext) -> float:
    """Mean seconds of a step, from when all ranks are ready to when the slowest is done."""
    synchronize(context)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(context)
    return (time.perf_counter() - start) / count


def synchronize(context: ParallelContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(context.world_group)


if __name__ == "__main__":
    sys.exit(main())
