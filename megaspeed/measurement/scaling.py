"""How the speed of a run grows with the number of ranks, and where the rest goes.

    strong   train_batch_size stays, so each data rank has fewer micro-batches
    weak     the micro-batches of each data rank stay, so train_batch_size grows

    efficiency   (tokens/s / ranks) / (the same at the smallest number of ranks)
    ideal step   smallest number's step x tokens of a rank / the same at the smallest number
    lost         (step - ideal step) / step, part by part; efficiency + all that is lost = 1

``Timeline`` times the parts of a step on each rank. A rank that arrives early at a collective waits
there for the others. So the rank of a group that spends the least time in its collectives shows
what communication costs, and what the others spend beyond it is imbalance (``split_step``).

A step's parts are means over ranks. A row's parts are means over the middle half of its steps by
time, so they add up to the step, and single slow steps do not count.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import BATCH_KEYS, World
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.local_ranks import DeviceType, RanksFailed, run_on_ranks
from megaspeed.measurement.turns import busy_warning
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.forecast import forecast
from megaspeed.planning.measured_cpu import CpuSpeedError, measure_cpu
from megaspeed.planning.prediction import ideal_bubble
from megaspeed.topology.activity import OWN_WORK, PARTS
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.devices import device_by_name
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import Worker
from megaspeed.units import counted

Mode = Literal["strong", "weak"]

WARM_UP_STEPS = 3
"""Steps before the timed ones. DeepSpeed's ZeRO-3 records its gathers in the first two."""

LABELS: Mapping[str, str] = {
    "compute": "compute",
    "tensor": "communication, tp",
    "data": "communication, dp",
    "pipeline": "messages, pp",
    "bubble": "bubble, pp",
    "world": "loss and norm",
    "imbalance": "imbalance",
    "data_loading": "data wait",
    "optimizer": "optimizer",
    "host": "host",
}
"""The parts of a step: those of ``Timeline``, bubble and imbalance -> their names in reports."""

_PREDICTED: Mapping[str, str] = {
    "compute": "compute",
    "recomputation": "compute",
    "tensor parallel": "tensor",
    "data parallel": "data",
    "pipeline sends": "pipeline",
    "pipeline bubble": "bubble",
    "optimizer": "optimizer",
    "host": "host",
}
"""The parts of a ``Forecast`` -> ours."""

NOT_PREDICTED = frozenset(LABELS) - set(_PREDICTED.values())
"""Loss and norm, imbalance, data wait. In a prediction they take no time."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A step on some number of ranks, as measured or as predicted."""

    ranks: int
    tokens: int  # of a step, over all ranks
    parts: Mapping[str, float]  # seconds of each of ``LABELS``; they add up to the step

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.seconds

    def efficiency(self, base: "StepParts") -> float:
        """tokens/s of a rank, as a fraction of that of ``base``."""
        return self.tokens_per_second * base.ranks / (self.ranks * base.tokens_per_second)

    def lost(self, base: "StepParts") -> dict[str, float]:
        """Part -> what it takes more than ideal, as a fraction of the step; negative if less."""
        work = self.tokens / self.ranks * base.ranks / base.tokens
        return {
            part: (seconds - work * base.parts[part]) / self.seconds
            for part, seconds in self.parts.items()
        }


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the ranks of one row recorded."""

    timelines: Sequence[Sequence[Sequence[float]]]  # step -> rank -> ``Timeline.pop_seconds``
    wall_seconds: Sequence[float]  # of each timed step on rank 0, from end to end
    skipped_steps: int  # of the timed steps, because the loss or the norm was not finite
    threads: int  # of each rank, on a CPU
    device: str  # the GPU's name, or "CPU"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The run on one number of ranks, and its figures once it has been trained."""

    run: Run
    record: Record | None = None
    reason: str | None = None  # why the training failed
    predicted: StepParts | None = None
    not_predicted: str | None = None  # why there is no prediction although one was asked for

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.run.grid.world_size

    @property
    def measured(self) -> StepParts | None:
        """The mean of the middle half of the steps; None if the training failed."""
        if self.record is None:
            return None
        run, bubble = self.run, ideal_bubble(self.run)
        steps = [split_step(ranks, run.grid, bubble) for ranks in self.record.timelines]
        steps.sort(key=lambda parts: sum(parts.values()))
        cut = len(steps) // 4
        kept = steps[cut : len(steps) - cut]
        parts = {part: fmean(step[part] for step in kept) for part in LABELS}
        return StepParts(ranks=self.ranks, tokens=run.tokens_per_step, parts=parts)


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """All rows of one configuration, from the smallest number of ranks to the largest."""

    mode: Mode
    steps: int  # timed steps of each row
    rows: Sequence[Row]
    processors: int  # of this machine
    share_of_others: float = 0.0  # of the processors, see ``measurement/turns.py``

    @property
    def done(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row.record is not None]

    @property
    def base(self) -> Row | None:
        """The row that the others are compared with: the smallest one that has figures."""
        return next(iter(self.done), None)

    @property
    def is_limited(self) -> bool:
        """Whether sharing processors limits the efficiency of any row."""
        return any(self.most_efficiency(row) < 1 for row in self.done)

    def most_efficiency(self, row: Row) -> float:
        """About what efficiency cannot exceed, because ranks share the processors; 1 if they do
        not. Where the ranks of the base wait, they leave room for others.
        """
        assert self.base is not None, "a row has figures"
        ratio = self._processors_of_a_rank(row) / self._processors_of_a_rank(self.base)
        step = self.base.measured
        assert step is not None, "a row has figures"
        busy = sum(step.parts[part] for part in OWN_WORK) / step.seconds
        return min(1.0, ratio / busy) if ratio < 1 else ratio

    def _processors_of_a_rank(self, row: Row) -> float:
        """At most one for each of its threads."""
        record = row.record
        assert record is not None, "it has figures"
        if record.device != "CPU":
            return 1.0
        return min(record.threads, self.processors / row.ranks)

    def _shares_processors(self, row: Row) -> bool:
        record = row.record
        assert record is not None, "it has figures"
        shares = row.ranks > 1 and row.ranks * record.threads > self.processors
        return record.device == "CPU" and shares

    @property
    def notes(self) -> Iterator[str]:
        """What went wrong, and what the figures mean if ranks share processors."""
        yield from busy_warning(self.share_of_others)
        for row in self.rows:
            ranks, record = counted(row.ranks, "rank"), row.record
            if row.reason is not None:
                yield f"{ranks} FAILED: {row.reason}"
            if row.not_predicted is not None:
                yield f"{ranks} not predicted: {row.not_predicted}"
            if record is not None and record.skipped_steps:
                yield (
                    f"{ranks} skipped {record.skipped_steps} of {self.steps} steps, because the "
                    "loss or the gradient norm was not finite"
                )
        if self.base is not None and self.base is not self.rows[0]:
            ranks = counted(self.base.ranks, "rank")
            yield f"efficiency is relative to {ranks}, the fewest that trained"
        sharing = [row for row in self.done if self._shares_processors(row)]
        if sharing:
            most = (
                ', and efficiency is at most about what "at most" states' if self.is_limited else ""
            )
            yield (
                f"{', '.join(str(row.ranks) for row in sharing)} ranks share {self.processors} "
                f"processors, so tokens/s cannot grow with the ranks{most}. The figures show the "
                "cost of communication and of sharing on this machine, not the scaling of a "
                "cluster."
            )


