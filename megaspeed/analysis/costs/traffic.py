"""Bytes that one rank sends in one optimizer step, by axis and collective.

    dp      gradients and parameters, as ZeRO partitions them          traffic_data
    tp      activations within a layer, and the loss                   traffic_tensor
    pp      activations and their gradients, a tied weight's gradient  traffic_pipeline
    world   one report of a few fp64 numbers from every rank to every rank

Message sizes are exact, from shapes; ``collective_cost`` says what a message costs a rank.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from megaspeed.analysis.costs.activations import full_hidden_bytes, hidden_bytes, tokens_of
from megaspeed.analysis.costs.memory import (
    BYTES_OF,
    LocalParameter,
    elements_of,
    flat_group_elements,
    gathered_elements_of_a_step,
    local_parameters,
    partition_elements,
)
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import block_rows, layer_count, parameters_of
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.tensor_parallel.plan import key_value_replicas

# How many bytes a rank sends in a collective: the one place for the convention.
#
# S is the message in bytes, n the ranks of the group; per rank, by bandwidth-optimal (ring)
# algorithms (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
# workstations", section 3; Rajbhandari et al. 2020, ZeRO, section 7.1):
#
#     reduce_scatter   (n-1)/n S        S: the whole input of a rank
#     all_gather       (n-1)/n S        S: the gathered whole
#     all_reduce     2 (n-1)/n S        a reduce-scatter, then an all-gather
#     reduce           (n-1)/n S        along a chain n - 1 ranks send S; shared evenly
#     broadcast        (n-1)/n S        the same the other way round
#     send                     S
#
# What goes round once is therefore "1 x" of the message and an all-reduce "2 x", as ZeRO's paper
# counts, up to (n-1)/n.

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "send"]
TrafficAxis = Literal["pp", "dp", "tp", "world"]
"""world: what all ranks agree on (gradient norm, loss): a few numbers."""

Traffic = Mapping[tuple[TrafficAxis, Collective], int]
"""Bytes that one rank sends in one optimizer step; what is not sent at all is left out."""


def bytes_sent(collective: Collective, message_bytes: int, ranks: int) -> int:
    """Bytes that one of ``ranks`` ranks sends for messages of ``message_bytes``, rounded down.

    A group of one rank sends nothing.
    """
    if ranks == 1:
        return 0
    if collective == "send":
        return message_bytes
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) * message_bytes // ranks


def by_axis(traffic: Traffic) -> dict[str, dict[str, int]]:
    """The same as axis -> collective -> bytes, in the order of their names."""
    axes: dict[str, dict[str, int]] = {}
    for (axis, collective), sent in sorted(traffic.items()):
        axes.setdefault(axis, {})[collective] = sent
    return axes


class Messages:
    """Messages of a step by axis, collective and size of the group, before the convention.

    Summed as messages, so that rounding happens once and prediction and count round alike.
    """

    def __init__(self) -> None:
        self._bytes: Counter[tuple[TrafficAxis, Collective, int]] = Counter()

    def add(
        self, axis: TrafficAxis, collective: Collective, message_bytes: int, *, ranks: int
    ) -> None:
        """One message, or several of the same kind together, in bytes."""
        self._bytes[axis, collective, ranks] += message_bytes

    def traffic(self) -> Traffic:
        """What a rank sends for all of them."""
        sent: Counter[tuple[TrafficAxis, Collective]] = Counter()
        for (axis, collective, ranks), message_bytes in self._bytes.items():
            sent[axis, collective] += bytes_sent(collective, message_bytes, ranks)
        return {key: total for key, total in sent.items() if total}


# What tensor parallelism sends, one micro-batch after another.
#
# h = (B, S, D) in the parameters' type. Column- and row-parallel layers come in pairs, one in the
# attention and one in the MLP of each block (Shoeybi et al. 2019, section 3), whose conjugate
# collectives f and g (``tensor_parallel.collectives``) send
#
#                           forward                       backward
#     block                 2 all-reduce h (g)            2 all-reduce h (f)
#     embedding             1 all-reduce h (g)
#     head                                                1 all-reduce h (f)
#     loss                  all-reduce 3 numbers a token  (Shoeybi et al. 2019, section 3)
#
# with sequence parallelism (Korthikanti et al. 2022, section 4.2.2)
#
#     block                 2 all-gather, 2 reduce-       4 all-gather (2 of them gather inputs once
#                           scatter h                     more, for dA), 2 reduce-scatter h
#     embedding             1 all-reduce h                1 all-gather h
#     head                  1 all-gather h                1 all-gather, 1 reduce-scatter h
#     norms, biases                                       all-reduce of their gradients
#
# and an all-reduce of the gradients of norms of each head, and of key/value heads that several
# ranks hold.
#
# Recomputation runs a block's forward again, up to the last tensor that its backward needs: what
# the row-parallel layer of the MLP multiplies. Its g is left out.


def add_tensor_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """Adds one step's messages of a rank of ``pipeline_stage``."""
    tp = run.grid.tp
    if tp == 1:
        return
    layers = layers_of_stages(run)[pipeline_stage]
    last = layer_count(run.config.model) - 1
    blocks = sum(0 < layer < last for layer in layers)
    sequence_parallel = run.config.parallel.sequence_parallel
    hidden = _sequence_collectives if sequence_parallel else _whole_collectives
    micro_batches = run.batch.gradient_accumulation_steps

    def add(collective: Collective, message_bytes: int) -> None:
        messages.add("tp", collective, micro_batches * message_bytes, ranks=tp)

    for collective, count in hidden(run, blocks, 0 in layers, last in layers).items():
        add(collective, count * full_hidden_bytes(run))
    if last in layers:
        add("all_reduce", _loss_bytes(run))
    add("all_reduce", _partial_gradient_bytes(run, layers))
    add("all_reduce", blocks * _shared_head_gradient_bytes(run))


