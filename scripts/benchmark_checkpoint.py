"""Compare saving and loading with DeepSpeed's save_checkpoint and load_checkpoint.

    deepspeed --num_accelerators 2 scripts/benchmark_checkpoint.py

Both save the same engine in the same processes, after two training steps. They take turns:

    save, megaspeed   files hashed and flushed to the disk, a manifest, a rename
    save, DeepSpeed   unchanged: the bytes stay in the page cache
    flush             fsync of DeepSpeed's files, so that they are as safe as ours
    load, megaspeed   the checksum of every file, then the state
    load, DeepSpeed   unchanged

All ranks start together, and the time of the slowest rank is measured. The tables show medians over
the turns. The first turn is a warm-up and is not measured. Both load the files that they have just
written, so the files come from the page cache. The state is set to zero before each load, and must
have the same checksum afterwards.

Then asynchronous saves are measured: how long each blocks the training, and the time of a step with
and without a save in progress. In a last turn, host memory is measured: the largest increase of a
rank's resident set.

Each ZeRO stage runs in separate processes, because DeepSpeed keeps an engine's tensors alive.
"""

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import functools
import hashlib
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megaspeed.checkpoint.folders import CHECKPOINTS, CheckpointFolder
from megaspeed.checkpoint.inspection import newest_complete
from megaspeed.checkpoint.manifest import Checksum
from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.token_file import TokenFile, TokenIndex
from megaspeed.files.durable import flush_folder
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.supervision.answers import broadcast
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import read_launch_environment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.worker import Worker

STEPS_BEFORE = 2
STATE_BYTES_PER_ELEMENT = 12  # an fp32 weight and its two moments

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc_pid_clear_refs(5): VmHWM goes back to VmRSS

Work = Callable[[], object]


@dataclass
class Cost:
    """The cost of one kind of work on the rank where it is highest.

    Attributes:
        seconds: the time of each turn.
        added_bytes: the peak of host memory minus the memory before; None if it is not known.
    """

    seconds: list[float] = field(default_factory=list)
    added_bytes: int | None = None


Measure = Callable[[ParallelContext, Cost, Work], None]


@dataclass
class Figures:
    """The measurements at one ZeRO stage.

    Attributes:
        zero_stage: 1, 2 or 3.
        elements: the number of parameters.
        size_bytes, deepspeed_size_bytes: the size of one checkpoint.
        stalls, background_saves: seconds of each asynchronous save.
        steps, steps_during_save: seconds of each step, without and with a save in progress.
    """

    zero_stage: int
    elements: int
    save: Cost = field(default_factory=Cost)
    deepspeed_save: Cost = field(default_factory=Cost)
    flush: Cost = field(default_factory=Cost)
    checksums: Cost = field(default_factory=Cost)
    load: Cost = field(default_factory=Cost)
    deepspeed_load: Cost = field(default_factory=Cost)
    size_bytes: int = 0
    deepspeed_size_bytes: int = 0
    stalls: list[float] = field(default_factory=list)
    background_saves: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    steps_during_save: list[float] = field(default_factory=list)


def main() -> int:
    """Measure each requested ZeRO stage and print Markdown tables."""
    options = parse_arguments()
    launch = read_launch_environment(os.environ)
    # If one rank fails, a launcher ends the others with this signal. The exception removes the
    # files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as files:
        folder = files.enter_context(temporary_folder(options)) if launch.rank == 0 else None
        stages = [in_a_new_process(options, stage, folder) for stage in options.zero_stages]
    if launch.rank == 0:
        print_tables(stages, options, launch.world_size)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3))
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps-per-turn", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs"),
        help="where a temporary folder is made for all files; on a disk, not in memory",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


@contextlib.contextmanager
def temporary_folder(options: argparse.Namespace) -> Iterator[Path]:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as folder:
        yield Path(folder).absolute()


def in_a_new_process(options: argparse.Namespace, zero_stage: int, folder: Path | None) -> Figures:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_stage, options, zero_stage, folder).result()


