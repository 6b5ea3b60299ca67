"""How the speed of a run grows with the number of ranks, and where the rest goes.

    strong   train_batch_size stays, so each data rank has fewer micro-batches
    weak     the micro-batches of each data rank stay, so train_batch_size grows

    efficiency   (tokens/s / ranks) / (the same at the smallest number of ranks)
    ideal step   step at the smallest number of ranks, if each token took a rank as long as there
    lost         (step - ideal step) / step, part by part; efficiency + all that is lost = 1

``Timeline`` times the parts of a step on each rank. A rank that arrives early at a collective waits
there for the others. So the rank of a group that spends the least time in its collectives shows
what communication costs, and what the others spend beyond it is imbalance (``split_step``).

A step's parts are means over ranks. A row's parts are means over the middle half of its steps by
time, so they add up to the step, and single slow steps do not count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, Self

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import BATCH_KEYS, World
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.local_ranks import DeviceType
from megaspeed.measurement.timed_steps import Steps, take_turn
from megaspeed.measurement.turns import Result, Row
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.forecast import forecast
from megaspeed.planning.measured_cpu import CpuSpeedError, measure_cpu
from megaspeed.planning.prediction import ideal_bubble
from megaspeed.topology.activity import OWN_WORK, PARTS
from megaspeed.topology.devices import device_by_name
from megaspeed.topology.grid import Grid
from megaspeed.training.worker import Worker
from megaspeed.units import counted

Mode = Literal["strong", "weak"]

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
        """Return tokens/s of a rank, as a fraction of that of ``base``."""
        return self.tokens_per_second * base.ranks / (self.ranks * base.tokens_per_second)

    def lost(self, base: "StepParts") -> dict[str, float]:
        """Return part -> what it takes beyond the ideal, as a fraction of the step."""
        work = self.tokens / self.ranks * base.ranks / base.tokens
        return {
            part: (seconds - work * base.parts[part]) / self.seconds
            for part, seconds in self.parts.items()
        }


@dataclass(frozen=True, kw_only=True)
class ScaledRow(Row):
    """The run on one number of ranks."""

    predicted: StepParts | None = None
    not_predicted: str | None = None  # why there is no prediction although one was asked for

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.run.grid.world_size

    @property
    def measured(self) -> StepParts:
        """The mean of the middle half of the timed steps. The row is done."""
        run, bubble = self.run, ideal_bubble(self.run)
        timelines, *_ = self.extras[0]  # every rank has the times of all ranks
        steps = [split_step(ranks, run.grid, bubble) for ranks in timelines]
        steps.sort(key=lambda parts: sum(parts.values()))
        cut = len(steps) // 4
        kept = steps[cut : len(steps) - cut]
        parts = {part: fmean(step[part] for step in kept) for part in LABELS}
        return StepParts(ranks=self.ranks, tokens=run.tokens_per_step, parts=parts)

    @property
    def done(self) -> bool:
        """Whether the row was trained and its parts are known."""
        return super().done and bool(self.extras)

    def with_prediction(self) -> Self:
        """Return the row, if it is done, with its prediction, or with why it has none."""
        if not self.done:
            return self
        try:
            return replace(self, predicted=predict(self.run, self.turns[0][0].device.name))
        except (CpuSpeedError, LookupError) as error:
            return replace(self, not_predicted=str(error))


@dataclass(frozen=True, kw_only=True)
class ScalingResult(Result[ScaledRow]):
    """All rows of one configuration, from the smallest number of ranks to the largest."""

    mode: Mode
    processors: int  # of this machine

    @property
    def base(self) -> ScaledRow:
        """The row that the others are compared with: the smallest one that has figures."""
        return self.done[0]

    @property
    def is_limited(self) -> bool:
        """Whether sharing processors limits the efficiency of any row."""
        return any(self.most_efficiency(row) < 1 for row in self.done)

    def most_efficiency(self, row: ScaledRow) -> float:
        """Return about what efficiency cannot exceed if ranks share the processors, otherwise 1.

        Where the ranks of the base wait, they leave room for others.
        """
        ratio = self._processors_of_a_rank(row) / self._processors_of_a_rank(self.base)
        step = self.base.measured
        busy = sum(step.parts[part] for part in OWN_WORK) / step.seconds
        return min(1.0, ratio / busy) if ratio < 1 else ratio

    def _processors_of_a_rank(self, row: ScaledRow) -> float:
        """At most one for each of its threads."""
        device = row.turns[0][0].device
        if device.name != "CPU":
            return device.threads
        return min(device.threads, self.processors / row.ranks)

    def _shares_processors(self, row: ScaledRow) -> bool:
        return row.ranks > 1 and self._processors_of_a_rank(row) < row.turns[0][0].device.threads

    @property
    def notes(self) -> Iterator[str]:
        """Yield what went wrong, and what the figures mean if ranks share processors."""
        yield from super().notes
        for row in self.rows:
            if row.not_predicted is not None:
                yield f"{row.label} not predicted: {row.not_predicted}"
        if self.done and self.base is not self.rows[0]:
            yield f"efficiency is relative to {self.base.label}, the fewest that trained"
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
    """Split one step into parts: means over the ranks, with waits for slower ranks separated.

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


def scaled_rows(
    base: Run, sizes: Sequence[int], mode: Mode, device_type: DeviceType
) -> list[ScaledRow]:
    """Return the run on each number of ranks. Only the data degree and the batch differ.

    PowerSGD compresses from step 1 on, because the first steps are measured.

    Args:
        base: the run on the smallest number of ranks.
        sizes: numbers of ranks.
        mode: what stays: train_batch_size, or the micro-batches of each data rank.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: with the problems of all numbers of ranks.
    """
    rows, problems = [], []
    train, _, accumulation = BATCH_KEYS
    config = base.config.compressed_from_step_1().changed(
        {
            "parallel.data": "auto",
            "parallel.spare_ranks": False,
            accumulation if mode == "strong" else train: None,
        }
    )
    mend = "; or use --weak: each rank keeps its micro-batches"
    for size in sizes:
        try:
            run = resolve_run(config, World(size, "--world-sizes", device_type), name=base.name)
        except ConfigError as error:
            for problem in error.problems:
                helps = mode == "strong" and train in problem
                problems.append(problem + mend if helps else problem)
        else:
            rows.append(ScaledRow(label=counted(size, "rank"), run=run))
    if problems:
        raise ConfigError(problems, where=f"{base.name} on {' '.join(map(str, sizes))} ranks")
    return rows


def part_of_turn(
    corpus: PreparedCorpus, steps: Steps, row: ScaledRow, number: int
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """Return what the ranks of a turn call."""
    return take_turn, Worker, row.run, corpus, steps


def predict(run: Run, device: str) -> StepParts:
    """Return the predicted step, on this machine's processors or on its GPUs.

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
