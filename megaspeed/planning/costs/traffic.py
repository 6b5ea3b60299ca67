"""Bytes that one rank sends in one optimizer step, by axis and collective.

    dp      gradients and parameters, as ZeRO partitions them over data and context ranks. With
            shards and replicas:
            shard     the same, over the ranks that ZeRO partitions over
            replica   the partition of the gradients, between the ranks that hold it
    tp      activations within a layer, and the loss
    cp      queries, keys and values of a block's attention, and its output
    pp      activations and their gradients, a tied weight's gradient
    world   one report of a few fp64 numbers from every rank to every rank

Message sizes are exact. For a message of S bytes, each of n ranks sends the bytes of a
bandwidth-optimal (ring) algorithm (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", section 3; Rajbhandari et al. 2020, ZeRO, section 7.1):

    reduce_scatter   (n-1)/n S        S: the complete input of a rank
    all_gather       (n-1)/n S        S: the complete output
    all_reduce     2 (n-1)/n S        a reduce-scatter, then an all-gather
    all_to_all       (n-1)/n S        S: the complete input of a rank
    reduce           (n-1)/n S        along a chain n - 1 ranks send S; the mean over n ranks
    broadcast        (n-1)/n S        the same in the other direction
    send                     S
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from megaspeed.config.model import ContextMethod
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import HEAD_WEIGHT, block_rows
from megaspeed.pipeline.partition import blocks_of_stages
from megaspeed.pipeline.schedules import Pipeline, passes_of, pipeline_of
from megaspeed.planning.costs.activations import (
    full_hidden_bytes,
    hidden_bytes,
    mlp_parts_of,
    tokens_of,
)
from megaspeed.planning.costs.gathers import gathered_elements_of_a_step
from megaspeed.planning.costs.memory import int8_columns, is_summed_over_step, powersgd_matrices
from megaspeed.planning.costs.rank_parameters import (
    BYTES_OF,
    LocalParameter,
    elements_of,
    flat_buckets,
    flat_elements,
    local_parameters,
    own_elements,
)
from megaspeed.tensor_parallel.plan import key_value_replicas
from megaspeed.topology.grid import Axis

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "broadcast", "send"
]
TrafficAxis = Literal[Axis, "world"]

Traffic = Mapping[tuple[TrafficAxis, Collective], int]
"""Bytes that one rank sends in one optimizer step. Collectives that send nothing are omitted."""

# Squares of the norm, loss, peak memory, stop signal, and the timeline of a step: training.worker.
_NUMBERS_OF_A_REPORT = 4 + 1 + 9
_FP64_BYTES = 8


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

    def add(
        self, axis: TrafficAxis, collective: Collective, message_bytes: int, *, ranks: int
    ) -> None:
        """Add one message, or several of the same kind together, in bytes."""
        self._bytes[axis, collective, ranks] += message_bytes

    def traffic(self) -> Traffic:
        """Return the bytes that a rank sends for all these messages."""
        sent: Counter[tuple[TrafficAxis, Collective]] = Counter()
        for (axis, collective, ranks), message_bytes in self._bytes.items():
            sent[axis, collective] += bytes_sent(collective, message_bytes, ranks)
        return {key: total for key, total in sent.items() if total}


def predict_traffic(run: Run, pipeline_stage: int, device_type: str = "cuda") -> Traffic:
    """Return what a rank of ``pipeline_stage`` sends in one step, in bytes, on "cuda" or "cpu".

    Ranks of one pipeline stage send the same number of bytes, except for a tied weight at ZeRO-1 to
    3, whose last partition may be shorter. The result is for a rank with the longest partition.
    """
    messages = Messages()
    if run.grid.dp_cp > 1:
        _add_data_axis(messages, run, pipeline_stage, on_host=device_type == "cpu")
    if run.grid.tp > 1:
        _add_tensor_axis(messages, run, pipeline_stage)
    if run.context_method is not None:
        _add_context_axis(messages, run, run.context_method, pipeline_stage)
    _add_pipeline_axis(messages, run, pipeline_stage)
    world_size = run.grid.world_size
    report = world_size * _NUMBERS_OF_A_REPORT * _FP64_BYTES
    messages.add("world", "all_reduce", report, ranks=world_size)
    return messages.traffic()


def compressed_share(run: Run, pipeline_stage: int) -> float:
    """Return the bytes sent for all gradients, as a fraction of the bytes without compression."""
    if run.compression is None:
        return 1.0
    parameters, ranks = local_parameters(run, pipeline_stage), run.grid.senders
    plain_message = _partition_message if run.grid.replicate > 1 else _gradient_message
    beside = [parameter for parameter in parameters if not parameter.is_compressed]
    plain = bytes_sent(*plain_message(run, parameters), ranks)
    messages = [plain_message(run, beside), *_compressed_messages(run, parameters)]
    return sum(bytes_sent(*each, ranks) for each in messages) / plain if plain else 1.0


def _add_tensor_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
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
    if run.sequence_parallel:
        add("all_reduce", has_embedding * h)
        add("all_gather", (blocks * 6 + again * 2 + has_embedding + has_head) * h + divided)
        add("reduce_scatter", (blocks * 4 + again + has_head) * h + summed)
    else:
        add("all_reduce", (blocks * 4 + again + has_embedding + has_head) * h + summed)
    if model.qk_norm == "all_heads":  # the mean squares of queries and keys
        add("all_reduce", (2 * blocks + again) * 2 * tokens_of(run) * BYTES_OF["fp32"])
    if has_head:  # maximum in the logits' type; sum of exponentials and target's logit in fp32
        add("all_reduce", tokens_of(run) * (BYTES_OF[run.precision] + 2 * BYTES_OF["fp32"]))
    partial = [p for p in local_parameters(run, pipeline_stage) if p.group == "partial"]
    own_bytes = own_elements(run, partial) * _gradient_element_bytes(run)
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
    cp = run.grid.cp
    features = run.config.model.exchanged_features(method, cp=cp, tp=run.grid.tp)
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


def _add_pipeline_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """What a pipeline stage sends its neighbours, and the sum of a tied weight's gradients.

        activations   to the next stage, each micro-batch       (B, S, D)      Narayanan et al.
        gradients     to the stage before, each micro-batch     (B, S, D)      2021, section 3.2
        tied weight   the first and the last stage, once a step, send each other their gradients

    Each chunk sends both, except that the first chunk of the model has no stage before it, and the
    last one no next stage. With sequence parallelism each tensor rank sends its own part,
    (B, S/tp, D).
    """
    stages = run.grid.pp
    sends = pipeline_of(run).sends_of(pipeline_stage)
    messages.add("pp", "send", sends * hidden_bytes(run), ranks=stages)
    messages.add("pp", "send", _tied_gradient_bytes(run, pipeline_stage), ranks=stages)


def _tied_gradient_bytes(run: Run, pipeline_stage: int) -> int:
    """Return a rank's part of the gradient of a weight that two pipeline stages hold; 0 if none is.

    At ZeRO-0 it is complete. At ZeRO-1 to 3 it is the first data rank's partition, the longest.
    """
    tied = [p for p in local_parameters(run, pipeline_stage) if p.group == "tied"]
    elements = min(elements_of(tied), own_elements(run, tied))
    return elements * _gradient_element_bytes(run)


def _gradient_element_bytes(run: Run) -> int:
    """Return the bytes of an element. Offloaded gradients are those of master weights."""
    offloaded = run.config.zero_optimization.offloads_optimizer
    return BYTES_OF["fp32" if offloaded else run.accumulation_dtype]


def _add_data_axis(messages: Messages, run: Run, pipeline_stage: int, *, on_host: bool) -> None:
    """What ZeRO sends (Rajbhandari et al. 2020, section 7), for P parameters of a rank.

        stage   gradients                            parameters
        0       all-reduce P, once a step            -                                    2 x
        1       reduce-scatter P                     all-gather P after the step          2 x
        2       the same                             the same                             2 x
        3       reduce-scatter P                     all-gather P in each pass            3 x

    ``parallel.gradient_reduction`` sets how often a step reduces gradients (``Run.reductions``).
    Those of norms and biases are always reduced once a step. The right column is for one reduction,
    over the shards. Replicas all-reduce their partition of the gradients once a step, and at ZeRO-0
    all data ranks are replicas. At stage 3 a backward gathers neither the embedding nor the weight
    of the head. With several chunks, each is gathered at most once a visit (``pipeline.visits``).
    Gradients are sent in the type in which they are accumulated, in ``communication_data_type``, or
    compressed (``_compressed_messages``). Parameters are sent in their own type. Every bucket is
    padded to a multiple of 2 n at ZeRO-1 and 2, and every parameter to a multiple of n at ZeRO-3,
    for n shards.
    """
    replicas, shards = run.grid.replicate, run.grid.shard
    over_shards: TrafficAxis = "dp" if replicas == 1 else "shard"
    over_replicas: TrafficAxis = "dp" if shards == 1 else "replica"
    parameters = local_parameters(run, pipeline_stage)
    plain = [parameter for parameter in parameters if not parameter.is_compressed]
    if shards > 1:
        collective, size = _gradient_message(run, parameters if replicas > 1 else plain)
        if on_host and collective == "reduce_scatter":
            collective = "all_to_all"  # over gloo, see ``zero.buckets``
        messages.add(over_shards, collective, size, ranks=shards)
        gathered = flat_elements(run, parameters)
        if run.zero_stage == 3:
            gathered = gathered_elements_of_a_step(run, parameters, pipeline_stage)
        size = gathered * BYTES_OF[run.precision]
        messages.add(over_shards, "all_gather", size, ranks=shards)
    if replicas > 1:
        messages.add(over_replicas, *_partition_message(run, plain), ranks=replicas)
    axis = over_replicas if replicas > 1 else over_shards
    for collective, size in _compressed_messages(run, parameters):
        messages.add(axis, collective, size, ranks=run.grid.senders)


def _partition_message(run: Run, parameters: Sequence[LocalParameter]) -> tuple[Collective, int]:
    """Return the collective that sums the partition of gradients over the replicas."""
    return "all_reduce", own_elements(run, parameters) * BYTES_OF[run.reduction_dtype]


def _gradient_message(run: Run, parameters: Sequence[LocalParameter]) -> tuple[Collective, int]:
    """Return the collective that sums gradients over the shards, with the bytes of the messages."""
    sent_bytes = 0
    for (first, *_), elements in flat_buckets(run, parameters):
        times = 1 if is_summed_over_step(run, first) else run.reductions
        if first.name == HEAD_WEIGHT and times > 1:
            times = min(times, _sums_of_the_head(pipeline_of(run)))
        sent_bytes += times * elements * BYTES_OF[run.reduction_dtype]
    return "reduce_scatter" if run.scatters_reductions else "all_reduce", sent_bytes


def _compressed_messages(
    run: Run, parameters: Sequence[LocalParameter]
) -> Iterator[tuple[Collective, int]]:
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
        matrices, rest = powersgd_matrices(run, parameters)
        elements = method.rank * sum(map(sum, matrices)) + rest
        yield "all_reduce", elements * BYTES_OF["fp32"]
        return
    blocks = sum(math.ceil(each / method.block) for each in int8_columns(run, parameters))
    sent_bytes = run.grid.senders * blocks * (method.block + BYTES_OF["fp32"])
    yield "all_to_all", sent_bytes
    if run.grid.replicate > 1:
        yield "all_gather", sent_bytes


@lru_cache(maxsize=256)
def _sums_of_the_head(pipeline: Pipeline) -> int:
    """Return how many times a backward of the last chunk of the model follows a forward of it.

    Such a backward sends the sum of the gradients of the head's weight that the forwards before it
    have computed.
    """
    passes = passes_of(pipeline, pipeline.stages - 1)
    own = [name for name, chunk in passes if chunk == pipeline.chunks - 1]
    return sum(turn == ("forward", "backward") for turn in pairwise(own))
