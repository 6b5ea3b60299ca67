"""Memory of one rank: its categories, and the model states at each ZeRO stage.

With P parameters on a rank, a bytes an element, g bytes a gradient element, dp data-parallel ranks
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5 and Figure 1, where a = g = 2 and K = 12), model states are

    zero_stage   parameters   gradients   optimizer states (fp32 master weights, two moments)
    0            a P          g P         12 P
    1            a P          g P         12 P / dp
    2            a P          g P / dp    12 P / dp
    3            a P / dp     g P / dp    12 P / dp

The predictions here are more exact than the paper's table:

- P counts the parameters of one pipeline stage, as tensor shards with vocabulary padding.
- DeepSpeed pads flat groups (stages 0 to 2) or each parameter (stage 3).
- At stage 3, small parameters stay gathered on every rank.
- At stages 2 and 3, complete gradients stay on every rank if they are reduced once a step. With
  several micro-batches, the gradients of norms and biases are always reduced once a step.
- Runs in fp32 hold master weights too, because DeepSpeed keeps a separate copy in every precision.
- Offloaded states are in host memory and do not count.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Literal, get_args

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.message_sizes import (
    aligned_elements,
    buckets,
    columns_sent_together,
    gathered_together,
    held_in_pass,
)
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Precision, Run
from megaspeed.config.run import Compression
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, Parameter, parameters_of
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.pipeline.schedules import SCHEDULES, Pass, passes_of
from megaspeed.tensor_parallel.plan import gradient_is_partial, is_compressed, shard_of

BYTES_OF: Mapping[Precision, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of one number of each type."""

_OPTIMIZER_BYTES = 12  # an element: fp32 master weight and AdamW's two fp32 moments
_ELEMENTS_ALIGNED = 2  # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:369: 4 bytes in bf16

Category = Literal[
    "parameters", "gradients", "optimizer_states", "activations", "communication_buffers"
]
"""The fields of ``MemoryBytes``."""

OptimizerGroup = Literal["tied", "partial", "not compressed", "decaying", "other"]
"""The parameter groups of DeepSpeed's optimizer: a weight that two pipeline stages share,
parameters whose gradient is summed over the tensor axis, matrices that are not compressed although
others are, other parameters with weight decay, and the rest. At ZeRO-1 and 2, each bucket of a
group is one flat tensor, split into dp equal partitions. At ZeRO-3, each parameter is split
separately."""


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """What one rank holds at one moment."""

    parameters: int = 0  # the weights that the model computes with. At ZeRO-3, 1/dp of them.
    gradients: int = 0  # gradients of parameters, of one micro-batch or accumulated
    optimizer_states: int = 0  # fp32 master weights and AdamW's two moments
    # What forward keeps for backward, and working memory of operations. Logits are among them.
    activations: int = 0
    # Buckets, parameters that ZeRO-3 has gathered, messages in flight.
    communication_buffers: int = 0

    @property
    def total(self) -> int:
        """All categories together."""
        # Not astuple, which copies deeply: a plan calls this a hundred thousand times.
        states = self.parameters + self.gradients + self.optimizer_states
        return states + self.activations + self.communication_buffers


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """One parameter of one rank, before ZeRO partitions it."""

    name: str  # full name
    layer: str  # name of its layer, such as "blocks.3"
    shape: tuple[int, ...]  # of the local tensor, tensor-parallel padding included
    group: OptimizerGroup  # the optimizer group that it is in
    is_compressed: bool = False  # whether its gradient is compressed for the data axis

    @cached_property
    def elements(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)


def local_parameters(run: Run, pipeline_stage: int) -> list[LocalParameter]:
    """The parameters of a rank of this pipeline stage, in the order of the model.

    All data and tensor ranks of the stage have the same shapes.
    """
    layers = layers_of_stages(run)[pipeline_stage]
    return list(
        _local_parameters(
            run.config.model,
            layers,
            run.grid.tp,
            run.grid.pp > 1,
            run.sequence_parallel,
            run.compression,
        )
    )


