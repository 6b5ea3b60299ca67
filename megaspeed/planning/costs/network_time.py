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

Both are computed in one of two ways. The closed form takes microseconds. A simulation of the run's
schedule takes milliseconds, or up to a second for 35 stages, but it assumes nothing about it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.pipeline.simulation import Durations, length, simulate
from megaspeed.planning.costs.placement import Placement
from megaspeed.planning.costs.workload import Cluster, Message, Workload, block_parameters
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

_SIMULATED = 6
"""This many micro-batches for each stage are simulated. Each further micro-batch takes the same
time. With random times of stages and messages, the error of a step is below 0.2 %."""


@dataclass(frozen=True)
class Network:
    """The communication of one workload on one cluster."""

    work: Workload
    cluster: Cluster

    @property
    def placement(self) -> Placement:
        """The ranks on the nodes."""
        return Placement(self.work.grid, self.cluster.gpus_per_node)

    @property
    def overlaps(self) -> bool:
        """Whether collectives can run beside computation. On CPUs, the same cores do both."""
        return self.cluster.measured is None

    def tp(self) -> tuple[float, float]:
        """Return the seconds in a block's forward and backward: two all-reduces of (tokens, D).

        (Shoeybi et al. 2019, section 3.) With sequence parallelism, each all-reduce becomes a
        reduce-scatter and an all-gather. The backward also gathers two inputs again, while it
        computes the gradients of these inputs (Korthikanti et al. 2022, section 4.2.2).
        """
        work, tp = self.work, self.work.grid.tp
        if tp == 1:
            return 0.0, 0.0
        message = work.tokens * work.model.hidden_size * work.element_bytes
        if work.sequence_parallel:
            gather = self.collective("tp", "all_gather", message)
            both = gather + self.collective("tp", "reduce_scatter", message)
            again = 2 * (SLOWDOWN_BY_OVERLAP if self.overlaps else 1.0) * gather
            return 2 * both, 2 * both + again
        both = 2 * self.collective("tp", "all_reduce", message)
        return both, both

    def tp_of_ends(self) -> tuple[float, float]:
        """Return the seconds in the embedding and in the head with its loss, of both passes.

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

    def message(self) -> float:
        """Return the seconds of a message between two stages: the activations of a micro-batch.

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

    def dp(self, stage: int, forward: float, backward: float) -> float:
        """What the data axis adds to the step.

        Args:
            stage: the pipeline stage.
            forward: seconds of a block's forward.
            backward: seconds of its backward.

        ZeRO-1 and 2 have a reduce-scatter, and an all-gather of parameters after the step, each for
        every bucket. ZeRO-3 gathers each layer in the forward and in the backward of each
        micro-batch, and reduces its gradients (Rajbhandari et al. 2020, section 7). Small blocks
        are gathered together (``gathered_together``). The group that is last in one pass and first
        in the next one is gathered once for both. So if one group has all blocks, it is gathered
        once a step.

        Replicas all-reduce their partition of the gradients once a step, for every bucket. At
        ZeRO-0, all data ranks are replicas.

        Compressed gradients take the fraction ``sent_share`` of these bytes. The time to compress
        them is not included.

        If a collective overlaps with computation, only the part that takes longer than the
        computation is added. It also slows the computation by ``SLOWDOWN_BY_OVERLAP``.
        """
        return self._shards(stage, forward, backward) + self._replicas(stage, backward)

    def _shards(self, stage: int, forward: float, backward: float) -> float:
        """The part of ``dp`` within the groups over which ZeRO partitions."""
        work = self.work
        if work.grid.shard == 1:
            return 0.0
        blocks, count = work.blocks_of_stages[stage], work.micro_batches
        overlaps = work.overlaps_dp and self.overlaps
        share = work.sent_share if work.grid.replicate == 1 else 1.0
        if work.zero_stage == 3:
            weights = block_parameters(work.model) / work.grid.tp
            together = max(1, min(blocks, int(work.gathered_together // weights)))
            group = self.collective("shard", "all_gather", together * weights * work.element_bytes)
            groups = max(1, math.ceil(blocks / together))
            kept = (2 * count - 1) / (2 * count * groups) if work.gathered_together else 0.0
            gather = group / together * (1 - kept)  # for each block and pass, on average
            gradients = weights * work.gradient_bytes * share
            reduce = self.collective("shard", "reduce_scatter", gradients)
            if not overlaps:
                return blocks * (2 * count * gather + work.reductions * reduce)
            in_forward = _added(gather, forward)
            reduced = reduce * work.reductions / count  # for each micro-batch, on average
            hidden = reduced if work.reduces_in_backward else 0.0
            in_backward = _added(gather + hidden, backward)
            exposed = reduce if work.reduces_in_backward else blocks * work.reductions * reduce
            return count * blocks * (in_forward + in_backward) + group + exposed
        parameters = work.parameters_of_rank(stage)
        gradients = parameters * work.gradient_bytes * share
        buckets = max(1, math.ceil(gradients / work.bucket_bytes))
        reduction = buckets * self.collective("shard", "reduce_scatter", gradients / buckets)
        if overlaps:
            reduction = _beside(reduction, blocks * backward, buckets)
        weights = parameters * work.element_bytes
        gather = buckets * self.collective("shard", "all_gather", weights / buckets)
        return work.reductions * reduction + gather

    def _replicas(self, stage: int, backward: float) -> float:
        """The part of ``dp`` between the ranks that hold the same partition."""
        work, grid = self.work, self.work.grid
        if grid.replicate == 1:
            return 0.0
        gradients = work.parameters_of_rank(stage) * work.gradient_bytes * work.sent_share
        buckets = max(1, math.ceil(gradients / work.bucket_bytes))
        message = gradients / grid.shard / buckets
        reduction = buckets * self.collective("replica", "all_reduce", message)
        overlaps = work.reduces_in_backward if work.zero_stage == 3 else work.overlaps_dp
        if overlaps and self.overlaps and work.sent_share == 1.0:
            reduction = _beside(reduction, work.blocks_of_stages[stage] * backward, buckets)
        return reduction

    def collective(self, axis: Axis, kind: Message, message: float) -> float:
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


def _beside(reduction: float, backward: float, buckets: int) -> float:
    """Return the seconds that reductions add to a backward beside which they run.

    The last one is of the layers that the backward reaches last, so nothing hides it.
    """
    last = reduction / buckets
    return last + _added(reduction - last, backward)


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

    Each stage waits for two messages, one with each neighbour, for each micro-batch (Narayanan et
    al. 2021, section 2.2).
    """
    times = [sum(both) for both in zip(forward, backward, strict=True)]
    count, pp = work.micro_batches, work.grid.pp
    own, p2p = count * max(times), 2 * message * (count + pp - 1)
    if work.schedule == "gpipe":
        return sum(times) + (count - 1) * (max(forward) + max(backward)) - own, p2p
    assert work.schedule == "1f1b", "use ``simulated`` for another schedule"
    ends = []
    for stage, time in enumerate(times):
        after = len(times) - 1 - stage
        wait = passed = sum(times[stage + 1 :])
        if count > after:
            first, last = passed - after * forward[stage], passed - after * backward[stage]
            wait = min(passed, max(0.0, first) + max(0.0, last))
        ends.append(sum(times[:stage]) + count * time + wait)
    return max(ends) - own, p2p


def simulated(
    work: Workload, forward: Sequence[float], backward: Sequence[float], message: float
) -> tuple[float, float]:
    """Return the seconds of the bubble and of messages, for any schedule."""
    if work.grid.pp == 1:
        return 0.0, 0.0
    own = work.micro_batches * max(map(sum, zip(forward, backward, strict=True)))
    quiet = pipeline_seconds(work, forward, backward, 0.0)
    return quiet - own, pipeline_seconds(work, forward, backward, message) - quiet


def pipeline_seconds(
    work: Workload, forward: Sequence[float], backward: Sequence[float], message: float
) -> float:
    """Return the seconds from the first forward of a step to its last backward, simulated.

    Args:
        work: the grid, the schedule and the number of micro-batches are used.
        forward: seconds of the forward of one micro-batch on each stage.
        backward: the same for the backward.
        message: seconds of a message between two stages.
    """
    pp, count = work.grid.pp, work.micro_batches
    durations = Durations(forward=forward, backward=backward, message=message)

    def seconds(micro_batches: int) -> float:
        return length(simulate(SCHEDULES[work.schedule], pp, micro_batches, durations))

    enough = _SIMULATED * pp
    if count <= enough + pp:
        return seconds(count)
    before, after = seconds(enough), seconds(enough + pp)
    return after + (after - before) / pp * (count - enough - pp)