def _whole_collectives(
    run: Run, blocks: int, has_embedding: bool, has_head: bool
) -> dict[Collective, int]:
    """How many messages of h there are in one micro-batch."""
    recomputed = 1 if _recomputes(run) else 0
    return {"all_reduce": blocks * (4 + recomputed) + has_embedding + has_head}


def _sequence_collectives(
    run: Run, blocks: int, has_embedding: bool, has_head: bool
) -> dict[Collective, int]:
    """The same where activations between the pairs are split along the sequence."""
    recomputed = 1 if _recomputes(run) else 0
    return {
        "all_reduce": int(has_embedding),
        "all_gather": blocks * (6 + 2 * recomputed) + has_embedding + 2 * has_head,
        "reduce_scatter": blocks * (4 + recomputed) + has_head,
    }


def _recomputes(run: Run) -> bool:
    return run.config.parallel.activation_checkpointing == "full"


def _loss_bytes(run: Run) -> int:
    """Maximum in the logits' type; sum of exponentials and target's logit in fp32."""
    return tokens_of(run) * (BYTES_OF[run.precision] + 2 * BYTES_OF["fp32"])


def _partial_gradient_bytes(run: Run, layers: range) -> int:
    """Replicated parameters of which each rank sees a part: of the heads, or of the tokens."""
    elements = sum(
        parameter.elements
        for parameter in parameters_of(run.config.model, layers).values()
        if parameter.split == "each head"
        or (
            parameter.split == "replicated"
            and parameter.row.kind != "embedding"
            and run.config.parallel.sequence_parallel
        )
    )
    return elements * BYTES_OF[run.precision]


def _shared_head_gradient_bytes(run: Run) -> int:
    """Of one block: each rank's part lies at its head's place among zeros (``shared_rows``)."""
    model, tp = run.config.model, run.grid.tp
    replicas = key_value_replicas(model, tp)
    if replicas == 1:
        return 0
    qkv = block_rows(model)["attention.qkv"]
    assert qkv.columns is not None
    rows = tp // replicas * 2 * model.head_dim  # a key and a value head of each part
    return rows * (qkv.columns + qkv.bias) * BYTES_OF[run.precision]


# What a pipeline stage sends its neighbours, and the sum of a tied weight's gradients.
#
#     activations   to the next stage, each micro-batch       (B, S, D)      Narayanan et al. 2021,
#     gradients     to the stage before, each micro-batch     (B, S, D)      section 3.2: b s h
#     tied weight   the first and the last stage, once a step its local gradient to each other
#
# With sequence parallelism both messages are (B, S/tp, D), as each tensor rank sends its own part.


def add_pipeline_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """Adds one step's messages of a rank of ``pipeline_stage``."""
    stages = run.grid.pp
    neighbours = (pipeline_stage > 0) + (pipeline_stage < stages - 1)
    if neighbours:
        sends = neighbours * run.batch.gradient_accumulation_steps
        messages.add("pp", "send", sends * hidden_bytes(run), ranks=stages)
    tied = tied_gradient_bytes(run, pipeline_stage)
    if tied:
        messages.add("pp", "send", tied, ranks=stages)


def tied_gradient_bytes(run: Run, pipeline_stage: int) -> int:
    """A rank's part of the gradient of a weight that two pipeline stages hold; 0 without one.

    Whole at ZeRO-0; at ZeRO-1 to 3 the first data rank's partition, which is the longest.
    """
    tied = [p for p in local_parameters(run, pipeline_stage) if p.group == "tied"]
    if not tied:
        return 0
    elements = elements_of(tied)
    zero = run.config.zero_optimization
    if run.zero_stage > 0:
        dp = run.grid.dp
        flat = flat_group_elements(tied, dp)["tied"]
        partition = flat // dp if run.zero_stage < 3 else -(-elements // dp)
        elements = min(elements, partition)
    # Offloaded gradients are the master weights', in host memory.
    offloaded = zero.offloads_optimizer
    return elements * BYTES_OF["fp32" if offloaded else run.accumulation_dtype]


