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
- DeepSpeed pads what it partitions (``rank_parameters``).
- At stage 3, small parameters stay gathered on every rank.
- At stages 2 and 3, complete gradients stay on every rank if they are reduced once a step. The
  gradients of norms and biases are always reduced once a step.
- Runs in fp32 hold master weights too, because DeepSpeed keeps a separate copy in every precision.
- Offloaded states are in host memory and do not count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.config.message_sizes import buckets, columns_sent_together
from megaspeed.config.resolve import Precision, Run
from megaspeed.planning.costs.gathers import stay_gathered
from megaspeed.planning.costs.rank_parameters import (
    BYTES_OF,
    LocalParameter,
    elements_of,
    flat_buckets,
    flat_elements,
    head_weight,
    own_elements,
    sharded_elements,
)

_OPTIMIZER_BYTES = 12  # an element: fp32 master weight and AdamW's two fp32 moments

Category = Literal[
    "parameters", "gradients", "optimizer_states", "activations", "communication_buffers"
]
"""The fields of ``MemoryBytes``."""


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


def model_states(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> MemoryBytes:
    """Return the parameters, accumulated gradients and optimizer states between two micro-batches.

    If the rank computes on the CPU (``on_host``), offloaded states count, too.
    """
    flat, shards = flat_buckets(run, parameters), run.grid.shard
    own, element = sum(elements for _, elements in flat) // shards, BYTES_OF[run.precision]
    zero = run.config.zero_optimization
    states = own * _OPTIMIZER_BYTES
    partition = own * BYTES_OF[run.accumulation_dtype]
    summed = (elements for (one, *_), elements in flat if is_summed_over_step(run, one))
    complete = sum(summed) * BYTES_OF[run.accumulation_dtype]
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if run.keeps_complete_gradients and (run.zero_stage < 3 or run.grid.shard == 1):
        # The partition is a part of the complete gradient, except for compressed gradients.
        partition = own_elements(run, compressed) * BYTES_OF["fp32"]
    if zero.offloads_optimizer:
        partition = own * BYTES_OF["fp32"] if on_host else 0
        states = states if on_host else 0
    if run.grid.is_hybrid:  # the sum over the shards, which replicas compress
        partition += own_elements(run, compressed) * BYTES_OF["fp32"]
    held = own * run.grid.shard
    if run.zero_stage == 3:
        is_elsewhere = zero.offloads_parameters and not on_host
        held = elements_of(stay_gathered(run, parameters)) + (0 if is_elsewhere else own)
    return MemoryBytes(
        parameters=element * held,
        gradients=complete + partition + _compression_state_bytes(run, compressed),
        optimizer_states=states,
    )


def _complete_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Return the elements of the complete gradients that a rank accumulates, including padding."""
    return flat_elements(run, [p for p in parameters if is_summed_over_step(run, p)])


def is_summed_over_step(run: Run, parameter: LocalParameter) -> bool:
    """Return whether a gradient is summed over the micro-batches of a step before it is reduced.

    Otherwise it is reduced in every micro-batch, or in every visit.
    """
    is_vector = len(parameter.shape) == 1
    return run.keeps_complete_gradients or (run.sums_vector_gradients and is_vector)


def waiting_dtype(run: Run) -> Precision:
    """Return the type of gradients that wait until their bucket is reduced."""
    return run.accumulation_dtype if run.sums_visits else run.precision


def head_gradient_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Return the bytes of the sum of the head's gradients; 0 if a complete gradient has them.

    The forward of the loss adds to the sum, and a backward reduces it. The sum has the type in
    which gradients are accumulated.
    """
    weight = head_weight(parameters)
    if weight is None or run.keeps_complete_gradients:
        return 0
    return weight.elements * BYTES_OF[run.accumulation_dtype]


def gradient_copy_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Return the bytes of the fp32 copy of the partition in the optimizer step; 0 if it is fp32.

    The step updates one flat tensor at a time.
    """
    if run.accumulation_dtype == "fp32" or run.config.zero_optimization.offloads_optimizer:
        return 0
    largest = max(elements for _, elements in flat_buckets(run, parameters))
    return largest // run.grid.shard * BYTES_OF["fp32"]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    members: Sequence[LocalParameter]
    has_head: bool  # whether the head's weight is among them
    gradient_bytes: int  # as they wait to be reduced, without the head's
    packed_bytes: int  # the copy that is sent, and on a CPU what is exchanged


def gradient_buckets(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> list[Bucket]:
    """Return the buckets of gradients whose reduction needs memory; empty if none does.

    On a CPU (``on_host``) the ranks exchange their parts of a bucket (``zero.buckets``).
    """
    sent, grid = run.reduction_dtype, run.grid
    exchanges = on_host and run.scatters_reductions
    if not (run.copies_gradients or run.copies_partitions or exchanges):
        return []
    of_the_loss, found = head_weight(parameters), []
    for own, elements in flat_buckets(run, parameters):
        if own[0].is_compressed and not grid.is_hybrid:
            continue
        is_summed = is_summed_over_step(run, own[0])
        # The sum of norms' and biases' gradients has the layout in which it is sent.
        has_layout = not run.keeps_complete_gradients and (
            is_summed or (len(own) == 1 and own[0].elements == elements)
        )
        in_sum = is_summed or own[0] is of_the_loss
        dtype = run.accumulation_dtype if in_sum else waiting_dtype(run)
        is_sent_itself = has_layout and sent == dtype
        packed = 0 if is_sent_itself or not run.copies_gradients else elements
        packed += elements if exchanges else 0
        if run.copies_partitions and run.overlaps_reductions:
            packed += elements // grid.shard  # between replicas
        computed = elements_of(p for p in own if p is not of_the_loss)
        found.append(
            Bucket(
                members=own,
                has_head=any(p is of_the_loss for p in own),
                gradient_bytes=computed * BYTES_OF[waiting_dtype(run)],
                packed_bytes=packed * BYTES_OF[sent],
            )
        )
    return found


# Compressed gradients.


def _compression_state_bytes(run: Run, compressed: Sequence[LocalParameter]) -> int:
    """Return the bytes kept from step to step: the feedback, and three copies of PowerSGD's Q.

    The copies are the initial Q, the Q of the last step, and the Q that the next step will use.
    """
    method = run.compression
    if method is None:
        return 0
    sent = own_elements if run.grid.is_hybrid else _complete_elements
    elements = sent(run, compressed) if method.error_feedback else 0
    if method.type == "powersgd":
        matrices, _ = powersgd_matrices(run, compressed)
        elements += 3 * method.rank * sum(columns for _, columns in matrices)
    return elements * BYTES_OF["fp32"]


def powersgd_matrices(
    run: Run, parameters: Sequence[LocalParameter]
) -> tuple[list[tuple[int, int]], int]:
    """Return the matrices that PowerSGD sends as products, and the elements that it sends as is.

    With shards and replicas, matrices are the complete rows that the first shard holds.
    """
    method = run.compression
    assert method is not None and method.type == "powersgd"
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if not run.grid.is_hybrid:
        return [(p.shape[0], p.shape[1]) for p in compressed], 0
    matrices, elements = [], 0
    for bucket, flat in flat_buckets(run, compressed):
        left = flat // run.grid.shard
        for parameter in bucket:
            held = min(parameter.elements, left)
            if run.zero_stage == 3:
                held = sharded_elements(run, [parameter]) // run.grid.shard
            left -= held
            columns = parameter.shape[1]
            rows = held // columns
            if method.rank * (rows + columns) < rows * columns:
                matrices.append((rows, columns))
                held -= rows * columns
            elements += held
    return matrices, elements


def int8_columns(run: Run, parameters: Sequence[LocalParameter]) -> list[int]:
    """Return the columns of each part of the gradients that int8 compresses and sends together.

    Each part is a matrix with a row for each rank: each replica, or each data rank.
    """
    method, grid = run.compression, run.grid
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if method is None or method.type != "int8":
        return []
    together, columns = columns_sent_together(run, grid.senders, method.block), []
    for members, elements in flat_buckets(run, compressed):
        if run.zero_stage == 3 and grid.replicate == 1:
            sizes = [sharded_elements(run, [parameter]) for parameter in members]
            columns += [sum(sizes[i] for i in one) // grid.shard for one in buckets(run, sizes)]
            continue
        each = math.ceil(elements / grid.dp_cp)
        columns += [min(together, each - start) for start in range(0, each, together)]
    return columns


def compression_buffer_bytes(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> int:
    """Return the most bytes that compression needs at one time, besides what it keeps.

    int8 processes one part of the gradients at a time. For the reduction, it holds the part in
    fp32, the message that it sends, the message that it receives, the received message in fp32, and
    the sum of its rows. A replica then gathers: it holds the part and the gathered message in
    fp32, the gathered message, and of one row the message and two fp32 copies.

    PowerSGD holds P and, without replicas, the complete product. At ZeRO-3 it copies its partition.

    If the optimizer is offloaded, replicas hold the mean of a bucket (int8) or of all (PowerSGD),
    until it is copied to host memory.
    """
    method, grid = run.compression, run.grid
    compressed = [parameter for parameter in parameters if parameter.is_compressed]
    if method is None or not compressed:
        return 0
    means = [0]
    if grid.replicate > 1 and run.config.zero_optimization.offloads_optimizer:
        flat = (elements for _, elements in flat_buckets(run, compressed))
        means = [math.ceil(elements / grid.dp_cp) * grid.replicate for elements in flat]
    if method.type == "powersgd":
        matrices, rest = powersgd_matrices(run, parameters)
        left = method.rank * sum(height for height, _ in matrices) + 2 * rest
        product = 0 if on_host else sum(means)
        if grid.replicate == 1:
            product = _complete_elements(run, compressed)
            product += own_elements(run, compressed) if run.zero_stage == 3 else 0
        return (left + product) * BYTES_OF["fp32"]
    block = method.block
    elements = grid.senders * max(
        math.ceil(columns / block) * block for columns in int8_columns(run, compressed)
    )
    message = elements // block * (block + BYTES_OF["fp32"])
    numbers = elements * BYTES_OF["fp32"]
    reducing = 2 * numbers + 2 * message + numbers // grid.senders
    gathering = 2 * numbers + message + (message + 2 * numbers) // grid.senders
    copied = max(means) * BYTES_OF["fp32"]
    return copied + (max(reducing, gathering) if grid.replicate > 1 else reducing)
