"""Compare saving and loading with DeepSpeed's save_checkpoint and load_checkpoint.

    deepspeed --num_accelerators 2 scripts/benchmark_checkpoint.py --set zero_optimization.stage=1

The run may have only data ranks. Both save the same engine in the same processes, after two
training steps. They take turns:

    save, megaspeed   files hashed and flushed to the disk, a manifest, a rename
    save, DeepSpeed   unchanged: the bytes stay in the page cache
    flush             fsync of DeepSpeed's files, so that they are as safe as ours
    load, megaspeed   the checksum of every file, then the state
    load, DeepSpeed   unchanged

All ranks start together, and the time of the slowest rank is measured. The table shows medians over
the turns. The first turn is a warm-up and is not measured. Both load the files that they have just
written, so the files come from the page cache. The state is set to zero before each load, and must
have the same checksum afterwards.
"""

import argparse
import contextlib
import logging
import os
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megaspeed.checkpoint.folders import CHECKPOINTS, CheckpointFolder, Checksum
from megaspeed.checkpoint.inspection import newest_complete
from megaspeed.checkpoint.run_state import Progress
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.files.durable import flush_folder
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import read_launch_environment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.worker import StepInputs, Worker

ROOT = Path(__file__).parents[1]

PROGRESS = Progress(step=2, steps_taken=2)
"""The counters when both save."""


def main() -> int:
    """Measure one run and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "zero1.json")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[])
    parser.add_argument("--turns", type=int, default=3)
    text = "a folder to make and to remove; on a disk, not in memory"
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_checkpoint"), help=text)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    launch = read_launch_environment(os.environ)
    # If one rank fails, a launcher ends the others with this signal. The exception removes the
    # files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = [*options.overrides, f"training.run_dir={options.folder.absolute()}"]
    run = load_run(options.config, settings, World(launch.world_size, "launcher"))
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    with (
        contextlib.ExitStack() as files,
        ParallelContext.create(run.grid, launch, timeout_seconds=600) as context,
    ):
        if launch.rank == 0:
            options.folder.mkdir(parents=True)
            files.callback(shutil.rmtree, options.folder)
        comparison = Comparison(run, corpus, context)
        for _ in range(1 + options.turns):
            comparison.take_turn()
        if launch.rank == 0:
            print_table(comparison)
    return 0


class Comparison:
    """The engine of one rank after its first steps, which both save."""

    def __init__(self, run: Run, corpus: PreparedCorpus, context: ParallelContext) -> None:
        self.run = run
        self.context = context
        self.worker = Worker(run, context)
        self.checkpointing = Checkpointing(self.worker, corpus)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.sizes: dict[str, int] = {}
        inputs = StepInputs(run, corpus, context)
        for _ in range(PROGRESS.step):
            self.worker.train_step(inputs.load(0), run.config.optimizer.params.lr)
        inputs.close()

    def take_turn(self) -> None:
        """Save and load once with each of the two."""
        engine, checkpointing = self.worker.engine._engine, self.checkpointing
        ours, theirs = self.run.run_dir / CHECKPOINTS, self.run.run_dir / "deepspeed"
        self.measure("save", lambda: checkpointing.save(PROGRESS))
        (report,) = checkpointing.finished()
        assert report.error is None, report.error
        self.measure("DeepSpeed's save", lambda: engine.save_checkpoint(str(theirs), "saved"))
        self.measure("flush", lambda: self.flush(theirs))
        self.sizes = {"megaspeed": size_of(ours), "DeepSpeed": size_of(theirs)}

        def load() -> None:
            candidates = CheckpointFolder(ours).newest_first()
            newest_complete(candidates, self.context.checkpoint_group)
            checkpointing.load(report.checkpoint)

        with self.must_be_restored():
            self.measure("load", load)
        with self.must_be_restored():
            self.measure("DeepSpeed's load", lambda: engine.load_checkpoint(str(theirs), "saved"))
        # The next turn must have nothing left to flush.
        dist.barrier(self.context.world_group)
        if self.context.rank == 0:
            for folder in (ours, theirs):
                shutil.rmtree(folder)
            flush_folder(self.run.run_dir)
        dist.barrier(self.context.world_group)

    def measure(self, name: str, work: Callable[[], object]) -> None:
        """Note the seconds from the start of all ranks to the end of the slowest."""
        dist.barrier(self.context.world_group)
        start = time.perf_counter()
        work()
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - start, device=self.context.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, self.context.world_group)
        self.seconds[name].append(seconds.item())

    def flush(self, folder: Path) -> None:
        """Flush the files of ``folder`` to the disk. Each rank flushes a part of them."""
        files = files_of(folder)[self.context.rank :: self.context.grid.world_size]
        for file in files:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        for inner in {file.parent for file in files}:
            flush_folder(inner)

    @contextlib.contextmanager
    def must_be_restored(self) -> Iterator[None]:
        """Set the state to zero, and check at the end that it was loaded."""
        before = self._checksum()
        for values in self._state():
            values.zero_()
        yield
        assert self._checksum() == before, "the loaded state is not the saved one"

    def _checksum(self) -> str:
        checksum = Checksum()
        for values in self._state():
            checksum.update(values.cpu().numpy().data)
        return checksum.hexdigest()

    def _state(self) -> Iterator[torch.Tensor]:
        for fragment in self.worker.engine.state_fragments():
            yield from fragment.tensors.values()


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_of(folder))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def print_table(comparison: Comparison) -> None:
    measured = {name: turns[1:] for name, turns in comparison.seconds.items()}
    flushed = zip(measured["DeepSpeed's save"], measured.pop("flush"), strict=True)
    measured["DeepSpeed's save with flush"] = list(map(sum, flushed))
    cells = {"ZeRO stage": f"{comparison.run.zero_stage}"}
    cells |= {f"{name} (s)": f"{statistics.median(turns):.2f}" for name, turns in measured.items()}
    sizes = comparison.sizes.items()
    cells |= {f"on disk, {name} (MB)": f"{size / 1e6:.1f}" for name, size in sizes}
    print(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|\n| {' | '.join(cells.values())} |")


if __name__ == "__main__":
    sys.exit(main())
