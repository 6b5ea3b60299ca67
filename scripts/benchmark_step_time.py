"""Step time beside Hugging Face's GPT-2 of the same shape under plain DeepSpeed.

    deepspeed --num_accelerators 2 scripts/benchmark_step_time.py

Both models, their ZeRO engines and their batches live in the same processes and take turns, a few
steps each, so that a drift of the machine's speed touches both. The ZeRO stage, the data degree,
bf16, the micro-batches, torch's fused AdamW and the gradient clipping are the same. What is printed
is the median time of a step of each, and the median of the ratios of neighbouring turns.
"""

import argparse
import dataclasses
import os
import statistics
import sys

from plain_deepspeed import Step, plain_deepspeed_step, random_batch, time_steps

from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import read_launch_environment
from megaspeed.training.worker import Worker


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a step in each turn, ours and Hugging Face's side by side."""

    megaspeed: list[float]
    hugging_face: list[float]

    @property
    def ratio(self) -> float:
        """Median over the turns of our time over theirs; below 1 is faster."""
        return statistics.median(
            a / b for a, b in zip(self.megaspeed, self.hugging_face, strict=True)
        )


def main() -> int:
    """Times each ZeRO stage asked for and prints a Markdown table."""
    options = parse_arguments()
    launch = read_launch_environment(os.environ)
    grid = Grid(pp=1, dp=launch.world_size, tp=1)
    rows = []
    with ParallelContext.create(grid, launch, timeout_seconds=600) as context:
        for zero_stage in options.zero_stages:
            run = make_run(options, zero_stage, launch.world_size)
            rows.append((zero_stage, time_both(run, context, options)))
    if launch.rank == 0:
        print_table(rows, run, options)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps-per-turn", type=int, default=2)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_run(options: argparse.Namespace, zero_stage: int, world_size: int) -> Run:
    """The JSON that both sides get."""
    config = parse_config(
        {
            "model": {
                "architecture": "gpt2",
                "vocab_size": options.vocab_size,
                "hidden_size": options.hidden_size,
                "num_hidden_layers": options.layers,
                "num_attention_heads": options.hidden_size // 64,
                "max_position_embeddings": options.sequence_length,
            },
            "data": {"sequence_length": options.sequence_length},
            "training": {"steps": 1000},
            "train_micro_batch_size_per_gpu": options.micro_batch_size,
            "gradient_accumulation_steps": options.micro_batches,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 5e7},
        }
    )
    return resolve_run(config, name="benchmark", world_size=world_size, world_source="launcher")


def time_both(run: Run, context: ParallelContext, options: argparse.Namespace) -> Timing:
    batches = [random_batch(run, context, m) for m in range(options.micro_batches)]
    ours = megaspeed_step(run, context, batches)
    theirs = plain_deepspeed_step(run, context, batches)
    timing = Timing([], [])
    for turn in range(options.turns + 1):
        seconds = [time_steps(step, options.steps_per_turn, context) for step in (ours, theirs)]
        if turn > 0:  # the first turn warms both up
            timing.megaspeed.append(seconds[0])
            timing.hugging_face.append(seconds[1])
    return timing


def megaspeed_step(run: Run, context: ParallelContext, batches: list[MicroBatch]) -> Step:
    worker = Worker(run, context)
    return lambda: worker.train_step(batches.__getitem__, run.config.optimizer.params.lr)


def print_table(rows: list[tuple[int, Timing]], run: Run, options: argparse.Namespace) -> None:
    print(
        f"GPT-2 shape {options.layers} x {options.hidden_size}, vocabulary {options.vocab_size}, "
        f"{options.sequence_length} tokens, {run.batch.micro_batch_size} samples x "
        f"{options.micro_batches} micro-batches x dp {run.grid.dp}, bf16, {options.turns} turns"
    )
    print("| ZeRO stage | megaspeed (ms) | Hugging Face + DeepSpeed (ms) | ratio |")
    print("|---|---|---|---|")
    for zero_stage, timing in rows:
        ours, theirs = map(statistics.median, (timing.megaspeed, timing.hugging_face))
        print(f"| {zero_stage} | {ours * 1e3:.0f} | {theirs * 1e3:.0f} | {timing.ratio:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
