"""``megaspeed bench``: the step time of a run beside other libraries that train the same task.

    row                      trains with
    megaspeed                the worker of a training run
    hf-deepspeed defaults    a peer with its defaults,
    hf-deepspeed guide       and as its guide recommends
    ...

    ratio of a turn   median step of the peer / median step of megaspeed, in the same turn
    ratio             median and quartiles of the ratios of all turns; above 1 megaspeed is faster
    a peer counts     with the settings that have the lower ratio

All train in the same loop (``turns``). A step's time is that on rank 0 from the end of one step to
the end of the next. It includes loading the samples and reading the loss. Turns never share memory,
so a peak of memory belongs to one contestant.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.resolve import Run
from megaspeed.measurement.deepspeed_peers import DeepspeedPipeline, HfDeepspeed, Settings
from megaspeed.measurement.report import Bar, Column, Report, ReportPart, Table
from megaspeed.measurement.torch_trainers import Ddp, Fsdp2, Plain, refusal
from megaspeed.measurement.turns import WARM_UP_STEPS, MeasuredRow, Result
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.training.worker import Worker
from megaspeed.units import Spread, counted, memory_unit, three_digits

MEGASPEED = "megaspeed"

TRAINERS: Mapping[tuple[str, Settings | None], Callable[..., Any]] = MappingProxyType(
    {
        (MEGASPEED, None): Worker,
        ("plain", None): Plain,
        ("hf-deepspeed", "defaults"): partial(HfDeepspeed, settings="defaults"),
        ("hf-deepspeed", "guide"): partial(HfDeepspeed, settings="guide"),
        ("fsdp2", "defaults"): Fsdp2,
        ("fsdp2", "guide"): partial(Fsdp2, guided=True),
        ("ddp", None): Ddp,
        ("deepspeed-pipeline", None): DeepspeedPipeline,
    }
)
"""Name and settings -> what a rank trains with. A peer whose guide recommends other settings than
its defaults takes turns with both."""

PEERS = tuple(dict.fromkeys(name for name, _ in TRAINERS if name != MEGASPEED))
_OWN_WEIGHTS = ("hf-deepspeed",)  # transformers draws its own initial weights


@dataclass(frozen=True, kw_only=True)
class Contestant(MeasuredRow):
    """megaspeed, or a peer with some settings."""

    name: str
    settings: Settings | None = None  # None if it has only one set of settings

    @property
    def steps(self) -> list[Sequence[float]]:
        """Turn -> seconds of each step, on rank 0."""
        return [turn[0].step_seconds for turn in self.turns]

    @property
    def step_seconds(self) -> Spread:
        """Of all turns."""
        return Spread.of([seconds for turn in self.steps for seconds in turn])

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(rank.peak_bytes for turn in self.turns for rank in turn)


def contestants_of(run: Run, peers: Sequence[str]) -> list[Contestant]:
    """Return megaspeed, and each peer with its settings."""
    return [
        Contestant(
            label=name if settings is None else f"{name} {settings}",
            run=run,
            make=make,
            name=name,
            settings=settings,
        )
        for (name, settings), make in TRAINERS.items()
        if name in (MEGASPEED, *peers)
    ]


def choose_peers(run: Run, names: Sequence[str] | None) -> dict[str, str | None]:
    """Return peers in a fixed order -> why a peer cannot train the run; None if it can.

    Args:
        names: peers that must be able to train it; if None, all that are able take part.

    Raises:
        ConfigError: a named peer cannot train the run, or no peer can.
    """
    reasons = {peer: _refusal(peer, run) for peer in PEERS if names is None or peer in names}
    problems = [f"{peer}: {reason}" for peer, reason in reasons.items() if reason is not None]
    if problems and (names is not None or len(problems) == len(reasons)):
        raise ConfigError(problems, where=f"the peers of {run.name}")
    return reasons


def _refusal(peer: str, run: Run) -> str | None:
    """Why a peer cannot train the run; None if it can."""
    config, model = run.config, run.config.model
    autocasts = peer in ("plain", "ddp")
    reason = refusal(run, has_pipeline=peer == "deepspeed-pipeline", autocasts=autocasts)
    if reason is not None or peer in ("plain", "ddp", "fsdp2"):
        return reason
    if peer == "deepspeed-pipeline" and run.grid.pp == 1:
        return "it needs a pipeline, but parallel.pipeline is 1; set it to 2 or more"
    if peer == "deepspeed-pipeline" and run.zero_stage > 1:
        stage = run.zero_stage
        return (
            f"its ZeRO stage is at most 1, but zero_optimization.stage is {stage}; set it to 0 or 1"
        )
    parallel = config.parallel
    kind = parallel.activation_checkpointing
    if kind not in ("none", "full") or parallel.recomputed_blocks is not None:
        return (
            "it recomputes complete blocks, all or none; set parallel.activation_checkpointing to "
            '"none" or "full", and remove parallel.recomputed_blocks'
        )
    if run.zero_stage == 0 and run.precision == "bf16" and run.accumulation_dtype == "fp32":
        return (
            "DeepSpeed adds gradients of bf16 weights in fp32 only with ZeRO, but "
            "zero_optimization.stage is 0; set it to 1"
        )
    if config.data.reset_at_documents:
        return "it attends across documents; set data.reset_at_documents to false"
    rates = (model.embedding_dropout, model.attention_dropout, model.residual_dropout)
    if any(rates) and (peer == "deepspeed-pipeline" or model.architecture != "gpt2"):
        return "its model has no dropout; set every dropout of the model to 0"
    if peer == "hf-deepspeed":
        try:
            hugging_face_config(model)
        except ConfigError as error:
            return "; ".join(error.problems)
    return None


@dataclass(frozen=True, kw_only=True)
class BenchResult(Result[Contestant]):
    """All turns of a run."""

    run: Run
    not_run: Mapping[str, str]  # peers that cannot train the run -> why

    @property
    def own(self) -> Contestant | None:
        """megaspeed, if it has taken a turn."""
        return next((row for row in self.timed if row.name == MEGASPEED), None)

    def ratio(self, row: Contestant) -> Spread | None:
        """Return the ratio of a peer's neighbouring turns. One of them may have failed later."""
        if self.own is None or row is self.own:
            return None
        medians = [map(statistics.median, each.steps) for each in (row, self.own)]
        return Spread.of([theirs / ours for theirs, ours in zip(*medians, strict=False)])

    @property
    def counted(self) -> list[Contestant]:
        """megaspeed and each peer, with the better of its settings.

        They are compared by their ratios, which do not change with the speed of the machine; by
        seconds if there are none.
        """

        def figure(row: Contestant) -> float:
            ratio = self.ratio(row)
            return row.step_seconds.median if ratio is None else ratio.median

        better: dict[str, Contestant] = {}
        for row in self.timed:
            better[row.name] = min(better.get(row.name, row), row, key=figure)
        return [*better.values()]

    @property
    def notes(self) -> Iterator[str]:
        """Yield what went wrong, and each contestant that trains another model."""
        yield from super().notes
        allowed = TOLERANCES[self.run.precision].loss
        for row in self.timed:
            if self.own is None or row.name in _OWN_WEIGHTS:
                continue
            loss, own = row.losses[0], self.own.losses[0]
            # "not <=" instead of ">", because NaN must not agree.
            if not relative_difference(loss, own) <= allowed:
                yield (
                    f"{row.label} has loss {loss:.9g} in step 1, but megaspeed has {own:.9g}; from "
                    f"the same weights, only a relative difference of {allowed:.0e} is allowed in "
                    f"{self.run.precision}, so its time may be that of another task"
                )