def split_step(ranks: Sequence[Sequence[float]], grid: Grid, bubble: float) -> dict[str, float]:
    """The parts of one step: means over the ranks, with the waits for slower ranks separated.

    Collectives along an axis: the rank of each group that takes the least counts as communication.
    The pipeline: some stages wait for messages, others wait at the end of the step until the last
    stage has finished. So both waits are added. What the rank that waits least waits is first the
    bubble, up to that of equal stages, and then messages. Everything beyond is imbalance.

    Args:
        ranks: what ``Timeline.pop_seconds`` returned on each rank.
        grid: of the ranks.
        bubble: the fraction of time in which the schedule leaves a stage idle if all are equal.

    Returns:
        Seconds of each of ``LABELS``. Their sum is the mean over the ranks of all their times.
    """
    _, *columns = zip(*ranks, strict=True)
    times = dict(zip(PARTS, columns, strict=True))
    parts: dict[str, float] = {part: fmean(column) for part, column in times.items()}
    least = {
        "tensor": _least(times["tensor"], grid.groups_along("tp")),
        "data": _least(times["data"], grid.groups_along("dp")),
        "world": min(times["world"]),
    }
    waits = [
        message + end - least["world"]
        for message, end in zip(times["pipeline"], times["world"], strict=True)
    ]
    imbalance = fmean(waits) - min(waits)
    imbalance += sum(parts[part] - least[part] for part in ("tensor", "data"))
    busy = parts["compute"] + parts["tensor"]
    waited = min(min(waits), busy * bubble / (1 - bubble))
    separated = {"pipeline": min(waits) - waited, "bubble": waited, "imbalance": imbalance}
    return {**parts, **least, **separated}


def _least(seconds: Sequence[float], groups: Sequence[Sequence[int]]) -> float:
    """The least of each group, as the mean over the groups."""
    return fmean(min(seconds[rank] for rank in group) for group in groups)


def scaled_runs(base: Run, sizes: Sequence[int], mode: Mode, device_type: DeviceType) -> list[Run]:
    """The run on each number of ranks. Only the data degree and the batch differ.

    PowerSGD compresses from step 1 on, because the first steps are measured.

    Args:
        base: the run on the smallest number of ranks.
        sizes: numbers of ranks.
        mode: what stays: train_batch_size, or the micro-batches of each data rank.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: with the problems of all numbers of ranks.
    """
    runs, problems = [], []
    train, _, accumulation = BATCH_KEYS
    config = base.config.compressed_from_step_1().changed(
        {
            "parallel.data": "auto",
            "parallel.spare_ranks": False,
            accumulation if mode == "strong" else train: None,
        }
    )
    mend = "; or use --weak: each rank keeps its micro-batches" if mode == "strong" else ""
    for size in sizes:
        try:
            run = resolve_run(config, World(size, "--world-sizes", device_type), name=base.name)
        except ConfigError as error:
            problems += [each + mend for each in error.problems]
        else:
            runs.append(run)
    if problems:
        raise ConfigError(problems, where=f"{base.name} on {' '.join(map(str, sizes))} ranks")
    return runs