def measure_stage(options: argparse.Namespace, zero_stage: int, folder: Path | None) -> Figures:
    """Measure one ZeRO stage on one rank. All ranks use the folder of rank 0."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    launch = read_launch_environment(os.environ)
    grid = Grid(pp=1, dp=launch.world_size, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=600) as context:
        shared = broadcast(context.checkpoint_group, lambda: folder)
        assert shared is not None
        rank = Rank(make_run(options, zero_stage, launch.world_size, shared), context)
        blocking_turn(rank, only_do)
        for _ in range(options.turns):
            blocking_turn(rank, time_it)
        asynchronous_turns(rank, options)
        blocking_turn(rank, measure_memory)
        return rank.figures


def make_run(options: argparse.Namespace, zero_stage: int, world_size: int, folder: Path) -> Run:
    config = parse_config(
        {
            "model": {
                "architecture": "gpt2",
                "vocab_size": options.vocab_size,
                "hidden_size": options.hidden_size,
                "num_hidden_layers": options.layers,
                "num_attention_heads": options.hidden_size // 64,
                "max_position_embeddings": 1024,
            },
            "data": {"sequence_length": options.sequence_length},
            "training": {"steps": 1000, "run_dir": str(folder / f"zero-{zero_stage}")},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": zero_stage},
        }
    )
    return resolve_run(config, World(world_size, "launcher"), name="benchmark")


class Rank:
    """The engine of one rank after its first steps, which both save."""

    def __init__(self, run: Run, context: ParallelContext) -> None:
        self.run = run
        self.context = context
        self.worker = Worker(run, context)
        self.deepspeed = self.worker.engine._engine
        self.checkpointing = Checkpointing(self.worker, corpus_without_text(run))
        elements = sum(map(math.prod, expected_shapes(run.config.model).values()))
        self.figures = Figures(run.zero_stage, elements)
        self._batch = random_batch(run, context)
        for _ in range(STEPS_BEFORE):
            self.train_step()

    @property
    def progress(self) -> Progress:
        """Return the saved counters. Later steps are not loaded, so they are not counted."""
        return Progress(step=STEPS_BEFORE, steps_taken=STEPS_BEFORE)

    def train_step(self) -> None:
        self.worker.train_step(lambda _: self._batch, self.run.config.optimizer.params.lr)

    def asynchronous(self) -> Checkpointing:
        """Return what saves this engine in the background."""
        training = self.run.config.training.model_copy(update={"async_save": True})
        config = self.run.config.model_copy(update={"training": training})
        worker = copy.copy(self.worker)
        worker.run = dataclasses.replace(self.run, config=config)
        return Checkpointing(worker, corpus_without_text(self.run))

    @contextlib.contextmanager
    def must_be_restored(self) -> Iterator[None]:
        """Set the state to zero, and check at the end that it was loaded."""
        before = self._checksum()
        for values in self._state():
            values.zero_()
        yield
        assert self._checksum() == before, "the loaded state is not the saved one"

    def remove_files(self) -> None:
        """Remove all files, so that the next turn has nothing left to flush."""
        dist.barrier(self.context.world_group)
        if self.context.rank == 0:
            shutil.rmtree(self.run.run_dir)
            flush_folder(self.run.run_dir.parent)
        dist.barrier(self.context.world_group)

    def _checksum(self) -> str:
        checksum = Checksum()
        for values in self._state():
            checksum.update(values.cpu().numpy().data)
        return checksum.hexdigest()

    def _state(self) -> Iterator[torch.Tensor]:
        """Yield the weights and moments that this rank holds."""
        for fragment in self.worker.engine.state_fragments():
            yield from (fragment.weights, fragment.exp_avg, fragment.exp_avg_sq)


def random_batch(run: Run, context: ParallelContext) -> MicroBatch:
    generator = torch.Generator().manual_seed(context.dp_rank)
    shape = (run.batch.micro_batch_size, run.config.data.sequence_length + 1)
    ids = torch.randint(run.config.model.vocab_size, shape, generator=generator)
    rows = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(shape[0]))
    return rows.to(context.device)


def corpus_without_text(run: Run) -> PreparedCorpus:
    """Return an empty corpus, because the batches are random."""
    fingerprint = hashlib.sha256(b"").hexdigest()
    index = TokenIndex(
        tokens=0,
        documents=0,
        dtype="<u2",
        largest_id=0,
        vocab_size=run.config.model.vocab_size,
        end_of_text=0,
        tokenizer_fingerprint=fingerprint,
        corpus_fingerprint=fingerprint,
    )
    file = TokenFile(Path(os.devnull), index)
    nothing = Mixture((Component((file,), weight=1.0, name="random batches"),))
    length = run.config.data.sequence_length
    return PreparedCorpus(nothing, None, None, sequence_length=length, seed=0)


def blocking_turn(rank: Rank, measure: Measure) -> None:
    """Save and load once with each of the two."""
    context, figures = rank.context, rank.figures
    checkpointing, engine = rank.checkpointing, rank.deepspeed
    ours, theirs = rank.run.run_dir / CHECKPOINTS, rank.run.run_dir / "deepspeed"

    measure(context, figures.save, lambda: checkpointing.save(rank.progress))
    (report,) = checkpointing.finished()
    assert report.error is None, report.error
    measure(context, figures.deepspeed_save, lambda: engine.save_checkpoint(str(theirs), "saved"))
    measure(context, figures.flush, lambda: flush(theirs, context))
    figures.size_bytes, figures.deepspeed_size_bytes = size_of(ours), size_of(theirs)

    with rank.must_be_restored():
        candidates = CheckpointFolder(ours).newest_first()
        group = context.checkpoint_group
        measure(context, figures.checksums, lambda: newest_complete(candidates, group))
        measure(context, figures.load, lambda: checkpointing.load(report.checkpoint))
    with rank.must_be_restored():
        load = functools.partial(engine.load_checkpoint, str(theirs), "saved")
        measure(context, figures.deepspeed_load, load)
    rank.remove_files()


def asynchronous_turns(rank: Rank, options: argparse.Namespace) -> None:
    """Train a few steps, then save and train while the save is in progress."""
    context, figures = rank.context, rank.figures
    checkpointing = rank.asynchronous()
    for _ in range(options.turns + 1):
        figures.steps += [time_of(context, rank.train_step) for _ in range(options.steps_per_turn)]
        checkpointing.save(rank.progress)
        steps, report = steps_until_saved(rank, checkpointing)
        assert report.error is None, report.error
        figures.steps_during_save += steps
        figures.stalls.append(most(context, report.stall_seconds))
        figures.background_saves.append(most(context, report.seconds))
        rank.remove_files()
    checkpointing.close()


def steps_until_saved(rank: Rank, checkpointing: Checkpointing) -> tuple[list[float], SaveReport]:
    """Return the seconds of each step while a save is in progress on any rank, and the save's
    report.
    """
    steps: list[float] = []
    reports: list[SaveReport] = []
    saving = True
    while saving:
        steps.append(time_of(rank.context, rank.train_step))
        reports += checkpointing.finished()
        saving = most(rank.context, 1 - len(reports)) > 0
    # The save may have ended early in the last step.
    return steps[:-1] or steps, reports[0]


def only_do(context: ParallelContext, cost: Cost, work: Work) -> None:
    del cost
    synchronize(context)
    work()


def time_it(context: ParallelContext, cost: Cost, work: Work) -> None:
    cost.seconds.append(time_of(context, work))


def measure_memory(context: ParallelContext, cost: Cost, work: Work) -> None:
    """Measure host memory. This needs /proc of Linux, and glibc to return free memory first."""
    synchronize(context)
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text(RESET_PEAK)
        before = memory("VmRSS")
    except (OSError, AttributeError):
        work()
        return
    work()
    cost.added_bytes = int(most(context, memory("VmHWM") - before))


def memory(what: str) -> int:
    """Return the bytes of one line of proc_pid_status(5), which counts in KiB."""
    found = re.search(rf"^{what}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{STATUS} has no {what}"
    return int(found[1]) << 10


def time_of(context: ParallelContext, work: Work) -> float:
    """Return the seconds from the start of all ranks to the end of the slowest."""
    synchronize(context)
    start = time.perf_counter()
    work()
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    return most(context, time.perf_counter() - start)


def synchronize(context: ParallelContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(context.world_group)


def most(context: ParallelContext, own: float) -> float:
    """Return the largest of all ranks' numbers."""
    number = torch.tensor(own, dtype=torch.float64, device=context.device)
    dist.all_reduce(number, dist.ReduceOp.MAX, context.world_group)
    return number.item()


