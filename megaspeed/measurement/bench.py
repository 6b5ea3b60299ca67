"""``megaspeed bench``: the step time of a run beside other libraries that train the same task.

    row                      trains
    megaspeed                the complete training job; only the last checkpoint is not written
    hf-deepspeed defaults    a peer with its defaults,
    hf-deepspeed guide       and as its guide recommends
    ...

    ratio of a turn   median step of the peer / median step of megaspeed, in the same turn
    ratio             median and quartiles of the ratios of all turns; above 1 megaspeed is faster
    a peer counts     with the settings that have the lower ratio

A step's time is that on rank 0 from the end of one step to the end of the next. It includes loading
the samples, the loss on the host, and what megaspeed records in every step. Turns never share
memory, so a peak of memory belongs to one contestant.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.files.json_values import read_records
from megaspeed.measurement.deepspeed_peers import DeepspeedPipeline, HfDeepspeed, Settings
from megaspeed.measurement.report import Bar, Column, Part, Report, Table
from megaspeed.measurement.torch_trainers import Ddp, Fsdp2, Plain, refusal
from megaspeed.measurement.turns import (
    WARM_UP_STEPS,
    Result,
    Row,
    Steps,
    TimedRank,
    describe_device,
    forget_peak,
    take_turn,
    timed_steps,
)
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.pretrain import main as train_main
from megaspeed.training.run_folder import METRICS
from megaspeed.training.worker import Worker
from megaspeed.units import Spread, counted, memory_unit, three_digits

MEGASPEED = "megaspeed"

TRAINERS: Mapping[tuple[str, Settings | None], Callable[..., Any]] = MappingProxyType(
    {
        ("plain", None): Plain,
        ("hf-deepspeed", "defaults"): partial(HfDeepspeed, settings="defaults"),
        ("hf-deepspeed", "guide"): partial(HfDeepspeed, settings="guide"),
        ("fsdp2", "defaults"): Fsdp2,
        ("fsdp2", "guide"): partial(Fsdp2, guided=True),
        ("ddp", None): Ddp,
        ("deepspeed-pipeline", None): DeepspeedPipeline,
    }
)
"""Peer and settings -> what a rank trains with. A peer whose guide recommends other settings than
its defaults takes turns with both."""

PEERS = tuple(dict.fromkeys(peer for peer, _ in TRAINERS))
_OWN_WEIGHTS = ("hf-deepspeed",)  # transformers draws its own initial weights


@dataclass(frozen=True, kw_only=True)
class Contestant(Row):
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


def contestants_of(run: Run, peers: Sequence[str], steps: Steps) -> list[Contestant]:
    """Return megaspeed, and each peer with its settings. A run has a step more than a turn."""
    run = benchmarked(run, steps.total + 1)
    return [
        Contestant(label=MEGASPEED, run=run, name=MEGASPEED),
        *(
            Contestant(
                label=f"{name} {settings or ''}".strip(), run=run, name=name, settings=settings
            )
            for name, settings in TRAINERS
            if name in peers
        ),
    ]


def benchmarked(run: Run, steps: int) -> Run:
    """Return the run with this many steps, and without what would only take time after them.

    The learning rate is constant, because a warmup must be shorter than the run.
    """
    values = run.as_json()
    values.pop("scheduler", None)
    values["training"] |= {
        "steps": steps,
        "save_interval": 0,
        "eval_interval": 0,
        "eval_batches": 1,
        "report_to": [],
        "restart": 0,
        "async_save": False,
        "profile": None,
    }
    world = World(run.grid.world_size, "--world-size")
    return resolve_run(parse_config(values), world, name=run.name)


def choose_peers(run: Run, names: Sequence[str] | None) -> dict[str, str | None]:
    """Return peers in a fixed order -> why a peer cannot train the run; None if it can.

    Args:
        run: the run.
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
    reason = refusal(run, has_pipeline=peer == "deepspeed-pipeline")
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
    if parallel.activation_checkpointing == "selective" or parallel.recomputed_blocks is not None:
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


def part_of_turn(
    folder: Path, corpus: PreparedCorpus, steps: Steps, row: Contestant, number: int
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """Return what the ranks of a turn call. megaspeed's run folders are in ``folder``."""
    if row.name != MEGASPEED:
        return take_turn, TRAINERS[row.name, row.settings], row.run, corpus, steps
    values, file = row.run.as_json(), folder / f"{number}.json"
    values["training"]["run_dir"] = str(file.with_suffix(""))
    file.write_text(json.dumps(values), encoding="utf-8")
    return train_megaspeed, file, steps


class _Clock(Checkpointing):
    """Note when each step of the training loop has ended, and save nothing.

    A large model's checkpoint would take longer than the steps.
    """

    def __init__(
        self, ends: list[float], warm_up: int, worker: Worker, corpus: PreparedCorpus
    ) -> None:
        super().__init__(worker, corpus)
        self._ends, self._warm_up = ends, warm_up
        self._device = worker.context.device
        ends.append(time.perf_counter())

    def finished(self) -> list[SaveReport]:
        """The loop calls this at the end of each step, after all records are written."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == 1 + self._warm_up:
            forget_peak(self._device)
        return super().finished()

    def save(self, progress: Progress) -> None:
        """Add only the report of a save."""
        self._finished.append(
            SaveReport(
                step=progress.step,
                checkpoint=self._run.run_dir,
                size_bytes=0,
                seconds=0.0,
                stall_seconds=0.0,
                error=None,
                deleted=(),
            )
        )


def train_megaspeed(launch: LaunchEnvironment, config: Path, steps: Steps) -> Iterator[TimedRank]:
    """Train as one rank of the main job. Its last step, which a validation ends, is not timed.

    The run folder has the name of the configuration without its suffix.
    """
    ends: list[float] = []
    make_checkpointing = partial(_Clock, ends, steps.warm_up)
    code = train_main(["--config", str(config)], make_checkpointing=make_checkpointing)
    if code:
        raise RuntimeError(f"megaspeed train ended with exit code {code}")
    lines = read_records(config.with_suffix("") / METRICS)
    records = [each for each in lines if each and "peak_memory_bytes" in each]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the current GPU
    yield TimedRank(
        losses=[record["loss"] for record in records],
        grad_norm=records[-1]["grad_norm"],
        skipped_steps=sum(record["skipped"] for record in records),
        step_seconds=timed_steps(steps, ends),
        peak_bytes=max(records[-1]["peak_memory_bytes"]),
        device=describe_device(device, launch.world_size),
    )


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
    parts: list[Part] = [
        f"{counted(result.turns, 'turn')} of {counted(result.steps, 'step')} each, after "
        f"{WARM_UP_STEPS} that warm up. Contestants take turns, and each turn starts new "
        "processes. A step lasts on rank 0 from the end of the step before until its loss is read "
        "and its records are written. Ratio: the peer's step time / megaspeed's in the same turn; "
        "above 1, megaspeed is faster. In brackets: quartiles. On a CPU, the peak is that of the "
        "resident set, which includes all libraries.",
        *([f"Of both settings, those that count: {', '.join(both)}."] if both else []),
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
