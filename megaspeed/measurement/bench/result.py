"""The figures of a benchmark: the spread of step times, ratios of neighbouring turns, operations.

    ratio of a turn   median step of the peer / median step of megaspeed, in the same turn
    ratio             median and quartiles of the ratios of all turns; above 1 megaspeed is faster
    row of a peer     that of the settings (defaults or guide) with the lower ratio

    FLOPs a token     3 x (2 x weights of matrices + 4 x S x heads x head size x blocks)
    TFLOP/s           FLOPs a token x tokens/s / ranks
    MFU               TFLOP/s / the device's peak; causal: with half of the attention's operations

The formula counts a backward as twice the forward, attention over the full S x S square, and no
recomputed operations. If the peak is not known, the share of the measured matmul takes its place.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaspeed.config.resolve import Run
from megaspeed.measurement.bench.contest import HOST_BOUND, MEGASPEED, RUN, Contestant
from megaspeed.measurement.bench.peers import Settings
from megaspeed.measurement.bench.turn import Device, Turn
from megaspeed.measurement.turns import busy_warning
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.units import Spread

_OWN_WEIGHTS = ("hf-deepspeed",)  # transformers draws its own initial weights


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one contestant needed for one workload, over all its turns."""

    name: str
    settings: Settings | None  # None if it has only one set of settings
    step_seconds: Spread  # of rank 0's steps
    ratio: Spread | None  # None for megaspeed, and if megaspeed has no figures
    tokens_per_second: float  # of all ranks, at the median step
    flops: float  # operations a second and rank
    causal_flops: float  # the same with half of the attention's operations
    first_loss: float
    peak_bytes: int  # of the fullest rank

    @property
    def compared(self) -> float:
        """The figure by which settings are compared: the ratio, or seconds if there is none.

        Unlike seconds, a ratio does not change with the speed of the machine.
        """
        return self.step_seconds.median if self.ratio is None else self.ratio.median


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All turns of a run."""

    runs: Mapping[str, Run]  # workload -> its run
    turns: int
    steps: int  # timed steps of a turn
    contestants: Sequence[Contestant]
    not_run: Mapping[str, str]  # peers that cannot train the run -> why
    stopped: bool = False  # by Ctrl-C or a signal, before the last turn
    share_of_others: float = 0.0  # of the processors, see ``measurement/turns.py``

    @property
    def run(self) -> Run:
        """The run that was asked for."""
        return self.runs[RUN]

    @property
    def turns_taken(self) -> int:
        """How many turns all contestants together have finished."""
        return sum(len(each.turns[RUN]) for each in self.contestants)

    @property
    def device(self) -> Device | None:
        """Name and peak, with the median of all measured matrix products; None without a turn."""
        devices = [device for each in self.contestants for device in each.devices]
        if not devices:
            return None
        matmul = statistics.median(device.matmul_flops for device in devices)
        return Device(name=devices[0].name, peak_flops=devices[0].peak_flops, matmul_flops=matmul)

    @property
    def peak_flops(self) -> float | None:
        """The operations a second that are compared with: the device's peak, or the matmul's."""
        if self.device is None:
            return None
        return self.device.peak_flops or self.device.matmul_flops

    @property
    def workloads(self) -> list[str]:
        """Those that were trained, the run first."""
        return [workload for workload in (RUN, HOST_BOUND) if workload in self.runs]

    def rows(self, workload: str) -> list[Row]:
        """A row for each name that finished a turn; of a peer, that of its better settings."""
        better: dict[str, Row] = {}
        for row in self.all_rows(workload):
            best = better.setdefault(row.name, row)
            if row.compared < best.compared:
                better[row.name] = row
        return [*better.values()]

    def all_rows(self, workload: str) -> list[Row]:
        """A row for each contestant that finished a turn."""
        return [self._row(each, workload) for each in self.contestants if each.turns[workload]]

    @property
    def warnings(self) -> Iterator[str]:
        """Whether the turns were stopped, or the machine was busy; each contestant that failed or
        trains another model.
        """
        yield from busy_warning(self.share_of_others)
        if self.stopped:
            of = self.turns * len(self.contestants)
            yield f"stopped after {self.turns_taken} of {of} turns; the figures are of these"
        for each in self.contestants:
            if each.failure is not None:
                yield f"{each.title} {each.failure}"
        for workload in self.workloads:
            yield from self._other_losses(workload)

    def _other_losses(self, workload: str) -> Iterator[str]:
        rows = {row.name: row for row in self.rows(workload)}
        if MEGASPEED not in rows:
            return
        own, run = rows[MEGASPEED].first_loss, self.runs[workload]
        allowed = TOLERANCES[run.precision].loss
        for name, row in rows.items():
            difference = relative_difference(row.first_loss, own)
            # "not <=" instead of ">", because NaN must not agree.
            if name not in _OWN_WEIGHTS and not difference <= allowed:
                yield (
                    f"{name} has loss {row.first_loss:.9g} in step 1 ({workload}), but megaspeed "
                    f"has {own:.9g}; from the same weights, only a relative difference of "
                    f"{allowed:.0e} is allowed in {run.precision}, so its time may be that of "
                    "another task"
                )

    def _row(self, contestant: Contestant, workload: str) -> Row:
        run, turns = self.runs[workload], contestant.turns[workload]
        steps = Spread.of([seconds for turn in turns for seconds in turn[0].step_seconds])
        tokens_per_second = run.tokens_per_step / steps.median
        flops, attention = flops_per_token(run)
        each_rank = tokens_per_second / run.grid.world_size
        return Row(
            name=contestant.name,
            settings=contestant.settings,
            step_seconds=steps,
            ratio=self._ratio(contestant, workload),
            tokens_per_second=tokens_per_second,
            flops=flops * each_rank,
            causal_flops=(flops - attention / 2) * each_rank,
            first_loss=turns[0][0].first_loss,
            peak_bytes=max(rank.peak_bytes for turn in turns for rank in turn),
        )

    def _ratio(self, contestant: Contestant, workload: str) -> Spread | None:
        """The spread of the ratios of neighbouring turns. One of them may have failed later."""
        own = next((each for each in self.contestants if each.name == MEGASPEED), contestant)
        ratios = [
            _median_step(theirs) / _median_step(ours)
            for theirs, ours in zip(contestant.turns[workload], own.turns[workload], strict=False)
        ]
        return Spread.of(ratios) if ratios and contestant is not own else None


def _median_step(turn: Sequence[Turn]) -> float:
    return statistics.median(turn[0].step_seconds)


def flops_per_token(run: Run) -> tuple[float, float]:
    """FLOPs a token of forward and backward, and those of them that are attention's."""
    model, length = run.config.model, run.config.data.sequence_length
    width = model.num_attention_heads * model.head_dim
    attention = 3.0 * 4 * length * width * model.num_hidden_layers
    return training_flops_per_token(model, length), attention