@lru_cache(maxsize=1024)  # a what-if asks for the same layers a thousand times
def _local_parameters(
    model: ModelConfig,
    layers: range,
    tp: int,
    has_pipeline: bool,
    splits_sequence: bool,
    compression: Compression | None,
) -> tuple[LocalParameter, ...]:
    shared = model.tie_word_embeddings and has_pipeline
    parameters = parameters_of(model, layers)
    compressed = {
        name
        for name, parameter in parameters.items()
        if is_compressed(model, parameter, compression, size=tp)
    }

    def group_of(parameter: Parameter) -> OptimizerGroup:
        if shared and parameter.name in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
            return "tied"
        if gradient_is_partial(parameter, size=tp, sequence_parallel=splits_sequence):
            return "partial"
        if compressed and len(parameter.shape) > 1 and parameter.name not in compressed:
            return "not compressed"
        return "decaying" if parameter.decays else "other"

    return tuple(
        LocalParameter(
            name=name,
            layer=parameter.layer,
            shape=shard_of(model, parameter, rank=0, size=tp).local_shape,
            group=group_of(parameter),
            is_compressed=name in compressed,
        )
        for name, parameter in parameters.items()
    )


def head_weight(parameters: Sequence[LocalParameter]) -> LocalParameter | None:
    """The weight of the head, which may be the embedding's; None if no parameter is the head's."""
    if all(parameter.layer != "head" for parameter in parameters):
        return None
    named = {parameter.name: parameter for parameter in parameters}
    return named.get(HEAD_WEIGHT) or named.get(EMBEDDING_WEIGHT)


def head_gradient_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Bytes of the sum of the head's gradients; 0 if they are added to a complete gradient.

    The forward of the loss adds to the sum, and a backward reduces it. The sum has the type in
    which gradients are accumulated.
    """
    weight = head_weight(parameters)
    if weight is None or run.keeps_complete_gradients:
        return 0
    return weight.elements * BYTES_OF[run.accumulation_dtype]


def elements_of(parameters: Iterable[LocalParameter]) -> int:
    """Number of elements of all parameters, without ZeRO's padding."""
    return sum(parameter.elements for parameter in parameters)


def flat_buckets(
    run: Run, parameters: Sequence[LocalParameter]
) -> list[tuple[Sequence[LocalParameter], int]]:
    """The parameters of each bucket of gradients, and the elements of its flat tensor.

    At ZeRO-0 to 2 the elements are padded to a multiple of 2 x dp. At ZeRO-3, each parameter is
    padded to a multiple of dp. A rank's partition is 1/dp of them. At ZeRO-0 each rank owns
    everything, as with dp 1. Compressed gradients of an optimizer group stay together.
    """
    multiple = _ELEMENTS_ALIGNED * _owners(run)
    flat: list[tuple[Sequence[LocalParameter], int]] = []
    for group in get_args(OptimizerGroup):
        members = [p for p in parameters if p.group == group]
        is_split = run.grid.dp > 1 and not any(p.is_compressed for p in members)
        for bucket in _buckets(run, parameters, members) if is_split else [members]:
            elements = math.ceil(elements_of(bucket) / multiple) * multiple
            flat.append((bucket, _padded(run, bucket) if run.zero_stage == 3 else elements))
    return flat


def flat_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements of the flat tensors of all buckets together."""
    return sum(elements for _, elements in flat_buckets(run, parameters))


def _owners(run: Run) -> int:
    return 1 if run.zero_stage == 0 else run.grid.dp


def _buckets(
    run: Run, parameters: Sequence[LocalParameter], members: Sequence[LocalParameter]
) -> list[list[LocalParameter]]:
    """The members of an optimizer group whose gradients are reduced together."""
    dp, of_the_loss = run.grid.dp, head_weight(parameters)
    sizes = [dp * partition_elements(p, dp) if run.zero_stage == 3 else p.elements for p in members]
    head = members.index(of_the_loss) if of_the_loss in members else None
    return [[members[index] for index in bucket] for bucket in buckets(run, sizes, head)]


def partition_elements(parameter: LocalParameter, dp: int) -> int:
    """ZeRO-3: elements of each rank's part of a parameter, including padding."""
    return math.ceil(parameter.elements / dp)