def flush(folder: Path, context: ParallelContext) -> None:
    """Flush the files of ``folder`` to the disk. Each rank flushes a part of them."""
    files = files_of(folder)[context.rank :: context.grid.world_size]
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    for inner in {file.parent for file in files}:
        flush_folder(inner)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_of(folder))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def print_tables(stages: Sequence[Figures], options: argparse.Namespace, ranks: int) -> None:
    print(
        f"GPT-2 shape {options.layers} x {options.hidden_size}, vocabulary {options.vocab_size}, "
        f"{stages[0].elements / 1e6:.1f}M parameters, dp {ranks}, bf16, {options.turns} turns\n"
    )
    print_table(
        "Save and load",
        {
            "save, megaspeed (s)": lambda f: seconds(f.save.seconds),
            "save, DeepSpeed (s)": lambda f: seconds(f.deepspeed_save.seconds),
            "save and flush, DeepSpeed (s)": lambda f: seconds(
                map(sum, zip(f.deepspeed_save.seconds, f.flush.seconds, strict=True))
            ),
            "load, megaspeed (s)": lambda f: seconds(
                map(sum, zip(f.checksums.seconds, f.load.seconds, strict=True))
            ),
            "of which checksums (s)": lambda f: seconds(f.checksums.seconds),
            "load, DeepSpeed (s)": lambda f: seconds(f.deepspeed_load.seconds),
            "on disk, megaspeed (MB)": lambda f: megabytes(f.size_bytes),
            "on disk, DeepSpeed (MB)": lambda f: megabytes(f.deepspeed_size_bytes),
        },
        stages,
    )
    print_table(
        "Asynchronous saves",
        {
            "stall, first save (ms)": lambda f: milliseconds(f.stalls[:1]),
            "stall, later ones (ms)": lambda f: milliseconds(f.stalls[1:]),
            "step (ms)": lambda f: milliseconds(f.steps),
            "step while saving (ms)": lambda f: milliseconds(f.steps_during_save),
            "save, to its end (s)": lambda f: seconds(f.background_saves[1:]),
        },
        stages,
    )
    print_table(
        "Host memory that a rank adds",
        {
            "its share of the state (MB)": lambda f: megabytes(
                STATE_BYTES_PER_ELEMENT * f.elements // ranks
            ),
            "save, megaspeed (MB)": lambda f: megabytes(f.save.added_bytes),
            "save, DeepSpeed (MB)": lambda f: megabytes(f.deepspeed_save.added_bytes),
            "checksums (MB)": lambda f: megabytes(f.checksums.added_bytes),
            "load, megaspeed (MB)": lambda f: megabytes(f.load.added_bytes),
            "load, DeepSpeed (MB)": lambda f: megabytes(f.deepspeed_load.added_bytes),
        },
        stages,
    )


def print_table(
    title: str, columns: Mapping[str, Callable[[Figures], str]], stages: Sequence[Figures]
) -> None:
    print(f"{title}:\n")
    print(f"| ZeRO stage | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for figures in stages:
        cells = [str(figures.zero_stage), *(told(figures) for told in columns.values())]
        print(f"| {' | '.join(cells)} |")
    print()


def seconds(turns: Iterable[float]) -> str:
    return f"{statistics.median(turns):.2f}"


def milliseconds(turns: Iterable[float]) -> str:
    return f"{statistics.median(turns) * 1e3:.0f}"


def megabytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(main())