def report(result: BenchResult) -> Report:
    """Return the report: a line for each contestant, and a bar for each that counts."""
    unit = memory_unit(row.peak_bytes for row in result.timed)
    better = result.counted

    def ratio(row: Contestant) -> dict[str, float] | None:
        spread = result.ratio(row)
        return None if spread is None else asdict(spread)

    columns = [
        Column("label", lambda row: row.label, "contestant"),
        Column("step_seconds", lambda row: asdict(row.step_seconds), "step ms", _in_ms),
        Column("ratio", ratio, "ratio", _spread),
        Column("peak_bytes", lambda row: row.peak_bytes, f"peak {unit.name}", unit.of),
        Column("name", lambda row: row.name),
        Column("settings", lambda row: row.settings),
        Column("counts", lambda row: row in better),
        Column("tokens_per_second", lambda row: row.run.tokens_per_step / row.step_seconds.median),
        Column("first_loss", lambda row: row.losses[0]),
        Column("turns", lambda row: row.steps),
    ]
    both = [row.label for row in better if row.settings is not None]
    has_chunks = result.run.config.parallel.virtual_stages > 1
    parts: list[ReportPart] = [
        f"{counted(result.turns, 'turn')} of {counted(result.steps, 'step')} each, after "
        f"{WARM_UP_STEPS} that warm up. Contestants take turns, and each turn starts new "
        "processes. A step lasts on rank 0 from the end of the step before until its loss is read. "
        "Ratio: the peer's step time / megaspeed's in the same turn; "
        "above 1, megaspeed is faster. In brackets: quartiles. On a CPU, the peak is that of the "
        "resident set, which includes all libraries.",
        *([f"Of both settings, those that count: {', '.join(both)}."] if both else []),
        *(["Peers have no interleaved schedule: they train one chunk a stage."] * has_chunks),
        *(f"{peer} was not run: {reason}." for peer, reason in result.not_run.items()),
        Table("contestants", columns, result.timed),
    ]
    return Report(
        title=f"{result.run.name}: megaspeed beside its peers",
        run=result.run,
        result=result,
        parts=parts,
        facts={"not_run": result.not_run},
        unit="the median step in ms",
        bars=[_bar(row, result.ratio(row)) for row in better],
    )


def _in_ms(seconds: Mapping[str, float]) -> str:
    return _spread({name: 1e3 * value for name, value in seconds.items()})


def _spread(of: Mapping[str, float]) -> str:
    median, lower, upper = map(three_digits, (of["median"], of["lower"], of["upper"]))
    return f"{median} ({lower}-{upper})"


def _bar(row: Contestant, ratio: Spread | None) -> Bar:
    step = 1e3 * row.step_seconds.median
    text = f"{three_digits(step)} ms" + ("" if ratio is None else f"\nratio {ratio.median:.2f}")
    return Bar(label=row.label.replace("-", "- "), parts={"step": step}, text=text)
