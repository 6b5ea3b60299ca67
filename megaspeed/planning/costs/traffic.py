"""Bytes that one rank sends in one optimizer step, by axis and collective.

    dp      gradients and parameters, as ZeRO partitions them over data and context ranks. With
            shards and replicas:
            shard     the same, over the ranks that ZeRO partitions over
            replica   the partition of the gradients, between the ranks that hold it
            stage     Muon, with several shards and tensor ranks: updates of matrices
    tp      activations within a layer, and the loss
    cp      queries, keys and values of a block's attention, and its output
    ep      tokens of a block's experts, and what the experts compute for them
            expert_shard, expert_replica   as shard and replica, for experts
    pp      activations and their gradients, a tied weight's gradient
    tp, cp  with an auxiliary loss of experts, the counts of tokens of each sequence
    world   one report of a few fp64 numbers from every rank to every rank, with the sums of the
            loads of experts

Message sizes are exact. For a message of S bytes, each of n ranks sends the bytes of a
bandwidth-optimal (ring) algorithm (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", section 3; Rajbhandari et al. 2020, ZeRO, section 7.1):

    reduce_scatter   (n-1)/n S        S: the complete input of a rank
    all_gather       (n-1)/n S        S: the complete output
    all_reduce     2 (n-1)/n S        a reduce-scatter, then an all-gather
    all_to_all       (n-1)/n S        S: the complete input of a rank. If its parts are unequal,
                                      the parts for other ranks
    reduce           (n-1)/n S        along a chain n - 1 ranks send S; the mean over n ranks
    broadcast        (n-1)/n S        the same in the other direction
    send                     S
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Literal

from megaspeed.config.model import ContextMethod
from megaspeed.config.resolve import BYTES_OF, Run
from megaspeed.data_axis.axis import DataAxis, data_axis_of
from megaspeed.data_axis.buckets import Bucket
from megaspeed.data_axis.gathers import Gather, Turn, turns_of
from megaspeed.model.parameters import block_rows
from megaspeed.pipeline.partition import blocks_of_stages
from megaspeed.pipeline.schedules import Pipeline, pipeline_of
from megaspeed.pipeline.visits import holds_of
from megaspeed.planning.costs.activations import (
    full_hidden_bytes,
    hidden_bytes,
    mlp_parts_of,
    own_tokens_of,
    tokens_of,
)
from megaspeed.planning.costs.memory import int8_columns, powersgd_matrices
from megaspeed.tensor_parallel.shards import PARTIAL, columns_of_weights, key_value_replicas
from megaspeed.topology.grid import Axis

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "broadcast", "send"
]
TrafficAxis = Literal[Axis, "world"]

Traffic = Mapping[tuple[TrafficAxis, Collective], int]
"""Bytes that one rank sends in one optimizer step. Collectives that send nothing are omitted."""

# Squares of the norm, loss, peak memory, stop signal, z-loss, and the timeline of a step:
# training.worker.
_NUMBERS_OF_A_REPORT = 5 + 1 + 10
_FP64_BYTES = _INT64_BYTES = 8
_INT32_BYTES = 4


def bytes_sent(collective: Collective, message_bytes: int, ranks: int) -> int:
    """Return the bytes that one of ``ranks`` ranks sends for ``message_bytes``, rounded down.

    A group of one rank sends nothing.
    """
    if ranks == 1:
        return 0
    if collective == "send":
        return message_bytes
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) * message_bytes // ranks


def by_axis(traffic: Traffic) -> dict[str, dict[str, int]]:
    """Return the traffic as axis -> collective -> bytes, sorted by name."""
    axes: dict[str, dict[str, int]] = {}
    for (axis, collective), sent in sorted(traffic.items()):
        axes.setdefault(axis, {})[collective] = sent
    return axes


def axis_totals(traffic: Traffic) -> Counter[TrafficAxis]:
    """Return each axis -> bytes of all its collectives; 0 for an axis that sends nothing."""
    totals: Counter[TrafficAxis] = Counter()
    for (axis, _), sent in traffic.items():
        totals[axis] += sent
    return totals


class Messages:
    """Messages of a step by axis, collective and size of the group.

    They are summed before they are converted to bytes sent. So a predicted and a counted step are
    rounded in the same way.
    """

    def __init__(self) -> None:
        self._bytes: Counter[tuple[TrafficAxis, Collective, int]] = Counter()
        self._sent: Counter[tuple[TrafficAxis, Collective]] = Counter()

    def add(
        self, axis: TrafficAxis, collective: Collective, message_bytes: int, *, ranks: int
    ) -> None:
        """Add one message, or several of the same kind together, in bytes."""
        self._bytes[axis, collective, ranks] += message_bytes

    def add_sent(self, axis: TrafficAxis, collective: Collective, sent_bytes: int) -> None:
        """Add the bytes that a rank sends in a message whose parts are unequal."""
        self._sent[axis, collective] += sent_bytes

    def traffic(self) -> Traffic:
        """Return the bytes that a rank sends for all these messages."""
        sent = self._sent.copy()
        for (axis, collective, ranks), message_bytes in self._bytes.items():
            sent[axis, collective] += bytes_sent(collective, message_bytes, ranks)
        return {key: total for key, total in sent.items() if total}


def predict_traffic(
    run: Run,
    pipeline_stage: int,
    device_type: str = "cuda",
    exchanged: Sequence[tuple[int, int]] | None = None,
) -> Traffic:
    """Return what a rank of ``pipeline_stage`` sends in one step, in bytes, on "cuda" or "cpu".

    With the expert exchange all_to_all, this depends on the choice of experts. ``exchanged`` has,
    for each block of the stage, how many rows of experts the rank sends to others in the forwards
    of a step, and how many it receives from others. If it is omitted, the experts of all ranks get
    equally many rows.

    Ranks of one pipeline stage send the same number of bytes, with two exceptions. At ZeRO-1 to 3,
    the last partition of a tied weight may be shorter; the result is for a rank with the longest
    one. Muon's ranks own unequal matrices; the result is for the rank that sends most of them.
    """
    messages, axis = Messages(), data_axis_of(run, pipeline_stage, device_type)
    if max(run.grid.dp_cp, run.grid.expert_copies.ranks) > 1:
        _add_data_axis(messages, run, axis, pipeline_stage)
    _add_orthogonalization(messages, run, axis)
    if run.grid.tp > 1:
        _add_tensor_axis(messages, run, axis, pipeline_stage)
    if run.context_method is not None:
        _add_context_axis(messages, run, run.context_method, pipeline_stage)
    if run.config.model.num_experts is not None:
        _add_expert_axis(messages, run, pipeline_stage, exchanged)
    _add_pipeline_axis(messages, run, axis, pipeline_stage)
    world_size = run.grid.world_size
    numbers, model = world_size * _NUMBERS_OF_A_REPORT, run.config.model
    if model.num_experts is not None:  # the loads and the auxiliary loss of each block
        numbers += model.num_hidden_layers * (model.num_experts + 1)
    messages.add("world", "all_reduce", numbers * _FP64_BYTES, ranks=world_size)
    return messages.traffic()


def compressed_share(run: Run, pipeline_stage: int) -> float:
    """Return the bytes sent for all gradients, as a fraction of the bytes without compression."""
    if run.compression is None:
        return 1.0
    axis, ranks = data_axis_of(run, pipeline_stage, "cuda"), run.grid.senders
    collective = "all_reduce" if run.grid.replicate > 1 else axis.matrix_reduction.collective
    assert collective is not None, "a run with one data rank compresses nothing"

    def sent(buckets: Iterable[Bucket]) -> int:
        """The bytes between the ranks that send compressed gradients to each other."""
        reduced = partial(_reduced_bytes, pipeline_of(run))
        size = attrgetter("part_bytes") if run.grid.replicate > 1 else reduced
        return bytes_sent(collective, sum(map(size, buckets)), ranks)

    plain, messages = sent(axis.buckets), _compressed_messages(run, axis)
    beside = sent(bucket for bucket in axis.buckets if bucket.compression is None)
    total = beside + sum(bytes_sent(*each, ranks) for each in messages)
    return total / plain if plain else 1.0


def _add_tensor_axis(messages: Messages, run: Run, axis: DataAxis, pipeline_stage: int) -> None:
    """What tensor parallelism sends in each micro-batch, and once a step.

    h = (B, S, D) is in the parameters' type. Column- and row-parallel layers come in pairs, one in
    the attention and one in the MLP of each block (Shoeybi et al. 2019, section 3). Their conjugate
    collectives f and g (``tensor_parallel.collectives``) send

                              forward                       backward
        block                 2 all-reduce h (g)            2 all-reduce h (f)
        embedding             1 all-reduce h (g)
        head                  1 all-reduce h (f): the forward computes this gradient
        loss                  all-reduce 3 numbers a token  (Shoeybi et al. 2019, section 3)
        norms of all heads    all-reduce 2 numbers a token  the same, in each block

    with sequence parallelism (Korthikanti et al. 2022, section 4.2.2)

        block                 2 all-gather, 2 reduce-       4 all-gather (2 of them gather inputs
                              scatter h                     once more, for dA), 2 reduce-scatter h
        embedding             1 all-reduce h                1 all-gather h
        head                  1 all-gather, 1 reduce-scatter h

    and an all-reduce of the gradients of key/value heads that several ranks hold. Once a step, the
    partition of gradients of which each tensor rank computes a part is all-reduced: with sequence
    parallelism those of norms and row-parallel biases, and always those of norms of each head.

    With experts, only the attention sends this (with sequence parallelism), because experts are not
    split over the tensor axis.

    Full recomputation repeats a block's forward up to the last tensor that its backward needs, the
    input of the MLP's row-parallel matrix. It does not repeat the g after it, unless a norm follows
    (``norm_position`` after). If the MLP is divided (``full_offloaded``), this is so for the last
    part. All others are complete, and the backward of each part repeats it once more up to that
    matrix. Selective recomputation repeats no collective.
    """
    tp, micro_batches = run.grid.tp, run.batch.gradient_accumulation_steps
    has_embedding, has_head = pipeline_stage == 0, pipeline_stage == run.grid.pp - 1
    blocks, again = _blocks_and_recomputed(run, pipeline_stage)

    def add(collective: Collective, message_bytes: int) -> None:
        messages.add("tp", collective, micro_batches * message_bytes, ranks=tp)

    h, model = full_hidden_bytes(run), run.config.model
    offloads = run.config.parallel.activation_checkpointing == "full_offloaded"
    parts = mlp_parts_of(run) if offloads else [1]
    # Bytes of the MLPs' outputs, or of their parts, that are summed again.
    repeated = parts if model.norm_position == "after" else parts[:-1]
    summed = again * h // sum(parts) * sum(repeated)
    divided = summed if len(parts) > 1 else 0
    pairs = 2  # of layers in a block
    if model.num_experts is not None:
        summed, divided, pairs = 0, 0, 1
    if run.sequence_parallel:
        add("all_reduce", has_embedding * h)
        gathers = pairs * (blocks * 3 + again) + has_embedding + has_head
        add("all_gather", gathers * h + divided)
        add("reduce_scatter", (blocks * 2 * pairs + again + has_head) * h + summed)
    else:
        add("all_reduce", (blocks * 4 + again + has_embedding + has_head) * h + summed)
    if model.qk_norm == "all_heads":  # the mean squares of queries and keys
        add("all_reduce", (2 * blocks + again) * 2 * tokens_of(run) * BYTES_OF["fp32"])
    if has_head:  # maximum in the logits' type; sum of exponentials and target's logit in fp32
        add("all_reduce", tokens_of(run) * (BYTES_OF[run.precision] + 2 * BYTES_OF["fp32"]))
    partial = [bucket for bucket in axis.buckets if bucket.group in PARTIAL]
    own_bytes = sum(bucket.part for bucket in partial) * _gradient_element_bytes(run, axis)
    messages.add("tp", "all_reduce", own_bytes, ranks=tp)
    add("all_reduce", blocks * _shared_head_gradient_bytes(run))


def _add_context_axis(
    messages: Messages, run: Run, method: ContextMethod, pipeline_stage: int
) -> None:
    """What a block's attention sends in each micro-batch (``tensor_parallel/context.py``).

    Of T own tokens, with q query and kv key features, in the parameters' type:

        ulysses       two all-to-alls, of T (q + 2 kv) and of T q, in each pass
        all_gather    two all-gathers and a reduce-scatter of cp T 2 kv; the second all-gather is
                      before the backward of the attention

    Full recomputation repeats the all-to-alls. Its repeated forward does the second all-gather.
    """
    cp, model = run.grid.cp, run.config.model
    features = model.exchanged_features(method, cp=cp, tp=run.grid.tp)
    blocks, again = _blocks_and_recomputed(run, pipeline_stage)
    token_bytes = tokens_of(run) * BYTES_OF[run.precision] * run.batch.gradient_accumulation_steps
    for each in features:
        if method == "ulysses":
            size = (2 * blocks + again) * each * token_bytes
            messages.add("cp", "all_to_all", size, ranks=cp)
        else:
            size = cp * blocks * each * token_bytes
            messages.add("cp", "all_gather", 2 * size, ranks=cp)
            messages.add("cp", "reduce_scatter", size, ranks=cp)


def _add_expert_axis(
    messages: Messages,
    run: Run,
    pipeline_stage: int,
    exchanged: Sequence[tuple[int, int]] | None,
) -> None:
    """What a block of experts sends in each micro-batch (``tensor_parallel/experts.py``).

    Of T own tokens, with c columns of weights beside D features, in the parameters' type:

                      forward                                  backward
        all_to_all    rows of D + c to their experts,          rows of D to their experts,
                      rows of D back                           rows of D + c back
        all_gather    gathers ep T (D + c),                    gathers ep T D,
                      reduce-scatters ep T D                   reduce-scatters ep T (D + c)

    Only rows for other ranks are sent. There are T k (ep - 1) / ep of them in each direction if the
    experts of all ranks get equally many rows.

    A forward also sends the choice: all_to_all the number of rows of each expert in int64,
    all_gather the k experts of each token in int32. With an auxiliary loss, tensor and context
    ranks all-reduce how many tokens of each sequence use each expert, in int64. Recomputation uses
    the choice of the forward, so it sends neither. Full recomputation repeats what a forward sends
    to experts. It repeats what these return only if a norm follows (``norm_position`` after).
    """
    grid, model, batch = run.grid, run.config.model, run.batch
    blocks, again = _blocks_and_recomputed(run, pipeline_stage)
    count = batch.gradient_accumulation_steps
    active, experts = model.num_experts_per_tok, model.num_experts
    assert active is not None and experts is not None
    if model.router_aux_loss_coef > 0.0:
        loads = blocks * count * batch.micro_batch_size * experts * _INT64_BYTES
        messages.add("tp", "all_reduce", loads, ranks=grid.tp)
        messages.add("cp", "all_reduce", loads, ranks=grid.cp)
    if run.expert_exchange is None:
        return
    element, ep, tokens = BYTES_OF[run.precision], grid.ep or 1, count * own_tokens_of(run)
    plain, has_norm = model.hidden_size * element, model.norm_position == "after"
    packed = plain + element * columns_of_weights(active, element, run.expert_exchange)
    if run.expert_exchange == "all_to_all":
        if exchanged is None:
            rows = tokens * active * (ep - 1) // ep
            exchanged = [(rows, rows)] * blocks
        for index, (sent, received) in enumerate(exchanged):
            forward, backward = sent * packed + received * plain, sent * plain + received * packed
            repeated = sent * packed + received * plain * has_norm
            is_again = index < again  # the first blocks are recomputed
            messages.add_sent("ep", "all_to_all", forward + backward + is_again * repeated)
        messages.add("ep", "all_to_all", blocks * count * experts * _INT64_BYTES, ranks=ep)
        return
    choices = blocks * tokens * active * _INT32_BYTES
    gathered = tokens * (blocks * (packed + plain) + again * packed)
    summed = tokens * (blocks * (packed + plain) + again * plain * has_norm)
    messages.add("ep", "all_gather", ep * (choices + gathered), ranks=ep)
    messages.add("ep", "reduce_scatter", ep * summed, ranks=ep)


def _blocks_and_recomputed(run: Run, pipeline_stage: int) -> tuple[int, int]:
    """Return the number of blocks of a stage, and of those that are fully recomputed."""
    blocks, parallel = blocks_of_stages(run)[pipeline_stage], run.config.parallel
    kinds = map(parallel.recomputation_of, range(blocks))
    return blocks, sum(kind.startswith("full") for kind in kinds)


def _shared_head_gradient_bytes(run: Run) -> int:
    """Return the bytes of a block's key/value heads that several ranks hold (``shared_rows``)."""
    model, tp = run.config.model, run.grid.tp
    replicas = key_value_replicas(model, tp)
    if replicas == 1:
        return 0
    qkv = block_rows(model)["attention.qkv"]
    assert qkv.columns is not None
    rows = tp // replicas * model.head_dim  # a head of each part
    columns = 2 * (qkv.columns + qkv.bias) + (model.qk_norm == "all_heads")
    return rows * columns * BYTES_OF[run.precision]