def train_rows(
    runs: Sequence[Run],
    corpus: PreparedCorpus,
    *,
    steps: int,
    device_type: DeviceType,
    folder: Path,
    timeout_seconds: float,
    predicts: bool = True,
    on_row: Callable[[int, str], None] = lambda done, text: None,
) -> tuple[list[Row], bool]:
    """Trains the runs, one after the other, each of ``steps`` timed steps after those that warm up.

    ``folder`` exists; the output of each row's ranks goes to a file in its ``logs``. The time
    limit is that of one row. If ``predicts``, each row that has trained is also predicted. On a CPU
    this takes some 15 seconds, because the machine is measured. ``on_row`` is called before each
    row, with the number of rows so far and a description.

    Returns the rows with their figures or why they failed, and whether Ctrl-C or a signal has
    stopped them.
    """
    rows: list[Row] = []
    (folder / "logs").mkdir(exist_ok=True)
    try:
        for run in runs:
            ranks = run.grid.world_size
            on_row(len(rows), f"{ranks} ranks")
            log = folder / "logs" / f"{ranks}-ranks.log"
            log.write_text("")  # the ranks append to it
            try:
                records = run_on_ranks(
                    train_rank,
                    *(run, corpus, steps, timeout_seconds),
                    world_size=ranks,
                    device_type=device_type,
                    log=log,
                    timeout_seconds=timeout_seconds,
                )
            except RanksFailed as failure:
                row = Row(run=run, reason=f"{failure}; see {log}")
            else:
                row = Row(run=run, record=records[0])
                row = _predicted(row, records[0].device) if predicts else row
            rows.append(row)
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def train_rank(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int, timeout_seconds: float
) -> Record:
    """Trains as one rank of a row. Each rank returns the times of all ranks."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=timeout_seconds) as context:
        worker, inputs = Worker(run, context), StepInputs(run, corpus, context)
        exchanged, ends = [], []
        skipped: list[bool] = []
        for number in range(WARM_UP_STEPS + steps):
            if number >= WARM_UP_STEPS:
                context.timeline.begin(number + 1)
            result = worker.train_step(
                inputs.load(number * run.batch.train_batch_size),
                inputs.learning_rate(number - sum(skipped)),
            )
            context.timeline.end()
            ends.append(time.perf_counter())
            skipped.append(result.skipped)
            exchanged.append(result.timelines)  # of the step before
        exchanged.append(worker.timelines_of_last_step())
        inputs.close()
        on_gpu = context.device.type == "cuda"
        device = torch.cuda.get_device_name(context.device) if on_gpu else "CPU"
    # A rank has no times of a step (0) if its GPU had not finished it.
    timelines = [ranks for ranks in exchanged if all(step > 0 for step, *_ in ranks)]
    if not timelines:
        raise RuntimeError(f"the times of none of {steps} steps are known; raise --steps")
    first = WARM_UP_STEPS - 1
    return Record(
        timelines=timelines,
        wall_seconds=[
            end - start for start, end in zip(ends[first:], ends[first + 1 :], strict=False)
        ],
        skipped_steps=sum(skipped[WARM_UP_STEPS:]),
        threads=torch.get_num_threads(),
        device=device,
    )


def _predicted(row: Row, device: str) -> Row:
    """The row with its prediction, or with why it has none."""
    try:
        return replace(row, predicted=predict(row.run, device))
    except (CpuSpeedError, LookupError) as error:
        return replace(row, not_predicted=str(error))


def predict(run: Run, device: str) -> StepParts:
    """The predicted step, on this machine's processors or on its GPUs.

    Args:
        run: the run.
        device: "CPU", or the GPU's name as its driver calls it.

    Raises:
        CpuSpeedError: the processors could not be measured.
        LookupError: the table of accelerators does not have the GPU.
    """
    if device == "CPU":
        cluster, _ = measure_cpu(run)
    else:
        known = device_by_name(device)
        if known is None:
            raise LookupError(f"the table of accelerators does not have {device}")
        cluster = Cluster(
            device=known,
            gpus_per_node=run.grid.world_size,
            network_bandwidth=known.network_bandwidth,
        )
    parts = dict.fromkeys(LABELS, 0.0)
    for part, seconds in forecast(run, cluster, simulates=True).parts().items():
        parts[_PREDICTED[part]] += seconds
    return StepParts(ranks=run.grid.world_size, tokens=run.tokens_per_step, parts=parts)