# What ZeRO sends over the data axis (Rajbhandari et al. 2020, section 7), P parameters of a rank.
#
#     stage   gradients                            parameters
#     0       all-reduce P, once a step            -                                    2 x
#     1       reduce P to its owners               all-gather P after the step          2 x
#     2       the same                             the same                             2 x
#     3       reduce-scatter P                     all-gather P in each pass            3 x
#
# "Once" is once a step or once a micro-batch, as ``parallel.gradient_reduction`` says; the counts
# on the right are of one reduction. At stage 3 a backward does not gather the embedding, so it
# moves slightly less. Gradients travel in the type in which they are added up, or in
# ``communication_data_type``; parameters in their own. At ZeRO-1 and 2 every optimizer group is
# padded to a multiple of 2 x dp before it is gathered, at ZeRO-3 every parameter to a multiple of
# dp.
#
# Three keys of DeepSpeed turn stages 1 and 2 into 3 x, because each bucket of gradients is then
# all-reduced: ``use_multi_rank_bucket_allreduce`` turned on (its own default), ``reduce_scatter``
# or ``contiguous_gradients`` turned off.


def add_data_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """Adds one step's messages of a rank of ``pipeline_stage``."""
    dp = run.grid.dp
    if dp == 1:
        return
    parameters = local_parameters(run, pipeline_stage)
    for collective, message_bytes in _gradient_messages(run, parameters):
        messages.add("dp", collective, message_bytes, ranks=dp)
    if run.zero_stage in (1, 2):
        gathered = sum(flat_group_elements(parameters, dp).values())
        messages.add("dp", "all_gather", gathered * BYTES_OF[run.precision], ranks=dp)
    if run.zero_stage == 3:
        gathered = gathered_elements_of_a_step(run, parameters)
        messages.add("dp", "all_gather", gathered * BYTES_OF[run.precision], ranks=dp)


def _gradient_messages(run: Run, parameters: list[LocalParameter]) -> list[tuple[Collective, int]]:
    """Collectives that sum gradients, with the bytes of all their messages in one step."""
    elements = elements_of(parameters)
    if run.zero_stage == 0:
        return [("all_reduce", elements * BYTES_OF[run.accumulation_dtype])]
    number_bytes = BYTES_OF[run.config.communication_data_type or run.accumulation_dtype]
    number_bytes *= _reductions(run)
    if run.zero_stage < 3:
        collective: Collective = "all_reduce" if _reduces_everywhere(run) else "reduce"
        return [(collective, elements * number_bytes)]
    dp = run.grid.dp
    whole = elements_of(p for p in parameters if _stays_whole(run, p))
    parts = sum(partition_elements(p, dp) for p in parameters if not _stays_whole(run, p))
    return [
        ("all_reduce", whole * number_bytes),
        ("reduce_scatter", dp * parts * number_bytes),
    ]


def _stays_whole(run: Run, parameter: LocalParameter) -> bool:
    """ZeRO-3: whether a gradient is all-reduced, as ``reduce_scatter`` false asks for.

    One that is larger than a bucket is scattered all the same.
    """
    zero = run.config.zero_optimization
    assert zero.reduce_bucket_size is not None, "the run is definite"
    fits = parameter.elements <= zero.reduce_bucket_size
    return fits and zero.contiguous_gradients and not zero.reduce_scatter


def _reductions(run: Run) -> int:
    """How often a step reduces each gradient over the data axis.

    ZeRO-1 keeps whole gradients, and reduces them with the step's last micro-batch.
    """
    if run.zero_stage == 1 or run.gradient_reduction == "per_step":
        return 1
    return run.batch.gradient_accumulation_steps


def _reduces_everywhere(run: Run) -> bool:
    """ZeRO-1 and 2: whether every rank receives every gradient."""
    zero = run.config.zero_optimization
    contiguous = zero.contiguous_gradients or zero.offloads_optimizer
    return zero.use_multi_rank_bucket_allreduce or not zero.reduce_scatter or not contiguous


__all__ = ["Collective", "Traffic", "TrafficAxis", "bytes_sent", "predict_traffic"]

# Squares of the norm, loss, peak memory, stop signal, and the timeline of a step: training.worker.
_NUMBERS_OF_A_REPORT = 4 + 1 + 8
_FP64_BYTES = 8


def predict_traffic(run: Run, pipeline_stage: int) -> Traffic:
    """Of a rank of ``pipeline_stage``, in bytes, for one step after the first.

    In the first step each direction of the pipeline also sends a header of 80 bytes. Ranks of one
    pipeline stage send the same number of bytes, except for a tied weight at ZeRO-1 to 3: its last
    partition may be shorter. The result is that of a rank with the longest partition.
    """
    messages = Messages()
    add_data_axis(messages, run, pipeline_stage)
    add_tensor_axis(messages, run, pipeline_stage)
    add_pipeline_axis(messages, run, pipeline_stage)
    messages.add(
        "world",
        "all_reduce",
        run.grid.world_size * _NUMBERS_OF_A_REPORT * _FP64_BYTES,
        ranks=run.grid.world_size,
    )
    return messages.traffic()
