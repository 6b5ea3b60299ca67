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
from megaspeed.measurement.bench.contest import MEGASPEED, RUN, Contestant
from megaspeed.measurement.bench.peers import Settings
from megaspeed.measurement.turns import Result
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.topology.devices import peak_by_name
from megaspeed.units import Spread

_OWN_WEIGHTS = ("hf-deepspeed",)  # transformers draws its own initial weights


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one contestant needed for one workload, over all its turns."""

    name: str
    settings: Settings | None  # None if it has only one set of settings
    step_seconds: Spread  # of rank 0's steps
    ratio: Spread | None  # None for megaspeed, and if megaspeed has no figures
    tokens_per_second: float  # of all ranks, at the median step
    flops: float  # operations a second and rank
    causal_flops: float  # the same with half of the attention's operations
    share_of_peak: float  # of the device, or of the matmul
    causal_share_of_peak: float
    first_loss: float
    peak_bytes: int  # of the fullest rank
    turns: Sequence[Sequence[float]]  # seconds of each step

    @property
    def compared(self) -> float:
        """The figure by which settings are compared: the ratio, or seconds if there is none.

        Unlike seconds, a ratio does not change with the speed of the machine.
        """
        return self.step_seconds.median if self.ratio is None else self.ratio.median


@dataclass(frozen=True, kw_only=True)
class BenchResult(Result[Contestant]):
    """All turns of a run."""

    runs: Mapping[str, Run]  # workload -> its run; the run that was asked for first
    not_run: Mapping[str, str]  # peers that cannot train the run -> why

    @property
    def matmul_flops(self) -> float | None:
        """Operations a second of a large product, the median of all turns; None without a turn."""
        measured = [flops for row in self.rows for ranks in row.extras for flops in ranks]
        return statistics.median(measured) if measured else None

    @property
    def known_peak_flops(self) -> float | None:
        """The dense peak of the device in the run's precision; None if it is not known."""
        if self.device is None or self.runs[RUN].precision == "fp32":
            return None
        return peak_by_name(self.device.name)

    @property
    def peak_flops(self) -> float | None:
        """The operations a second that are compared with: the device's peak, or the matmul's."""
        return self.known_peak_flops or self.matmul_flops

    def better(self, workload: str) -> list[Figures]:
        """Return the figures of each name; of a peer, those of its better settings."""
        better: dict[str, Figures] = {}
        for each in self.figures(workload):
            best = better.setdefault(each.name, each)
            if each.compared < best.compared:
                better[each.name] = each
        return [*better.values()]

    def figures(self, workload: str) -> list[Figures]:
        """Return those of each contestant that finished a turn, even if a later one failed.

        There are none if no rank could measure a matrix product.
        """
        if self.peak_flops is None:
            return []
        rows = [row for row in self.rows if row.workload == workload and row.turns]
        own = next((row for row in rows if row.name == MEGASPEED), None)
        return [self._figures(row, own) for row in rows]

    def _figures(self, row: Contestant, own: Contestant | None) -> Figures:
        steps = [turn[0].step_seconds for turn in row.turns]
        spread = Spread.of([seconds for turn in steps for seconds in turn])
        tokens_per_second = row.run.tokens_per_step / spread.median
        each_rank, peak = tokens_per_second / row.run.grid.world_size, self.peak_flops
        assert peak is not None, "otherwise there are no figures"
        total, attention = flops_per_token(row.run)
        flops, causal_flops = total * each_rank, (total - attention / 2) * each_rank
        return Figures(
            name=row.name,
            settings=row.settings,
            step_seconds=spread,
            ratio=None if own is None or own is row else _ratio(row, own),
            tokens_per_second=tokens_per_second,
            flops=flops,
            causal_flops=causal_flops,
            share_of_peak=flops / peak,
            causal_share_of_peak=causal_flops / peak,
            first_loss=row.losses[0],
            peak_bytes=max(rank.peak_bytes for turn in row.turns for rank in turn),
            turns=[list(turn) for turn in steps],
        )

    @property
    def notes(self) -> Iterator[str]:
        """Yield what went wrong, and each contestant that trains another model."""
        yield from super().notes
        for workload, run in self.runs.items():
            losses = {each.name: each.first_loss for each in self.better(workload)}
            own, allowed = losses.get(MEGASPEED), TOLERANCES[run.precision].loss
            for name, loss in losses.items():
                if own is None or name in _OWN_WEIGHTS:
                    continue
                # "not <=" instead of ">", because NaN must not agree.
                if not relative_difference(loss, own) <= allowed:
                    yield (
                        f"{name} has loss {loss:.9g} in step 1 ({workload}), but megaspeed has "
                        f"{own:.9g}; from the same weights, only a relative difference of "
                        f"{allowed:.0e} is allowed in {run.precision}, so its time may be that of "
                        "another task"
                    )


def _ratio(row: Contestant, own: Contestant) -> Spread:
    """The spread of the ratios of neighbouring turns. One of them may have failed later."""
    medians = [
        [statistics.median(turn[0].step_seconds) for turn in each.turns] for each in (row, own)
    ]
    return Spread.of([theirs / ours for theirs, ours in zip(*medians, strict=False)])


def flops_per_token(run: Run) -> tuple[float, float]:
    """Return FLOPs a token of forward and backward, and those of them that are attention's."""
    model, length = run.config.model, run.config.data.sequence_length
    width = model.num_attention_heads * model.head_dim
    attention = 3.0 * 4 * length * width * model.num_hidden_layers
    return training_flops_per_token(model, length), attention