def _add_pipeline_axis(messages: Messages, run: Run, axis: DataAxis, pipeline_stage: int) -> None:
    """What a pipeline stage sends its neighbours, and the sum of a tied weight's gradients.

        activations   to the next stage, each micro-batch       (B, S, D)      Narayanan et al.
        gradients     to the stage before, each micro-batch     (B, S, D)      2021, section 3.2
        tied weight   the first and the last stage, once a step, send each other their gradients

    Each chunk sends both, except that the first chunk of the model has no stage before it, and the
    last one no next stage. With sequence parallelism each tensor rank sends its own part,
    (B, S/tp, D). The gradient of a tied weight is complete at ZeRO-0. At ZeRO-1 to 3, it is the
    partition of the first data rank, which is the longest.
    """
    sends = pipeline_of(run).sends_of(pipeline_stage)
    tied = (bucket for bucket in axis.buckets if bucket.group == "tied")
    elements = sum(own.length for bucket in tied for own in bucket.owned(0))
    sent_bytes = sends * hidden_bytes(run) + elements * _gradient_element_bytes(run, axis)
    messages.add("pp", "send", sent_bytes, ranks=run.grid.pp)


def _gradient_element_bytes(run: Run, axis: DataAxis) -> int:
    """Return the bytes of an element. Offloaded gradients are those of master weights."""
    offloaded = run.config.zero_optimization.offloads_optimizer
    return BYTES_OF["fp32" if offloaded else axis.matrix_reduction.total]


