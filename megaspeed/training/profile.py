"""Profile some steps: a trace of each rank, and a table of where the time went.

    step         9          10  11  12            13
                 warm-up    recorded, all timed   the times of step 12 arrive: the table is written

    profile/steps-10-12.rank-0.json.gz    the trace of rank 0, for https://ui.perfetto.dev
    profile/steps-10-12.txt               the table
    profile/steps-10-12.png               step 12 of a pipeline, above two simulations of it

If a rank fails to record or to write, it has no trace, and the run continues. The table does not
need the traces: it has the times of ``Timeline`` on all ranks. The picture has those of the first
rank of each pipeline stage.
"""

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as TorchProfiler

from megaspeed.config.errors import shortened
from megaspeed.config.resolve import Run
from megaspeed.files.durable import write_bytes
from megaspeed.pipeline.picture import save
from megaspeed.pipeline.schedules import Pipeline
from megaspeed.supervision.answers import describe
from megaspeed.topology.activity import OWN_WORK, PARTS, Part
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.training.metrics import own_work
from megaspeed.training.pipeline_step import PipelineStep, StageTimes

PROFILE = "profile"
"""The folder of profiles in a run folder."""

MOST_RANKS = 16
"""How many ranks write a trace by default. A step may have 100,000 events of 200 bytes."""

_MOST_PROBLEMS_NAMED = 2
_SILENT = "99"  # above all log levels of torch's profiler, which prints two lines for each profile

PART_LABELS: Mapping[Part, str] = {
    "compute": "compute",
    "tensor": "exposed communication, tp",
    "context": "exposed communication, cp",
    "expert": "exposed communication, ep",
    "data": "exposed communication, dp",
    "pipeline": "bubble and messages, pp",
    "world": "loss and norm, all ranks",
    "data_loading": "data wait",
    "optimizer": "optimizer",
    "host": "host",
}


def profiled_ranks(grid: Grid, stated: Sequence[int] | None = None) -> list[int]:
    """Return the ranks with a trace; by default all, or one replica, or a rank of each stage."""
    ranks = list(range(grid.world_size))
    if stated is not None:
        return [rank for rank in ranks if rank in stated]
    for axis in ("dp", "cp", "tp"):
        if len(ranks) > MOST_RANKS:
            ranks = [rank for rank in ranks if getattr(grid.coordinates_of(rank), axis) == 0]
    return ranks


