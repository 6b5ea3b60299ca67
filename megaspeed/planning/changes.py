"""The cheapest change of one setting with which a run fits.

Settings are changed in the order of the cost, each alone, on the same
ranks:

    sequence parallelism     little: an all-reduce becomes a reduce-scatter and an all-gather, and
                             a backward gathers some inputs again while it computes (Korthikanti
                             et al. 2022, section 4.2.2)
    1f1b instead of gpipe    nothing: the same bubble (Narayanan et al. 2021, section 2.2.1)
    ZeRO-1 instead of 0      nothing: as many bytes as an all-reduce (ZeRO, section 7.2)
    no extra_in_flight       twice as long waits for messages between pipeline stages
    more groups of chunks    ZeRO-2 and 3 visit chunks more often, so traffic is larger
    selective recomputation  a few percent: norms and activation functions once more (Korthikanti
                             et al. 2022, section 5)
    full recomputation       for all blocks a third more operations: one more forward (Chen et al.
                             2016); first for a quarter of the blocks of each pipeline stage
    one chunk of a stage     as many times the bubble as there were chunks (section 2.2.2)
    gradient reduction       once for each micro-batch: more traffic
    ZeRO-2, ZeRO-3           the same; ZeRO-3 also gathers parameters (ZeRO, section 7.2)
    smaller micro-batch      smaller matrices, and more traffic that occurs once for each
    fewer replicas           the shards of a replica may no longer be on one node
    inputs in host memory    full recomputation; and the MLP is computed once more
    more tensor ranks        four collectives a block; within a node only
    more context ranks       collectives in the attention of each block
    more pipeline stages     a larger bubble
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any, get_args

from megaspeed.config.errors import ConfigError
from megaspeed.config.rules import divisors
from megaspeed.config.run import Recomputation
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import Settings, Training, verdict_of


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of one setting after which a run fits."""

    set_text: tuple[str, ...]  # what to type after ``--set``
    peak_bytes: int  # predicted peak of the changed run


def cheapest_change(training: Training, cluster: Cluster) -> Change | None:
    """Return the cheapest single change with which the run fits; None if no single one does."""
    for settings in chain(*_changes(training, cluster.gpus_per_node)):
        with suppress(ConfigError):
            run = training.under(settings)
            peak = predict(run, training.device_type).fullest.peak_bytes
            if verdict_of(run, peak, cluster) == "fits":
                return Change(set_text=training.set_text(settings), peak_bytes=peak)
    return None


def single_changes(training: Training, gpus_per_node: int) -> list[tuple[int, tuple[str, ...]]]:
    """Return the single changes that free memory on the fullest rank with the same number of ranks.

    Returns:
        The bytes that each change frees and what to type after ``--set``, the largest first.
    """
    peak = predict(training.run, training.device_type).fullest.peak_bytes
    best: list[tuple[int, tuple[str, ...]]] = []
    for attempts in _changes(training, gpus_per_node):
        smallest = min(attempts, key=training.peak_bytes, default=training.settings)
        freed = peak - training.peak_bytes(smallest)
        if freed > 0:
            best.append((int(freed), training.set_text(smallest)))
    return sorted(best, reverse=True)


def _changes(training: Training, gpus_per_node: int) -> list[list[Settings]]:
    """Return the settings that each change of the module's docstring leads to, in its order."""
    s, blocks = training.settings, training.stated.model.num_hidden_layers

    def one(applies: bool, **fields: Any) -> list[Settings]:
        return [replace(s, **fields)] if applies else []

    complete_gradients = s.zero_stage >= 2 and s.gradient_reduction == "per_step"
    return [
        one(s.tp > 1 and s.sequence_parallel is False, sequence_parallel=True),
        one(s.pp > 1 and s.schedule == "gpipe", schedule="1f1b"),
        one(s.dp * s.cp > 1 and s.zero_stage == 0, zero_stage=1),
        one(s.extra_in_flight > 0, extra_in_flight=0),
        one(s.virtual_stages > 1 and s.micro_batch_groups != "auto", micro_batch_groups="auto"),
        _more_recomputation(s, blocks),
        one(s.virtual_stages > 1, virtual_stages=1),
        one(complete_gradients, gradient_reduction="per_micro_batch"),
        [
            replace(s, zero_stage=zero_stage, gradient_reduction="auto")
            for zero_stage in range(max(2, s.zero_stage + 1), 4)
            if s.dp * s.cp > 1
        ],
        [replace(s, replicate=count) for count in reversed(divisors(s.replicate)[:-1])],
        [replace(s, micro_batch_size=size) for size in reversed(divisors(s.micro_batch_size)[:-1])],
        one(
            s.activation_checkpointing != "full_offloaded" and training.device_type == "cuda",
            activation_checkpointing="full_offloaded",
            recomputed_blocks=None,
        ),
        [
            replace(_at(s, pp=s.pp, cp=s.cp, tp=tp), sequence_parallel=sequence_parallel)
            for tp in divisors(gpus_per_node)
            if tp > s.tp and s.world_size % (s.pp * s.cp * tp) == 0
            for sequence_parallel in dict.fromkeys(
                (s.sequence_parallel, s.sequence_parallel or True)
            )
        ],
        [_at(s, pp=s.pp, cp=s.cp * more, tp=s.tp) for more in divisors(s.dp)[1:]],
        [
            _at(s, pp=pp, cp=s.cp, tp=s.tp)
            for pp in divisors(s.world_size // (s.cp * s.tp))
            if s.pp < pp <= blocks
        ],
    ]


def _more_recomputation(s: Settings, blocks: int) -> list[Settings]:
    """Return selective recomputation of all blocks, then full one of more and more blocks."""
    kinds = get_args(Recomputation)

    def cost(kind: Recomputation, count: int | None) -> tuple[int, float]:
        return kinds.index(kind), count or inf

    stage_blocks = -(-blocks // s.pp)
    quarters = sorted({stage_blocks * quarter // 4 for quarter in (1, 2, 3)} - {0})
    choices: list[tuple[Recomputation, int | None]] = [("selective", None)]
    choices += [("full", count) for count in (*quarters, None)]
    now = cost(s.activation_checkpointing, s.recomputed_blocks)
    return [
        replace(s, activation_checkpointing=kind, recomputed_blocks=count)
        for kind, count in choices
        if cost(kind, count) > now
    ]


def _at(settings: Settings, *, pp: int, cp: int, tp: int) -> Settings:
    """Return the settings with these degrees, and with the dp that keeps the number of ranks."""
    return replace(settings, pp=pp, cp=cp, tp=tp, dp=settings.world_size // (pp * cp * tp))