def model_states(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> MemoryBytes:
    """Parameters, accumulated gradients and optimizer states between two micro-batches of a step.

    If the rank computes on the CPU (``on_host``), offloaded states count, too.
    """
    own = _own_elements(run, parameters)
    states = own * _OPTIMIZER_BYTES
    partition = own * BYTES_OF[run.accumulation_dtype]
    complete = _complete_elements(run, parameters) * BYTES_OF[run.accumulation_dtype]
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if run.keeps_complete_gradients and (run.zero_stage < 3 or run.grid.dp == 1):
        # The partition is a part of the complete gradient, except for compressed gradients.
        partition = _own_elements(run, compressed) * BYTES_OF["fp32"]
    if run.config.zero_optimization.offloads_optimizer:
        partition = own * BYTES_OF["fp32"] if on_host else 0
        states = states if on_host else 0
    return MemoryBytes(
        parameters=_parameter_bytes(run, parameters, on_host=on_host),
        gradients=complete + partition + _compression_state_bytes(run, compressed),
        optimizer_states=states,
    )


def _compression_state_bytes(run: Run, compressed: Sequence[LocalParameter]) -> int:
    """Bytes kept from step to step: the feedback, and three copies of PowerSGD's Q.

    The copies are the initial Q, the Q of the last step, and the Q that the next step will use.
    """
    method = run.compression
    if method is None:
        return 0
    elements = _complete_elements(run, compressed) if method.error_feedback else 0
    if method.type == "powersgd":
        elements += 3 * method.rank * sum(parameter.shape[1] for parameter in compressed)
    return elements * BYTES_OF["fp32"]


def int8_columns(run: Run, parameters: Sequence[LocalParameter]) -> list[int]:
    """The number of columns of each part of the gradients that int8 compresses and sends together.

    Each part is a matrix with a row for each data rank.
    """
    dp = run.grid.dp
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if run.compression is None or run.compression.type != "int8":
        return []
    block, columns = run.compression.block, []
    if run.zero_stage == 3:
        for group in get_args(OptimizerGroup):
            sizes = [partition_elements(p, dp) for p in compressed if p.group == group]
            for bucket in buckets(run, [dp * size for size in sizes]):
                columns.append(sum(sizes[index] for index in bucket))
        return columns
    together = columns_sent_together(run, dp, block)
    for _, elements in flat_buckets(run, compressed):
        each = math.ceil(elements / dp)
        columns += [min(together, each - start) for start in range(0, each, together)]
    return columns


def compression_buffer_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """The most bytes that compression needs at one time, besides what it keeps between steps.

    int8 processes one part of the gradients at a time. For the reduction, it holds the part in
    fp32, the message that it sends, the message that it receives, the received message in fp32, and
    the sum of its dp rows. At ZeRO-0 it then gathers: it holds the part and the gathered message in
    fp32, the gathered message, and of one row the message and two fp32 copies.

    PowerSGD holds P, and from ZeRO-1 on the complete product. At ZeRO-3 it copies its partition.
    """
    method, dp = run.compression, run.grid.dp
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if method is None or not compressed:
        return 0
    if method.type == "powersgd":
        left = method.rank * sum(parameter.shape[0] for parameter in compressed)
        product = _complete_elements(run, compressed) if run.zero_stage > 0 else 0
        copied = _own_elements(run, compressed) if run.zero_stage == 3 else 0
        return (left + product + copied) * BYTES_OF["fp32"]
    block = method.block
    elements = dp * max(
        math.ceil(columns / block) * block for columns in int8_columns(run, compressed)
    )
    message = elements // block * (block + BYTES_OF["fp32"])
    numbers = elements * BYTES_OF["fp32"]
    reducing = 2 * numbers + 2 * message + numbers // dp
    gathering = 2 * numbers + message + (message + 2 * numbers) // dp
    return max(reducing, gathering) if run.zero_stage == 0 else reducing


def _complete_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements of the complete gradients that a rank accumulates, including padding."""
    return flat_elements(run, [p for p in parameters if is_summed_over_step(run, p)])


def is_summed_over_step(run: Run, parameter: LocalParameter) -> bool:
    """Whether a gradient is summed over the micro-batches of a step before it is reduced.

    Otherwise it is reduced in every micro-batch.
    """
    is_vector = len(parameter.shape) == 1
    return run.keeps_complete_gradients or (run.sums_vector_gradients and is_vector)


def gradient_copy_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Bytes of the fp32 copy of the partition that the optimizer step makes; 0 if it is fp32.

    The step updates one flat tensor at a time.
    """
    if run.accumulation_dtype == "fp32" or run.config.zero_optimization.offloads_optimizer:
        return 0
    largest = max(elements for _, elements in flat_buckets(run, parameters))
    return largest // _owners(run) * BYTES_OF["fp32"]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    names: frozenset[str]
    gradient_bytes: int  # as a backward computes them, without the head's
    packed_bytes: int  # the copy that is sent, and on a CPU what is exchanged


def gradient_buckets(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> list[Bucket]:
    """The buckets of gradients whose reduction needs memory; empty if none does.

    On a CPU (``on_host``) the ranks exchange their parts of a bucket (``zero.buckets``).
    """
    sent, dp = run.reduction_dtype, run.grid.dp
    exchanges = on_host and run.scatters_reductions
    if dp == 1 or not (run.copies_gradients or exchanges):
        return []
    buckets, of_the_loss = [], head_weight(parameters)
    for group in get_args(OptimizerGroup):
        members = [p for p in parameters if p.group == group and not p.is_compressed]
        for own in _buckets(run, parameters, members):
            elements = flat_elements(run, own)
            is_summed = is_summed_over_step(run, own[0])
            # The sum of norms' and biases' gradients has the layout in which it is sent.
            has_layout = not run.keeps_complete_gradients and (
                is_summed or (len(own) == 1 and own[0].elements == elements)
            )
            in_sum = is_summed or own[0] == of_the_loss
            dtype = run.accumulation_dtype if in_sum else run.precision
            is_sent_itself = has_layout and sent == dtype
            copied = 0 if is_sent_itself or not run.copies_gradients else elements
            exchanged = elements if exchanges else 0
            buckets.append(
                Bucket(
                    names=frozenset(p.name for p in own),
                    gradient_bytes=elements_of(p for p in own if p != of_the_loss)
                    * BYTES_OF[run.precision],
                    packed_bytes=(copied + exchanged) * BYTES_OF[sent],
                )
            )
    return buckets


def _own_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements of the parameters that this rank's optimizer updates, including padding."""
    return flat_elements(run, parameters) // _owners(run)


def _parameter_bytes(run: Run, parameters: Sequence[LocalParameter], *, on_host: bool) -> int:
    element = BYTES_OF[run.precision]
    if run.zero_stage < 3:
        return element * flat_elements(run, parameters)
    complete = elements_of(_stay_gathered(run, parameters))
    if run.config.zero_optimization.offloads_parameters and not on_host:
        return element * complete
    return element * (complete + _own_elements(run, parameters))


def _stay_gathered(run: Run, parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
    """ZeRO-3: small parameters, up to the threshold, that every rank also keeps gathered.

    DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:328.
    """
    zero = run.config.zero_optimization
    threshold = zero.stage3_param_persistence_threshold
    assert threshold is not None, "a resolved run states it"
    allowed = zero.stage3_model_persistence_threshold
    kept: list[LocalParameter] = []
    total = 0
    for parameter in parameters:
        fits = allowed is None or total + parameter.elements <= allowed
        if parameter.elements <= threshold and fits:
            kept.append(parameter)
            total += parameter.elements
    return kept


@dataclass(frozen=True, eq=False)
class _Gathered:
    """ZeRO-3: parameters that are gathered together: those of a layer, or of several blocks."""

    parameters: Sequence[LocalParameter]

    @cached_property
    def elements(self) -> int:
        """Without padding."""
        return elements_of(self.parameters)


def gathered_in_pass(
    run: Run,
    parameters: Sequence[LocalParameter],
    direction: Pass,
    following: Pass | None = None,
    *,
    on_host: bool = False,
) -> list[int]:
    """ZeRO-3: bytes of gathered parameters on a rank while a pass computes each layer.

    The layers are in the order of the forward pass, for both directions. ``following`` is the next
    pass, for which the last layers of this one gather ahead; None if this is the last pass of a
    step.

    A forward gathers every layer once. A backward gathers neither the embedding nor the weight of
    the head, because the forward of the loss computes the head's gradient. Each parameter is
    received in its final place, which is aligned. With one data rank, partitions are complete
    parameters, so nothing is gathered. Only offloaded partitions are copied to the device, unless
    the rank computes on the CPU (``on_host``).
    """
    zero, dp, element = run.config.zero_optimization, run.grid.dp, BYTES_OF[run.precision]
    layers = len({parameter.layer for parameter in parameters})
    if run.zero_stage < 3 or (dp == 1 and (on_host or not zero.offloads_parameters)):
        return [0] * layers
    orders = _gathered_by_pass(run, parameters)

    @lru_cache
    def size(gathered: _Gathered) -> int:
        regions = (dp * partition_elements(parameter, dp) for parameter in gathered.parameters)
        return element * sum(aligned_elements(region, element) for region in regions)

    # The backward of the embedding gathers nothing, and holds what is held after the pass.
    held = held_in_pass(zero, orders[direction], orders[following] if following else [])[:layers]
    sizes = [sum(map(size, layer)) for layer in held]
    return sizes if direction == "forward" else sizes[::-1]


def gathered_elements_of_a_step(
    run: Run, parameters: Sequence[LocalParameter], pipeline_stage: int
) -> int:
    """ZeRO-3: padded elements that a rank with these parameters gathers in an optimizer step.

    M micro-batches gather M (2 P - E - H) + K elements (Rajbhandari et al. 2020, section 7.2.2, has
    2 P), minus the layers that are still gathered when the next pass begins. K is the size
    of the parameters that stay gathered, P the size of all others, E the part of P in the
    embedding, and H the part of P that is the weight of the head. A tied weight counts twice in P:
    in the embedding and in the head.
    """
    orders, config = _gathered_by_pass(run, parameters), run.config
    first, turns = _turns(
        config.parallel.schedule,
        run.grid.pp,
        pipeline_stage,
        run.batch.gradient_accumulation_steps,
    )

    def gathered(*passes: Pass) -> int:
        return sum(
            _padded(run, layer.parameters)
            for layer in _gathers(config.zero_optimization, [orders[name] for name in passes])
        )

    # What is held after a pass depends only on this pass and the next one.
    alone = {name: gathered(name) for name in orders}
    total = alone[first] + sum(
        count * (gathered(*turn) - alone[turn[0]]) for turn, count in turns.items()
    )
    return total + _padded(run, _stay_gathered(run, parameters))


def _gathers(zero: ZeroConfig, passes: Sequence[Sequence[_Gathered]]) -> Iterator[_Gathered]:
    """What is gathered in these passes, in order; ``zero/layer_gathers.py`` does the same."""
    held: list[_Gathered] = []
    for order, following in zip(passes, [*passes[1:], []], strict=True):
        for hold in held_in_pass(zero, order, following):
            yield from (layer for layer in hold if layer not in held)
            held = hold


@lru_cache(maxsize=1024)
def _turns(
    schedule: str, pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> tuple[Pass, Mapping[tuple[Pass, Pass], int]]:
    """The first pass of a step, and the number of each pair of consecutive passes."""
    passes = passes_of(SCHEDULES[schedule](pipeline_stages, pipeline_stage, micro_batches))
    return passes[0], Counter(pairwise(passes))


def _gathered_by_pass(
    run: Run, parameters: Sequence[LocalParameter]
) -> dict[Pass, list[_Gathered]]:
    """What is gathered for each layer of a pass, in its order; a tied head has the embedding.

    A backward gathers nothing for the embedding, and of the head only the norm.
    """
    kept = {parameter.name for parameter in _stay_gathered(run, parameters)}
    layers: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    weight = head_weight(parameters)
    if weight is not None and weight not in layers["head"]:
        layers["head"].append(weight)
    layers = {name: [p for p in own if p.name not in kept] for name, own in layers.items()}
    ends = {name: layers.pop(name) for name in ("embedding", "head") if name in layers}
    own = list(layers.values())
    blocks: list[_Gathered] = []
    for together in gathered_together(run.config.zero_optimization, list(map(elements_of, own))):
        blocks += [_Gathered([*chain(*own[together.start : together.stop])])] * len(together)
    embedding = [_Gathered(ends["embedding"])] if "embedding" in ends else []
    head = [_Gathered(ends["head"])] if "head" in ends else []
    norm = [_Gathered([p for p in end.parameters if p != weight]) for end in head]
    return {"forward": [*embedding, *blocks, *head], "backward": [*blocks, *norm][::-1]}


def _padded(run: Run, parameters: Sequence[LocalParameter]) -> int:
    dp = run.grid.dp
    return sum(dp * partition_elements(parameter, dp) for parameter in parameters)