def _add_data_axis(messages: Messages, run: Run, axis: DataAxis, pipeline_stage: int) -> None:
    """What ZeRO sends (Rajbhandari et al. 2020, section 7), for P parameters of a rank.

        stage   gradients                            parameters
        0       all-reduce P, once a step            -                                    2 x
        1       reduce-scatter P                     all-gather P after the step          2 x
        2       the same                             the same                             2 x
        3       reduce-scatter P                     all-gather P in each pass            3 x

    The right column is the total, for one reduction and, at ZeRO-3, one micro-batch. ``data_axis``
    states how often a bucket is reduced, in which type and over which ranks, and what is gathered.
    Compressed gradients are sent otherwise (``_compressed_messages``).
    """
    grid, pipeline = run.grid, pipeline_of(run)
    names: dict[Axis, TrafficAxis] = {} if grid.is_hybrid else {"shard": "dp", "replica": "dp"}
    for bucket in axis.buckets:
        how = bucket.reduction
        if how.collective is not None and not bucket.is_sent_compressed:
            name, size = names.get(how.axis, how.axis), _reduced_bytes(pipeline, bucket)
            messages.add(name, how.collective, size, ranks=grid.size_along(how.axis))
        if how.replica_axis is not None and bucket.compression is None:
            ranks = grid.size_along(how.replica_axis)
            messages.add(how.replica_axis, "all_reduce", bucket.part_bytes, ranks=ranks)
    for gather, count in _gather_counts(axis, pipeline, pipeline_stage).items():
        for over, size in gather.messages.items():
            ranks = grid.size_along(over)
            messages.add(names.get(over, over), "all_gather", count * size, ranks=ranks)
    name = "replica" if grid.replicate > 1 else "shard"
    for collective, size in _compressed_messages(run, axis):
        messages.add(names.get(name, name), collective, size, ranks=grid.senders)