class Profile:
    """The profile of a run on one rank. Without ``training.profile``, it does nothing.

    A run that resumes within the profiled steps profiles the rest of them.

    ``finish_gathers`` waits for the collectives that an optimizer step has started. It is called
    before a recording begins or ends: a wait for a collective that was started on the other side of
    this moment can end in a SIGSEGV (torch 2.13, gloo).
    """

    def __init__(
        self, run: Run, context: ParallelContext, finish_gathers: Callable[[], None]
    ) -> None:
        self._finish_gathers = finish_gathers
        stated = run.config.training.profile
        self._run, self._context = run, context
        self._steps, self._records, self._has_begun = range(0), False, False
        if stated is not None:
            self._steps = range(stated.start_step, stated.start_step + stated.steps)
            self._records = context.rank in profiled_ranks(run.grid, stated.ranks)
        self._profiler: TorchProfiler | None = None
        self._problem: str | None = None  # why this rank does not record
        self._times: list[Sequence[Sequence[float]]] = []
        self._last_step: PipelineStep | None = None  # on rank 0, if there is a pipeline
        self.trace = "no trace"
        """A line about the traces: where they are, and which ranks have none."""

    def covers(self, step: int) -> bool:
        return step in self._steps

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Enclose each step of the training loop, and record it if it is profiled."""
        if step in self._steps and not self._has_begun:
            self._has_begun, self._steps = True, range(step, self._steps.stop)
        if self._records and self._problem is None:
            if step in (self._steps.start - 1, self._steps.start):
                self._finish_gathers()  # a gather that fails is no problem of the profile
            try:
                self._start(step)
            except Exception as error:
                self._problem = describe(error)
        is_recorded = self._context.timeline.annotate is not None
        with record_function(f"step {step}") if is_recorded else contextlib.nullcontext():
            yield

    def ends_with(self, step: int, *, stops: bool) -> bool:
        """Return whether ``write`` must follow this step; also if the run stops after it."""
        return step in self._steps and (stops or step + 1 not in self._steps)

    def write(self, last: int, pipeline: Pipeline) -> str:
        """Write the traces up to step ``last`` and the picture of ``last``, and return ``trace``.

        ``pipeline`` is the schedule of step ``last``. All ranks call this together, and return when
        all have written.
        """
        self._steps = range(self._steps.start, last + 1)
        self._context.timeline.annotate = None
        self._finish_gathers()
        if self._run.grid.pp > 1:
            self._last_step = self._gather_step(pipeline)
        problem, has_written = self._problem, False
        try:
            has_written = self._export()
            if self._last_step is not None:
                picture = self._file(".png")
                picture.parent.mkdir(parents=True, exist_ok=True)
                title = f"{self._run.name}, step {last}, {self._run.grid}"
                save(self._last_step.draw(title), picture)
        except Exception as error:
            problem = describe(error)
        own = problem, has_written
        ranks = [own] * self._run.grid.world_size
        dist.all_gather_object(ranks, own, self._context.world_group)
        written = sum(has_written for _, has_written in ranks)
        if written:
            named = f"{written} of {len(ranks)} ranks"
            self.trace = f"{self._file('.rank-*.json.gz')} ({named})"
        lines = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(ranks) if why is not None]
        self.trace = "; ".join([self.trace, *shortened(lines, _MOST_PROBLEMS_NAMED)])
        return self.trace

    def add_times(self, timelines: Sequence[Sequence[float]]) -> None:
        """Add the times of a step of all ranks; after those of the last step, write the table."""
        step = int(timelines[0][0])
        if step in self._steps and self._context.rank == 0:
            self._times.append(timelines)
            if step == self._steps[-1]:
                text = (self.table() or "").encode()
                with contextlib.suppress(OSError):  # it is also printed at the end of the run
                    write_bytes(self._file(".txt"), text)

    def table(self) -> str | None:
        """Where the time of the profiled steps went; None if none was, and on ranks but 0."""
        if not self._times:
            return None
        lines = [describe_times(self._times, self._run.grid)]
        if self._last_step is not None:
            lines.append(f"lost in step {self._steps[-1]}, first rank of each pipeline stage:")
            lines += [
                f"  {cause:24} {ms:10,.1f} {ms / self._last_step.length:7.1%}"
                for cause, ms in self._last_step.lost.items()
            ]
        return "\n".join((*lines, f"times while profiling; trace: {self.trace}\n"))

    def _start(self, step: int) -> None:
        """Prepare the profiler one step before the first, because this takes a second or more."""
        begins = step == self._steps.start
        if self._profiler is None and (begins or step + 1 == self._steps.start):
            os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
            on_gpu = self._context.device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self._profiler = TorchProfiler(activities=activities)
            self._profiler.prepare_trace()
        if self._profiler is not None and begins:
            self._profiler.start_trace()
            self._context.timeline.annotate = record_function

    def _gather_step(self, pipeline: Pipeline) -> PipelineStep | None:
        """Gather the last step from the first rank of each pipeline stage. Returns it on rank 0.

        These ranks are a pipeline, so they use its group. Over NCCL, a gather from all ranks to
        rank 0 would open a connection from each rank to rank 0.
        """
        context = self._context
        if context.coordinates[1:] != (0, 0, 0):
            return None
        if context.device.type == "cuda":
            torch.cuda.synchronize()  # its last events are after the last read of the host
        own = StageTimes.of(context.timeline.intervals())
        stages = [own] * context.grid.pp
        dist.all_gather_object(stages, own, context.pp_group)
        return PipelineStep(pipeline, stages) if context.rank == 0 else None

    def _export(self) -> bool:
        """End the recording and write the trace of this rank. Returns whether there is one."""
        if self._profiler is None or self._problem is not None:
            return False
        profiler, self._profiler, self._records = self._profiler, None, False
        profiler.stop_trace()
        file = self._file(f".rank-{self._context.rank}.json.gz")
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        return True

    def _file(self, suffix: str) -> Path:
        first, last = self._steps[0], self._steps[-1]
        return self._run.run_dir / PROFILE / f"steps-{first}-{last}{suffix}"


def describe_times(times: Sequence[Sequence[Sequence[float]]], grid: Grid) -> str:
    """Return the table of a profile, in lines of at most 80 characters.

    Args:
        times: for each step and rank, what ``Timeline.pop_seconds`` returned.
        grid: of the ranks.
    """
    steps = [int(ranks[0][0]) for ranks in times]
    # For each rank, the mean of each part, in ms.
    by_rank = [
        [1000 * statistics.fmean(column) for column in list(zip(*rows, strict=True))[1:]]
        for rows in zip(*times, strict=True)
    ]
    by_part = dict(zip(PARTS, zip(*by_rank, strict=True), strict=True))
    total = sum(map(statistics.fmean, by_part.values()))
    lines = [
        f"steps {steps[0]} to {steps[-1]}, mean over the steps; {grid}",
        f"{'':26} {'ms a step':>10} {'share':>7}  {'lowest rank':>16} {'highest rank':>16}",
    ]
    for part, label in PART_LABELS.items():
        if {"context": grid.cp, "expert": grid.ep or 1}.get(part) == 1:
            continue
        mean = statistics.fmean(by_part[part])
        low, high = (
            f"{pick(by_part[part]):,.1f} ({by_part[part].index(pick(by_part[part]))})"
            for pick in (min, max)
        )
        lines.append(f"{label:26} {mean:10,.1f} {mean / total:7.1%}  {low:>16} {high:>16}")
    lines.append(f"{'step':26} {total:10,.1f} {1:7.1%}")
    return "\n".join((*lines, *_describe_slowest(by_rank, grid)))


def _describe_slowest(by_rank: Sequence[Sequence[float]], grid: Grid) -> list[str]:
    """Return lines about the rank that works longest, and the part in which it is slowest."""
    work = [own_work(rank) for rank in by_rank]
    slowest = max(range(len(work)), key=work.__getitem__)
    line = f"slowest: {grid.name_of(slowest)} worked {work[slowest]:,.1f} ms"
    if len(work) == 1:
        return [line]
    longer = {
        part: own - statistics.median(each)
        for part, own, each in zip(PARTS, by_rank[slowest], zip(*by_rank, strict=True), strict=True)
        if part in OWN_WORK
    }
    most = max(longer, key=longer.__getitem__)
    return [
        f"{line}, median {statistics.median(work):,.1f} ms;",
        f"  most of the difference: {PART_LABELS[most]}, {longer[most]:+,.1f} ms to the median",
    ]
