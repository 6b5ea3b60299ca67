"""Train with each gradient compression, or measure compression and replicas on a slow link.

    python scripts/benchmark_compression.py train --folder runs/compression
    python scripts/benchmark_compression.py link --megabytes-per-second 10 50
    python scripts/benchmark_compression.py nodes --megabytes-per-second 10
    python scripts/benchmark_compression.py visits --megabytes-per-second 10

``train`` trains ds_configs/zero1.json on 4 data ranks, once for each method and seed. It prints a
Markdown table of the validation losses, relative to those without compression. A run that has
finished is not repeated. ``megaspeed report`` draws the curves.

``link`` emulates a slow link: after each collective of the data axis, a rank waits for as long as
its bytes would take at the given bandwidth. It prints measured and predicted step times. The
prediction is the step time without the waits, plus predicted bytes / bandwidth.

``nodes`` emulates two nodes of two ranks with a link of this bandwidth between them. It trains a
GPT-2 of 8 blocks x 256 at ZeRO-3, with 8 micro-batches and each ``parallel.replicate``. Only groups
with ranks on both nodes wait. If a node has two such groups, each has half of the bandwidth.

``visits`` trains the same model with 16 micro-batches on 2 pipeline stages x 2 data ranks, without
and with chunks (``parallel.virtual_stages``). The data axis has this bandwidth.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaspeed.cli.options import not_negative, positive
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.measurement.local_ranks import RanksFailed, run_on_ranks
from megaspeed.measurement.watched_step import TrafficLog
from megaspeed.planning.costs.placement import Placement
from megaspeed.planning.costs.traffic import Collective, TrafficAxis, predict_traffic
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import StepInputs, Worker

ROOT = Path(__file__).parents[1]
DATA_RANKS = 4
POWER_SGD: dict[str, Any] = {"type": "powersgd", "rank": 16}
METHODS: Mapping[str, Any] = {
    "none": "none",
    "int8": {"type": "int8"},
    "powersgd": POWER_SGD,
    "powersgd without feedback": {**POWER_SGD, "error_feedback": False},
}
LINK_METHODS: Mapping[str, Any] = {
    "none": "none",
    "bf16": "bf16",
    "int8": {"type": "int8"},
    "powersgd": {**POWER_SGD, "start_step": 1},
}


TWO_NODES = (
    'model={"preset": "gpt2-tiny", "num_hidden_layers": 8, "hidden_size": 256}',
    "zero_optimization.stage=3",
    "train_batch_size=64",
)


def main() -> int:
    """Train or measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "zero1.json")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("--folder", type=Path, required=True, help="for the run folders")
    train.add_argument("--seeds", type=positive, nargs="+", default=[1, 2, 3])
    link = commands.add_parser("link")
    link.add_argument("--megabytes-per-second", type=_speed, nargs="+", default=[10.0, 50.0])
    link.add_argument("--stages", type=int, choices=range(4), nargs="+", default=[0, 1])
    link.add_argument("--steps", type=positive, default=7, help="that are timed, after one more")
    nodes = commands.add_parser("nodes")
    nodes.add_argument("--megabytes-per-second", type=_speed, nargs="+", default=[10.0])
    nodes.add_argument("--steps", type=positive, default=3, help="that are timed, after one more")
    visits = commands.add_parser("visits")
    visits.add_argument("--megabytes-per-second", type=_speed, nargs="+", default=[10.0])
    visits.add_argument("--steps", type=positive, default=3, help="that are timed, after one more")
    options = parser.parse_args()
    show = {
        "train": print_trainings,
        "link": print_step_times,
        "nodes": print_replicas,
        "visits": print_visits,
    }
    try:
        show[options.command](options)
    except (ConfigError, RanksFailed, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _speed(text: str) -> float:
    speed = not_negative(text)
    if speed == 0:
        raise argparse.ArgumentTypeError("it must be above 0")
    return speed


def print_trainings(options: argparse.Namespace) -> None:
    last = {name: [train_once(options, name, seed) for seed in options.seeds] for name in METHODS}
    print("| compression | validation loss after the last step, by seed | relative to none |")
    print("|---|---|---|")
    for name, losses in last.items():
        ratios = [one / other - 1 for one, other in zip(losses, last["none"], strict=True)]
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {name} | {shown} | {', '.join(f'{ratio:+.2%}' for ratio in ratios)} |")


def train_once(options: argparse.Namespace, name: str, seed: int) -> float:
    """Return the last validation loss of one run."""
    folder = options.folder / f"{name.replace(' ', '-')}-{seed}"
    settings = [
        f"parallel.gradient_compression={json.dumps(METHODS[name])}",
        f"training.seed={seed}",
        f"training.run_dir={folder}",
        "training.eval_interval=25",
    ]
    command = ["train", "--config", str(options.config), "--world-size", str(DATA_RANKS)]
    command += ["--set", *settings, *options.overrides]
    program = [sys.executable, "-m", "megaspeed.cli", *command]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses: list[float] = [r["validation_loss"] for r in records if "validation_loss" in r]
    return losses[-1]


# --- the emulated link ----------------------------------------------------------------------------


def print_step_times(options: argparse.Namespace) -> None:
    _print_head(options, "ZeRO", "compression", "sent over dp")
    for stage in options.stages:
        for name, how in LINK_METHODS.items():
            settings = [
                f"zero_optimization.stage={stage}",
                f"parallel.gradient_compression={json.dumps(how)}",
                *options.overrides,
            ]
            _print_row(options, settings, ranks_per_node=1, cells=[f"{stage}", name])


def print_replicas(options: argparse.Namespace) -> None:
    _print_head(options, "replicas", "sent between nodes")
    for replicate in (1, 2):
        settings = [*TWO_NODES, f"parallel.replicate={replicate}", *options.overrides]
        _print_row(options, settings, ranks_per_node=DATA_RANKS // 2, cells=[f"{replicate}"])


def print_visits(options: argparse.Namespace) -> None:
    _print_head(options, "virtual stages", "groups", "sent over dp")
    for chunks, groups in ((1, 1), (2, 8), (2, 4), (2, 2), (2, 1)):
        settings = [
            *TWO_NODES,
            "parallel.pipeline=2",
            "gradient_accumulation_steps=16",
            f"parallel.virtual_stages={chunks}",
            f"parallel.micro_batch_groups={groups}",
            *options.overrides,
        ]
        _print_row(options, settings, ranks_per_node=1, cells=[f"{chunks}", f"{groups}"])


def _print_head(options: argparse.Namespace, *names: str) -> None:
    bandwidths = [f"{speed:g} MB/s: measured, predicted" for speed in options.megabytes_per_second]
    head = [*names, "no waits", *bandwidths]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")


def _print_row(
    options: argparse.Namespace, settings: list[str], *, ranks_per_node: int, cells: list[str]
) -> None:
    run = load_run(options.config, settings, World(DATA_RANKS, "script"))
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    shares = {axis: crossing_share(run, axis, ranks_per_node) for axis in data_axes(run)}
    sent = sum(
        shares.get(axis, 0.0) * size for (axis, _), size in predict_traffic(run, 0, "cpu").items()
    )
    work = (step_times, run, corpus, [0.0, *options.megabytes_per_second], options.steps, shares)
    unhindered, *times = run_on_ranks(*work, world_size=DATA_RANKS, device_type="cpu")[0]
    cells += [f"{sent / 1e6:.2f} MB", f"{unhindered * 1e3:.0f} ms"]
    for measured, speed in zip(times, options.megabytes_per_second, strict=True):
        predicted = unhindered + sent / speed / 1e6
        cells.append(f"{measured * 1e3:.0f} ms, {predicted * 1e3:.0f} ms")
    print(f"| {' | '.join(cells)} |", flush=True)


def data_axes(run: Run) -> list[TrafficAxis]:
    """Return the names of the groups of data ranks."""
    return ["shard", "replica"] if run.grid.is_hybrid else ["dp"]


def crossing_share(run: Run, axis: TrafficAxis, ranks_per_node: int) -> float:
    """Return what a byte that a rank sends along this axis takes of its node's link.

    Nothing if the group is within a node. Otherwise, a ring enters and leaves each node once, and
    the link is shared by all such groups of the node.
    """
    placed = Placement(run.grid, ranks_per_node).along(axis)
    return 0.0 if placed.most_nodes == 1 else ranks_per_node / placed.most_together


def step_times(
    launch: LaunchEnvironment,
    run: Run,
    corpus: PreparedCorpus,
    megabytes_per_second: list[float],
    steps: int,
    shares: Mapping[TrafficAxis, float],
) -> list[float]:
    """Return the median step time at each bandwidth; 0 means that nothing waits."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=300) as context:
        worker, inputs = Worker(run, context), StepInputs(run, corpus, context)
        number, medians = 0, []
        for speed in megabytes_per_second:
            seconds = []
            for _ in range(1 + steps):
                samples = number * run.batch.train_batch_size
                start = time.perf_counter()
                with SlowLink(context, speed * 1e6, shares):
                    worker.train_step(inputs.load(samples), inputs.learning_rate(number))
                seconds.append(time.perf_counter() - start)
                number += 1
            medians.append(statistics.median(seconds[1:]))
        inputs.close()
        return medians


class SlowLink(TrafficLog):
    """Waits after each collective for as long as its bytes take.

    Args:
        context: this rank's groups.
        bytes_per_second: of a node's link; 0 means that nothing waits.
        shares: what a byte takes of the link (``crossing_share``), by axis. Other axes do not wait.
    """

    def __init__(
        self, context: ParallelContext, bytes_per_second: float, shares: Mapping[TrafficAxis, float]
    ) -> None:
        super().__init__(context)
        self._bytes_per_second, self._shares = bytes_per_second, shares

    def _count(self, collective: Collective, group: Any, message: Any) -> None:
        before = self._sent()
        super()._count(collective, group, message)
        if self._bytes_per_second:
            time.sleep((self._sent() - before) / self._bytes_per_second)

    def _sent(self) -> float:
        return sum(self._shares.get(axis, 0.0) * size for (axis, _), size in self.traffic.items())


if __name__ == "__main__":
    sys.exit(main())