def _add_orthogonalization(messages: Messages, run: Run, axis: DataAxis) -> None:
    """What Muon sends: matrices to their owners and back, and with one shard also an all-gather of
    the results over the replicas (``data_axis.orthogonalization``).
    """
    grid, element_bytes = run.grid, BYTES_OF[run.muon_dtype]
    names: dict[Axis, TrafficAxis] = {} if grid.is_hybrid else {"shard": "dp", "replica": "dp"}
    for plan in axis.orthogonalizations:
        over = plan.axis
        if over == "stage" and 1 in (grid.shard, grid.tp):
            over = "tp" if grid.shard == 1 else "shard"
        most = max(map(plan.sent_by, range(plan.members * plan.groups)))
        messages.add_sent(names.get(over, over), "all_to_all", element_bytes * most)
        if plan.groups > 1:
            gathered = sum(plan.round_of(number, 0).gathered for number in range(len(plan.rounds)))
            size, over = plan.groups * gathered * element_bytes, plan.copies.replica_axis
            messages.add(names.get(over, over), "all_gather", size, ranks=plan.groups)


def _reduced_bytes(pipeline: Pipeline, bucket: Bucket) -> int:
    return bucket.times(pipeline) * bucket.sent_bytes


def _gather_counts(axis: DataAxis, pipeline: Pipeline, pipeline_stage: int) -> Counter[Gather]:
    """Return how often a rank executes each gather in an optimizer step.

    A pass gathers its layers, but not those that the pass before it still holds. So M micro-batches
    gather at most M (2 P - E - H) elements (Rajbhandari et al. 2020, section 7.2.2, has 2 P). P is
    the size of the parameters that do not stay gathered, E the part of P in the embedding, and H
    the part that is the weight of the head. A tied weight counts twice in P.

    With several chunks, each chunk is gathered once for each time that it is held: all of it, or
    without E and H if no forward is among its computations.
    """
    found = Counter(axis.gathers_after_step)
    if axis.passes and not axis.is_local:
        for hold in holds_of(pipeline, pipeline_stage):
            found.update(axis.chunk_gathers(hold.chunk, forward=hold.forward))
        if pipeline.gather_policy == "layers":
            for turn, count in _turns(pipeline, pipeline_stage).items():
                for gather in axis.gathered(*turn):
                    found[gather] += count
    return found


@lru_cache(maxsize=1024)
def _turns(pipeline: Pipeline, stage: int) -> Mapping[Turn, int]:
    return Counter(turns_of(pipeline, stage))


def _compressed_messages(run: Run, axis: DataAxis) -> Iterator[tuple[Collective, int]]:
    """Yield the collectives of compressed gradients, once a step (``zero/compression.py``).

    int8        all-to-all of blocks and their scales; then between replicas an all-gather of as
                many bytes
    powersgd    all-reduce of P and of Q: rank x (n + m) numbers in fp32 for a matrix (n, m).
                Steps before ``start_step`` send more.
    """
    method = run.compression
    if method is None:
        return
    if method.type == "powersgd":
        matrices, rest = powersgd_matrices(run, axis)
        elements = method.rank * sum(map(sum, matrices)) + rest
        yield "all_reduce", elements * BYTES_OF["fp32"]
        return
    blocks = sum(math.ceil(each / method.block) for each in int8_columns(run, axis))
    sent_bytes = run.grid.senders * blocks * (method.block + BYTES_OF["fp32"])
    yield "all_to_all", sent_bytes
    if run.grid.replicate > 1:
        yield "all_gather", sent_bytes
