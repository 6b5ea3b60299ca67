"""``megaspeed scaling``: tokens/s at several numbers of ranks, and where the rest goes.

    strong   train_batch_size stays, so each data rank has fewer micro-batches
    weak     the micro-batches of each data rank stay, so train_batch_size grows

    efficiency   (tokens/s / ranks) / (the same at the smallest number of ranks)
    ideal step   step at the smallest number of ranks, if each token took a rank as long as there
    lost         (step - ideal step) / step, part by part; efficiency + all that is lost = 1

``Timeline`` times the parts of a step on each rank. A step's parts are means over the ranks. A
row's parts are means over the middle half of its steps by time, so they add up to the step, and
single slow steps do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import BATCH_KEYS, World
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.measurement.local_ranks import DeviceType
from megaspeed.measurement.report import Bar, Column, Report, Table
from megaspeed.measurement.turns import WARM_UP_STEPS, MeasuredRow, Result
from megaspeed.topology.activity import PARTS, Part
from megaspeed.training.profile import PART_LABELS
from megaspeed.training.worker import Worker
from megaspeed.units import counted, in_ms


@dataclass(frozen=True, kw_only=True)
class ScaledRow(MeasuredRow):
    """The run on one number of ranks. Only a row that is done has figures."""

    @property
    def ranks(self) -> int:
        return self.run.grid.world_size

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of each of ``PARTS``, mean of the middle half of the timed steps."""
        # Every rank has the times of all ranks.
        steps = sorted(self.extras[0], key=lambda parts: sum(parts.values()))
        cut = len(steps) // 4
        kept = steps[cut : len(steps) - cut]
        return {part: fmean(step[part] for step in kept) for part in PARTS}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.run.tokens_per_step / self.seconds

    def efficiency(self, base: "ScaledRow") -> float:
        """Return tokens/s of a rank, as a fraction of that of ``base``."""
        return self.tokens_per_second * base.ranks / (self.ranks * base.tokens_per_second)

    def lost(self, base: "ScaledRow") -> dict[Part, float]:
        """Return part -> what it takes beyond the ideal, as a fraction of the step."""
        work = self.run.tokens_per_step / self.ranks * base.ranks / base.run.tokens_per_step
        ideal, seconds = base.parts, self.seconds
        return {part: (each - work * ideal[part]) / seconds for part, each in self.parts.items()}


def scaled_rows(
    base: Run, sizes: Sequence[int], device_type: DeviceType, *, weak: bool
) -> list[ScaledRow]:
    """Return the run on each number of ranks. Only the data degree and the batch differ.

    PowerSGD compresses from step 1 on, because the first steps are measured.

    Args:
        base: the run on the smallest number of ranks.
        sizes: numbers of ranks.
        device_type: "cpu" or "cuda".
        weak: whether the micro-batches of each data rank stay, and not train_batch_size.

    Raises:
        ConfigError: with the problems of all numbers of ranks.
    """
    rows, problems = [], []
    train, _, accumulation = BATCH_KEYS
    most = base.batch.gradient_accumulation_steps // base.grid.pp
    groups = base.config.parallel.micro_batch_groups
    config = base.config.compressed_from_step_1().changed(
        {
            "parallel.data": "auto",
            "parallel.micro_batch_groups": "auto" if groups == most else groups,
            "parallel.spare_ranks": False,
            train if weak else accumulation: None,
            "train_batch_size_schedule": None,  # all steps have the largest batch
            "training.tokens": None,  # all rows take training.steps
        }
    )
    mend = "; or use --weak: each rank keeps its micro-batches"
    for size in sizes:
        try:
            run = resolve_run(config, World(size, "--world-sizes", device_type), name=base.name)
        except ConfigError as error:
            for problem in error.problems:
                helps = not weak and train in problem
                problems.append(problem + mend if helps else problem)
        else:
            rows.append(ScaledRow(label=counted(size, "rank"), run=run, make=Worker))
    if problems:
        raise ConfigError(problems, where=f"{base.name} on {' '.join(map(str, sizes))} ranks")
    return rows


def report(result: Result[ScaledRow], *, weak: bool) -> Report:
    """Return the report: a line for each number of ranks, and what each part of a step loses."""
    rows, run, mode = result.done, result.rows[0].run, "weak" if weak else "strong"
    batch = (
        "each data rank keeps its micro-batches, so train_batch_size grows"
        if weak
        else "train_batch_size stays, so each data rank has fewer micro-batches"
    )
    parts: list[str | list[str] | Table] = [
        f"{mode} scaling: {batch}; the other degrees stay, so the data degree (dp) grows. "
        f"{counted(result.steps, 'step')} each after {WARM_UP_STEPS} that warm up; "
        "means over the middle half of the steps, and over the ranks. Ranks that share processors "
        "show the cost of sharing them, not the scaling of a cluster.",
        _row_table(rows),
        "Efficiency = tokens/s of a rank / tokens/s of a rank in the first line. A part loses the "
        "time by which it is longer than there, for each token of a rank. Communication includes "
        "waits for slower ranks, and the optimizer includes DeepSpeed's gather of the updated "
        "weights over dp (ZeRO-1 and 2).",
        _loss_table(rows),
    ]
    return Report(
        title=f"{run.name}: {mode} scaling over {', '.join(str(row.ranks) for row in result.rows)}",
        run=run,
        result=result,
        parts=parts if rows else [],
        facts={"mode": mode},
        unit="microseconds of a rank for each token",
        bars=[_bar(row, rows[0]) for row in rows],
    )


def _row_table(rows: Sequence[ScaledRow]) -> Table:
    def batch(row: ScaledRow) -> str:
        of = row.run.batch
        return f"{row.run.grid.dp} x {of.gradient_accumulation_steps} x {of.micro_batch_size}"

    columns = [
        Column("ranks", lambda row: row.ranks, "ranks"),
        Column("batch", batch, "dp x micro-batches x samples"),
        Column("step_seconds", lambda row: row.seconds, "step ms", in_ms),
        Column(
            "tokens_per_second", lambda row: row.tokens_per_second, "tokens/s", "{:,.0f}".format
        ),
        Column("efficiency", lambda row: row.efficiency(rows[0]), "efficiency", "{:.1%}".format),
        Column("parts_seconds", lambda row: row.parts),
        Column("wall_seconds", lambda row: row.turns[0][0].step_seconds),
    ]
    return Table("rows", columns, rows)


def _loss_table(rows: Sequence[ScaledRow]) -> Table:
    """What each part has lost of a step, a column for each number of ranks."""

    def lost(row: ScaledRow) -> Column:
        shares = row.lost(rows[0])
        return Column(str(row.ranks), shares.__getitem__, row.label, "{:z.1%}".format)

    part = Column("part", PART_LABELS.__getitem__, "lost by")
    return Table("losses", [part, *map(lost, rows)], PARTS)


def _bar(row: ScaledRow, base: ScaledRow) -> Bar:
    """The parts of the time that a token takes of a rank. Without loss, all bars are equally
    high, in strong and in weak scaling.
    """
    scale = 1e6 * row.ranks / row.run.tokens_per_step
    return Bar(
        label=row.label,
        parts={PART_LABELS[part]: scale * seconds for part, seconds in row.parts.items()},
        text=f"{row.tokens_per_second:,.0f} tokens/s\n{row.efficiency(base):.0%}",
    )
