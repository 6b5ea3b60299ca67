"""Seconds that a rank waits for others: tensor parallelism, pipeline, the data axis.

The time of a collective is that of a ring in NCCL (src/graph/tuning.cc):

    seconds = start + hops x seconds of a hop + bytes sent / bandwidth

Bytes and hops are exact. The constants are from NCCL's source code and from data sheets, or
measured (``Cluster.measured``).

A pipeline adds two terms to a step:

    first forward ................................................ last backward
    slowest stage:   its own work    + bubble                 + p2p
                     all other terms   without messages,        what messages add
                                       less own work

Both are computed in one of two ways. The closed form takes microseconds, or a few milliseconds if
stages have several chunks. A simulation of the run's schedule takes milliseconds, or up to two
seconds for 35 stages, but it assumes nothing about the schedule.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from operator import add

from megaspeed.config.resolve import BYTES_OF
from megaspeed.pipeline.schedules import Pipeline
from megaspeed.pipeline.simulation import Durations, simulate
from megaspeed.pipeline.visits import holds_of
from megaspeed.planning.costs.placement import Placement
from megaspeed.planning.costs.workload import (
    Cluster,
    CollectiveKind,
    MuonWork,
    Workload,
)
from megaspeed.tensor_parallel.shards import columns_of_weights
from megaspeed.topology.grid import Axis

LINK_EFFICIENCY = 0.78
"""Bus bandwidth of a large collective, as a fraction of the data sheet's bandwidth. NCCL's tuning
model limits rings on A100 with NVSwitch to 235 of 300 GB/s (src/graph/tuning.cc)."""

_HOP_WITHIN_NODE, _HOP_BETWEEN_NODES, _HOP_OF_TREE, _START = 3.4e-6, 14e-6, 28e-6, 8.4e-6
"""Seconds of one hop of a ring, of a tree, and of the start of a collective, with NCCL's Simple
protocol (src/graph/tuning.cc: hwLat and baseLat)."""

SLOWDOWN_BY_OVERLAP = 0.189
"""Computation takes longer by this fraction while a collective runs beside it, because both use
processors, memory and power (Lee et al. 2025, arXiv 2507.03114, abstract: 18.9 % on average)."""

_HOST_READ = 30e-6
"""Seconds for which a GPU waits while the host reads the number of rows that it will receive, and
then starts the next kernels (all_to_all of experts). An assumption, not measured."""

_SIMULATED, _SIMULATED_GROUPS = 6, 4
"""About this many micro-batches for each stage, and this many groups of them, are simulated. Each
further micro-batch takes the same time. With random times of stages and messages, the error of a
step is below 0.2 %, and below 2 % with several chunks."""

_CHEAP = 20_000
"""With several chunks or ``extra_in_flight``, a step of at most this many forwards is simulated
completely, in 0.2 s, because the first micro-batches take another time than the later ones."""


@dataclass(frozen=True)
class Network:
    """The communication of one workload on one cluster."""

    work: Workload
    cluster: Cluster

    @cached_property
    def placement(self) -> Placement:
        return Placement(self.work.grid, self.cluster.gpus_per_node)

    @property
    def overlaps(self) -> bool:
        """Whether collectives can run beside computation. On CPUs, the same cores do both."""
        return self.cluster.measured is None

    @cached_property
    def tp(self) -> tuple[float, float]:
        """Seconds of a block's forward and of its backward: two all-reduces of (tokens, D).

        (Shoeybi et al. 2019, section 3.) With sequence parallelism, each all-reduce becomes a
        reduce-scatter and an all-gather. The backward also gathers two inputs again, while it
        computes the gradients of these inputs (Korthikanti et al. 2022, section 4.2.2). Experts are
        not split over tensor ranks, so only the attention has these collectives.
        """
        work, tp = self.work, self.work.grid.tp
        if tp == 1:
            return 0.0, 0.0
        message = work.tokens * work.model.hidden_size * work.element_bytes
        means = 0.0  # squares of queries and keys: two fp32 numbers a token
        if work.model.qk_norm == "all_heads":
            means = self.collective("tp", "all_reduce", 8 * work.tokens)
        if work.sequence_parallel:
            gather = self.collective("tp", "all_gather", message)
            both = gather + self.collective("tp", "reduce_scatter", message)
            again = (SLOWDOWN_BY_OVERLAP if self.overlaps else 1.0) * gather
            pairs = 2 if work.model.num_experts is None else 1
            return pairs * both + means, pairs * (both + again) + means
        both = 2 * self.collective("tp", "all_reduce", message) + means
        return both, both

    @cached_property
    def cp(self) -> tuple[float, float]:
        """Seconds of a block's forward and of its backward over the context axis.

        Ulysses has two all-to-alls in each pass, as ``tensor_parallel.context`` describes. If keys
        and values are gathered, the backward gathers them again, unless it repeats the forward, and
        sums their gradients.
        """
        work, grid = self.work, self.work.grid
        if work.context_method is None:
            return 0.0, 0.0
        method, token_bytes = work.context_method, work.tokens * work.element_bytes
        features = work.model.exchanged_features(method, cp=grid.cp, tp=grid.tp)
        if method == "ulysses":
            both = sum(self.collective("cp", "all_to_all", token_bytes * f) for f in features)
            return both, both
        (message,) = (grid.cp * token_bytes * each for each in features)
        gather = self.collective("cp", "all_gather", message)
        again = 1.0 - (work.recomputed_share if work.recomputation == "full" else 0.0)
        return gather, again * gather + self.collective("cp", "reduce_scatter", message)

    @cached_property
    def ep(self) -> tuple[float, float]:
        """Seconds of a block's forward and of its backward over the expert axis.

        all_to_all has two exchanges of rows in each pass, and one of counts in the forward, for
        which the host waits. The rank with the most rows determines their time. all_gather has an
        all-gather and a reduce-scatter of all ranks' tokens in each pass, and an all-gather of the
        choice in the forward (``traffic._add_expert_axis``).
        """
        work, method = self.work, self.work.expert_exchange
        if method is None:
            return 0.0, 0.0
        model, element = work.model, work.element_bytes
        active, experts = model.num_experts_per_tok, model.num_experts
        assert active is not None and experts is not None
        columns = columns_of_weights(active, element, method)
        if method == "all_to_all":
            row = work.load_factor * work.own_tokens * active * element
            sizes = row * (model.hidden_size + columns), row * model.hidden_size
            both = sum(self.collective("ep", "all_to_all", size) for size in sizes)
            waits = self.collective("ep", "all_to_all", 8 * experts)
            return both + waits + (_HOST_READ if self.overlaps else 0.0), both
        everyone = self.work.grid.size_along("ep") * work.own_tokens
        plain = everyone * element * model.hidden_size
        packed = plain + everyone * element * columns
        forward = self.collective("ep", "all_gather", packed)
        forward += self.collective("ep", "all_gather", 4 * active * everyone)
        forward += self.collective("ep", "reduce_scatter", plain)
        backward = self.collective("ep", "all_gather", plain)
        return forward, backward + self.collective("ep", "reduce_scatter", packed)

    @cached_property
    def tp_of_ends(self) -> tuple[float, float]:
        """Seconds in the embedding, and in the head with its loss, of both passes.

        The embedding's output is summed, and so is the gradient of the head's input. The loss has
        three all-reduces of a number for each token (Shoeybi et al. 2019, section 3).
        """
        work = self.work
        if work.grid.tp == 1:
            return 0.0, 0.0
        message = work.tokens * work.model.hidden_size * work.element_bytes
        summed = self.collective("tp", "all_reduce", message)
        loss = 3 * self.collective("tp", "all_reduce", 4 * work.tokens)
        if not work.sequence_parallel:
            return summed, summed + loss
        gather = self.collective("tp", "all_gather", message)
        return summed + gather, gather + self.collective("tp", "reduce_scatter", message) + loss

    @cached_property
    def message(self) -> float:
        """Seconds of a message between two stages: the activations of a micro-batch.

        With sequence parallelism, a tensor rank sends only its part. A message to another node uses
        the network of one GPU.
        """
        work = self.work
        if work.grid.pp == 1:
            return 0.0
        message: float = work.tokens * work.model.hidden_size * work.element_bytes
        if work.sequence_parallel:
            message /= work.grid.tp
        cluster = self.cluster
        if cluster.measured is not None:
            return cluster.measured.latency + message / cluster.measured.message_bandwidth
        within_node = work.grid.world_size <= cluster.gpus_per_node
        bandwidth = cluster.device.link_bandwidth if within_node else cluster.network_bandwidth
        hop = _HOP_WITHIN_NODE if within_node else _HOP_BETWEEN_NODES
        return message / (LINK_EFFICIENCY * 1e9 * bandwidth) + hop + _START

    def dp(self, stage: int, forward: float, backward: float, waits: float | None = None) -> float:
        """What the data axis adds to the step.

        Args:
            forward: seconds of a block's forward.
            backward: seconds of its backward.
            waits: seconds by which collectives of chunks lengthen a simulated step; if None, they
                are estimated.

        ZeRO-1 and 2 have a reduce-scatter and an all-gather for every bucket. The gathers run
        beside the first forward of the next step, except for compressed gradients without replicas:
        their matrices are one bucket, for which the first layer waits. ZeRO-3 gathers each layer in
        the forward and in the backward of each micro-batch, and reduces its gradients (Rajbhandari
        et al. 2020, section 7). Small blocks are gathered together (``gathered_together``). The
        group that is last in one pass and first in the next one is gathered once for both. So if
        one group has all blocks, it is gathered once a step. If a stage has several chunks, each is
        gathered for its visits (``_chunks``).

        Replicas all-reduce their partition of the gradients once a step, for every bucket. At
        ZeRO-0, all data ranks are replicas.

        Compressed gradients take the fraction ``sent_share`` of these bytes. The time to compress
        them is not included.

        If the copies of experts are on other ranks than those of other parameters, each collective
        becomes two, one after the other.

        If a collective overlaps with computation, only the part that takes longer than the
        computation is added. It also slows the computation by ``SLOWDOWN_BY_OVERLAP``.
        """
        return self._shards(stage, forward, backward, waits) + self._replicas(stage, backward)

    def _shards(self, stage: int, forward: float, backward: float, waits: float | None) -> float:
        """The part of ``dp`` within the groups over which ZeRO partitions."""
        work = self.work
        if not self._is_sharded:
            return 0.0
        blocks, count = work.blocks_of_stages[stage], work.micro_batches
        overlaps = work.overlaps_dp and self.overlaps
        if work.gather_policy != "layers":
            return self._chunks(stage, forward, backward, waits)
        if work.zero_stage == 3:
            together, group, reduce = self._layer(blocks)
            groups = max(1, math.ceil(blocks / together))
            kept = (2 * count - 1) / (2 * count * groups) if work.gathered_together else 0.0
            gather = group / together * (1 - kept)  # for each block and pass, on average
            if not overlaps:
                return blocks * (2 * count * gather + work.reductions * reduce)
            in_forward = _added(gather, forward)
            reduced = reduce * work.reductions / count  # for each micro-batch, on average
            hidden = reduced if work.reduces_in_backward else 0.0
            in_backward = _added(gather + hidden, backward)
            exposed = reduce if work.reduces_in_backward else blocks * work.reductions * reduce
            return count * blocks * (in_forward + in_backward) + group + exposed
        reduction, gather, total = 0.0, 0.0, 0
        for copies, parameters in work.held(stage):
            gradients = parameters * work.gradient_bytes * self._share
            buckets = max(1, math.ceil(gradients / work.bucket_bytes))
            if copies.shard == 1:
                continue
            total += buckets
            message, over = gradients / buckets, copies.shard_axis
            reduction += buckets * self.collective(over, "reduce_scatter", message)
            if self._share != 1.0:  # all compressed matrices, with the embedding, are one bucket
                buckets = 1
            weights = parameters * work.element_bytes
            gather += buckets * self.collective(over, "all_gather", weights / buckets)
        if overlaps:
            reduction = _beside(reduction, blocks * backward, total)
        if self.overlaps and work.overlaps_gathers:
            gather = _beside(gather, blocks * forward, total if self._share == 1.0 else 1)
        return work.reductions * reduction + gather

    @property
    def _is_sharded(self) -> bool:
        """Whether several ranks share a part of the parameters."""
        return any(copies.shard > 1 for copies, _ in self.work.held_of_block)

    @property
    def _share(self) -> float:
        """``sent_share`` of the gradients that shards send."""
        return self.work.sent_share if self.work.grid.replicate == 1 else 1.0

    def _layer(self, blocks: int) -> tuple[int, float, float]:
        """ZeRO-3: return how many of these blocks are gathered together, how long that gather
        takes, and how long the reduction of one block's gradients takes.
        """
        work = self.work
        held, group, reduce = work.held_of_block, 0.0, 0.0
        weights = sum(elements for _, elements in held)
        together = max(1, min(blocks, int(work.gathered_together // weights)))
        for copies, elements in held:
            if copies.shard > 1:
                message, over = together * elements * work.element_bytes, copies.shard_axis
                group += self.collective(over, "all_gather", message)
                gradients = elements * work.gradient_bytes * self._share
                reduce += self.collective(over, "reduce_scatter", gradients)
        return together, group, reduce

    @cached_property
    def collectives(self) -> tuple[list[float], list[float]]:
        """ZeRO-3 with chunks: for each virtual stage, the seconds of its gather, and those of the
        reductions in one visit. Both lists are empty if nothing of this runs beside computation.
        """
        work = self.work
        if work.gather_policy == "layers" or not self._is_sharded or not self.overlaps:
            return [], []
        together, group, reduce = self._layer(max(work.blocks))
        visit = work.reductions / work.groups * reduce if work.reduces_in_backward else 0.0
        return [group / together * b for b in work.blocks], [visit * b for b in work.blocks]

    def _chunks(self, stage: int, forward: float, backward: float, waits: float | None) -> float:
        """The part of ``dp`` if ZeRO-3 gathers chunks.

        Collectives run beside all computation of a stage, which waits if they take longer than it.
        But a chunk that is not gathered ahead arrives while the first micro-batch of its visit
        computes, after the reduction of the visit before. The layers of a chunk arrive one after
        another, and nothing hides the first one.
        """
        work, pipeline = self.work, self.work.pipeline
        together, group, reduce = self._layer(max(work.blocks))
        holds = holds_of(pipeline, stage)
        blocks = [work.blocks[pipeline.virtual(stage, hold.chunk)] for hold in holds]
        gathered = sum(blocks) * group / together
        reduced = work.blocks_of_stages[stage] * work.reductions * reduce
        if not self.overlaps:
            return gathered + reduced
        beside = reduced if work.reduces_in_backward else 0.0
        computing = work.blocks_of_stages[stage] * work.micro_batches * (forward + backward)
        first, last = group, reduce if beside else 0.0
        if work.gather_policy == "chunks":  # without a gather ahead, each hold waits for a layer
            first *= len(holds)
        if waits is None and work.gather_policy == "chunks":
            late = [group / together - (forward if hold.forward else backward) for hold in holds]
            queued = beside / len(holds)
            waits = sum(max(0.0, queued + b * each) for b, each in zip(blocks, late, strict=True))
        elif waits is None:
            waits = max(0.0, gathered + beside - computing)
        hidden = max(0.0, gathered + beside - waits)
        return first + waits + SLOWDOWN_BY_OVERLAP * hidden + last + reduced - beside

    def _replicas(self, stage: int, backward: float) -> float:
        """The part of ``dp`` between the ranks that hold the same partition."""
        work, reduction, total = self.work, 0.0, 0
        for copies, parameters in work.held(stage):
            if copies.replicate > 1:
                gradients = parameters * work.gradient_bytes * work.sent_share
                buckets = max(1, math.ceil(gradients / work.bucket_bytes))
                message, over = gradients / copies.shard / buckets, copies.replica_axis
                reduction += buckets * self.collective(over, "all_reduce", message)
                total += buckets
        if total == 0:
            return 0.0
        overlaps = work.reduces_in_backward if work.zero_stage == 3 else work.overlaps_dp
        if overlaps and self.overlaps and work.sent_share == 1.0:
            reduction = _beside(reduction, work.blocks_of_stages[stage] * backward, total)
        return reduction

    def orthogonalization(self, muon: MuonWork, products: float) -> float:
        """Return the seconds that Muon's exchanges add to the products of its fullest owner.

        All-to-alls over the shard x tp ranks move the matrices to their owners and back. With one
        shard, the replicas share this, and then gather all results. All rounds are taken as equal.
        They run beside the products, but nothing hides one of them.
        """
        rounds, seconds = max(1, muon.rounds), 0.0
        message = BYTES_OF[muon.precision] * muon.elements / rounds
        if muon.members > 1:
            sent = message / muon.groups
            seconds = 2 * rounds * self.collective(muon.axes[0], "all_to_all", sent)
        if muon.groups > 1:
            seconds += rounds * self.collective(muon.axes[1], "all_gather", message)
        return _beside(seconds, products, rounds) if self.overlaps else seconds

    def collective(self, axis: Axis, kind: CollectiveKind, message: float) -> float:
        """Return the seconds of an all-reduce (2 rounds), or of another collective (1 round).

        n ranks on N nodes form a ring. Each sends rounds x (n-1)/n of the message in
        rounds x (n-1) hops, of which rounds x (N-1) are between nodes. For an all-reduce, NCCL uses
        a tree if its hops take less time (NCCL, src/graph/tuning.cc).
        """
        rounds = 2 if kind == "all_reduce" else 1
        measured = self.cluster.measured
        if measured is not None:
            ranks = self.work.grid.size_along(axis)
            hop = measured.latency + message / ranks / measured.message_bandwidth
            return rounds * (ranks - 1) * hop
        placed, bandwidth = self.placement.along(axis), self.ring_bandwidth(axis)
        ranks, nodes = placed.size, placed.most_nodes
        hops = (ranks - nodes) * _HOP_WITHIN_NODE + (nodes - 1) * _HOP_BETWEEN_NODES
        if rounds == 2:
            levels = math.ceil(math.log2(nodes))
            hops = min(hops, (ranks / nodes - 1 + levels) * _HOP_OF_TREE)
        return _START + rounds * (hops + (ranks - 1) / ranks * message / bandwidth)

    def ring_bandwidth(self, axis: Axis) -> float:
        """Return the bytes a second of the ring of the axis's group that is placed worst.

        A ring enters and leaves each node once, through the network of all GPUs that the group has
        there, so k ranks on a node have k times the bandwidth of one. The group that is placed
        worst determines the step.
        """
        cluster, placed = self.cluster, self.placement.along(axis)
        bandwidth = cluster.device.link_bandwidth
        if placed.most_nodes > 1:
            bandwidth = min(bandwidth, placed.fewest_together * cluster.network_bandwidth)
        return LINK_EFFICIENCY * 1e9 * bandwidth


def _added(communication: float, computation: float) -> float:
    """Return the seconds that a collective adds to the computation beside it."""
    together = min(communication, computation)
    return communication - together + SLOWDOWN_BY_OVERLAP * together


def _beside(collectives: float, passes: float, buckets: int) -> float:
    """Return the seconds that the collectives of all buckets add to passes beside which they run.

    Nothing hides one of them: the last reduction is of the layers that a backward reaches last, and
    the first gather of those that a forward begins with.
    """
    alone = collectives / buckets
    return alone + _added(collectives - alone, passes)


def closed_form(
    work: Workload, forward: Sequence[float], backward: Sequence[float], message: float
) -> tuple[float, float]:
    """Return the seconds of the bubble and of messages, for 1f1b and gpipe.

    With gpipe, the slowest forward and then the slowest backward set the pace:

        time = sum of all stages' times + (micro-batches - 1) x (slowest forward + slowest backward)

    (Narayanan et al. 2021, section 2.2, for unequal stages).

    With 1f1b, a stage starts when the first micro-batch has passed the stages before it. After its
    own last backward, these stages run their backwards of the last micro-batch. A stage has k
    stages after it. Between a forward and a backward of the stage, a micro-batch passes these k
    stages twice. The stage waits for this at its first and at its last backward. Meanwhile it runs
    k forwards or k backwards. The step takes as long as the stage for which all this takes longest.

    With several chunks, stages are assumed to compute in step (``_in_step``). If all are
    equal, the bubble is (stages - 1) / (chunks x micro-batches) of the computation.

    Each stage waits for two messages, one with each neighbour, for each micro-batch and chunk
    (Narayanan et al. 2021, section 2.2). With several chunks, a stage with other micro-batches to
    compute waits less: in simulations for at most half of the messages, or for stages /
    micro-batches of a group if this is more. Nothing hides the messages before the first backward
    and after the last forward.
    """
    sums = work.stage_sums(forward), work.stage_sums(backward)
    times = [sum(both) for both in zip(*sums, strict=True)]
    count, pp, size = work.micro_batches, work.grid.pp, math.ceil(work.micro_batches / work.groups)
    alone = (work.chunks - 1) * size
    waited = max(0.5, pp / size) if work.chunks > 1 else 1.0
    own = count * max(times)
    p2p = 2 * message * (pp - 1 + alone + waited * (work.chunks * count - alone))
    if work.schedule == "gpipe":
        return sum(times) + (count - 1) * (max(forward) + max(backward)) - own, p2p
    assert work.schedule == "1f1b", "use ``simulated`` for another schedule"
    if work.chunks > 1:
        return _in_step(work.pipeline, tuple(forward), tuple(backward)) - own, p2p
    ends = []
    for stage, (time, before) in enumerate(zip(times, accumulate(times, initial=0), strict=False)):
        after = len(times) - 1 - stage
        wait = passed = sum(times[stage + 1 :])
        if count > after:
            first, last = passed - after * forward[stage], passed - after * backward[stage]
            wait = min(passed, max(0.0, first) + max(0.0, last))
        ends.append(before + count * time + wait)
    return max(ends) - own, p2p


@lru_cache(maxsize=1024)  # variants with other ZeRO stages may take the same times
def _in_step(pipeline: Pipeline, forward: tuple[float, ...], backward: tuple[float, ...]) -> float:
    """Return the seconds of 1f1b with several chunks, if all stages wait for the slowest one after
    each forward and backward.

    In tick t, stage s runs its forward number t - s, and its backward number t + s - L, where

        L = 2 x (stages - 1) + (chunks - 1) x micro-batches of a group

    Forwards run through chunk 0 for a whole group, then chunk 1, and so on, backwards in reverse.
    So the seconds of a tick change only if a stage changes to another chunk. Each group after the
    third takes as long as the third.
    """
    pp, chunks = pipeline.stages, pipeline.chunks
    size = math.ceil(pipeline.micro_batches / pipeline.groups)
    late = 2 * (pp - 1) + (chunks - 1) * size

    def seconds(groups: int) -> float:
        visits = groups * chunks
        # Tick -> the stages that begin another chunk, and the seconds of its forward or backward.
        begun: defaultdict[int, list[tuple[list[float], int, float]]] = defaultdict(list)
        ahead, back = [0.0] * pp, [0.0] * pp
        for stage, visit in product(range(pp), range(visits + 1)):
            ends = visit == visits
            takes = 0.0 if ends else forward[visit % chunks * pp + stage]
            begun[stage + size * visit].append((ahead, stage, takes))
            takes = 0.0 if ends else backward[(-1 - visit) % chunks * pp + stage]
            begun[late - stage + size * visit].append((back, stage, takes))
        total = 0.0
        for tick, following in pairwise(sorted(begun)):
            for passes, stage, takes in begun[tick]:
                passes[stage] = takes
            total += (following - tick) * max(map(add, ahead, back))
        return total

    groups = min(pipeline.groups, 3)
    total, rest = seconds(groups), pipeline.micro_batches - groups * size
    return total + (rest / size * (total - seconds(groups - 1)) if rest else 0.0)


def simulated(
    work: Workload, forward: Sequence[float], backward: Sequence[float], message: float
) -> tuple[float, float]:
    """Return the seconds of the bubble and of messages, for any schedule."""
    if work.grid.pp == 1:
        return 0.0, 0.0
    both = [sum(each) for each in zip(forward, backward, strict=True)]
    own = work.micro_batches * max(work.stage_sums(both))
    quiet = pipeline_seconds(work, Durations(forward=forward, backward=backward))
    durations = Durations(forward=forward, backward=backward, message=message)
    return quiet - own, pipeline_seconds(work, durations) - quiet


def pipeline_seconds(work: Workload, durations: Durations) -> float:
    """Return the seconds from the first forward of a step to its last backward, simulated.

    Fewer groups are simulated or, if they have many micro-batches, smaller ones.
    """
    pp, count, pipeline = work.grid.pp, work.micro_batches, work.pipeline
    size, groups = math.ceil(count / work.groups), min(work.groups, _SIMULATED_GROUPS)
    short, longer = (groups - 1, size), (groups, size)
    if groups == work.groups or size > 3 * pp:
        each = max(2, _SIMULATED // groups) * pp
        short, longer = (groups, each), (groups, each + pp)

    def seconds(groups: int, size: int) -> float:
        shape = replace(pipeline, groups=groups, micro_batches=groups * size)
        return simulate(shape, durations).length

    first, second = math.prod(short), math.prod(longer)
    is_cheap = (work.chunks > 1 or work.extra_in_flight > 0) and len(work.blocks) * count <= _CHEAP
    if count <= second or is_cheap:
        return simulate(pipeline, durations).length
    after = seconds(*longer)
    return after + (after - seconds(*short)) / (second - first) * (count - second)
