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
- ``data_axis`` states what is padded, what stays gathered, and which gradients a rank keeps.
- Runs in fp32 hold master weights too, because DeepSpeed keeps a separate copy in every precision.
- Muon has one fp32 number less for each element of the matrices of blocks.
- Offloaded states are in host memory and do not count.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from megaspeed.config.resolve import BYTES_OF, Run
from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.compression import int8_parts, powersgd_matrix

_OPTIMIZER_BYTES = 12  # an element: fp32 master weight and AdamW's two fp32 moments
_MUON_BYTES = 8  # an element of a matrix of a block: fp32 master weight and momentum

Category = Literal[
    "parameters", "gradients", "optimizer_states", "activations", "communication_buffers"
]
"""The fields of ``MemoryBytes``."""


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """What one rank holds at one moment."""

    parameters: int = 0  # the weights that the model computes with. At ZeRO-3, 1/dp of them.
    gradients: int = 0  # gradients of parameters, of one micro-batch or accumulated
    optimizer_states: int = 0  # fp32 master weights, AdamW's moments, Muon's momentum
    # What forward keeps for backward, and working memory of operations. Logits are among them.
    activations: int = 0
    # Buckets, parameters that ZeRO-3 has gathered, messages in flight.
    communication_buffers: int = 0

    @property
    def total(self) -> int:
        # Not astuple, which copies deeply: a plan calls this a hundred thousand times.
        states = self.parameters + self.gradients + self.optimizer_states
        return states + self.activations + self.communication_buffers


def model_states(run: Run, axis: DataAxis, *, on_host: bool = False) -> MemoryBytes:
    """Return the parameters, accumulated gradients and optimizer states between two micro-batches.

    If the rank computes on the CPU (``on_host``), offloaded states count, too.
    """
    buckets, zero = axis.buckets, run.config.zero_optimization
    own, element = sum(bucket.part for bucket in buckets), BYTES_OF[run.precision]
    gradients = sum(
        bucket.elements * BYTES_OF[bucket.reduction.total]
        for bucket in buckets
        if bucket.reduction.keeps != "partition"
    )
    if not zero.offloads_optimizer:
        gradients += sum(
            bucket.part * BYTES_OF[bucket.reduction.total]
            for bucket in buckets
            if bucket.has_own_partition
        )
    elif on_host:
        gradients += own * BYTES_OF["fp32"]
    # The sums over the shards, which replicas compress.
    sums = [bucket.part for bucket in axis.compressed if not bucket.is_sent_compressed]
    gradients += sum(sums) * BYTES_OF["fp32"]
    muon = sum(bucket.part for bucket in axis.orthogonalized)
    optimizer = own * _OPTIMIZER_BYTES - muon * (_OPTIMIZER_BYTES - _MUON_BYTES)
    # DeepSpeed pads the flat tensor of each bucket, of which the parameters are views.
    held = sum(bucket.elements for bucket in buckets)
    if axis.persistent is not None:
        is_elsewhere = zero.offloads_parameters and not on_host
        held = axis.persistent.elements + (0 if is_elsewhere else own)
    return MemoryBytes(
        parameters=element * held,
        gradients=gradients + _compression_state_bytes(run, axis),
        optimizer_states=optimizer if on_host or not zero.offloads_optimizer else 0,
    )


# Compressed gradients.


def _compression_state_bytes(run: Run, axis: DataAxis) -> int:
    """Return the bytes kept from step to step: the feedback, and three copies of PowerSGD's Q.

    The copies are the initial Q, the Q of the last step, and the Q that the next step will use.
    """
    method, elements = run.compression, 0
    if method is None:
        return 0
    if method.error_feedback:
        elements = sum(b.elements if b.is_sent_compressed else b.part for b in axis.compressed)
    if method.type == "powersgd":
        matrices, _ = powersgd_matrices(run, axis)
        elements += 3 * method.rank * sum(columns for _, columns in matrices)
    return elements * BYTES_OF["fp32"]


def powersgd_matrices(run: Run, axis: DataAxis) -> tuple[list[tuple[int, int]], int]:
    """Return the matrices that PowerSGD sends as products, and the elements that it does not.

    With shards and replicas, they are those of the first shard.
    """
    assert run.compression is not None and run.compression.type == "powersgd"
    matrices, elements = [], 0
    for own in chain(*(bucket.compressed_by(0) for bucket in axis.compressed)):
        _, rows, columns = powersgd_matrix(own, run.compression.rank)
        matrices += [(rows, columns)] * (rows > 0)
        elements += own.length - rows * columns
    return matrices, elements


def int8_columns(run: Run, axis: DataAxis) -> list[int]:
    """Return the columns of each part of the gradients that int8 compresses and sends together."""
    return [part.columns for bucket in axis.compressed for part in int8_parts(run, bucket)]


def compression_buffer_bytes(run: Run, axis: DataAxis, *, on_host: bool = False) -> int:
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
    if method is None or not axis.compressed:
        return 0
    means = [0]
    if grid.replicate > 1 and run.config.zero_optimization.offloads_optimizer:
        flat = (bucket.elements for bucket in axis.compressed)
        means = [math.ceil(elements / grid.dp_cp) * grid.replicate for elements in flat]
    if method.type == "powersgd":
        matrices, rest = powersgd_matrices(run, axis)
        left = method.rank * sum(height for height, _ in matrices) + 2 * rest
        product = 0 if on_host else sum(means)
        if grid.replicate == 1:
            product = sum(bucket.elements for bucket in axis.compressed)
            product += sum(b.part for b in axis.compressed if b.layout == "rows")
        return (left + product) * BYTES_OF["fp32"]
    block = method.block
    elements = grid.senders * max(
        math.ceil(columns / block) * block for columns in int8_columns(run, axis)
    )
    message = elements // block * (block + BYTES_OF["fp32"])
    numbers = elements * BYTES_OF["fp32"]
    reducing = 2 * numbers + 2 * message + numbers // grid.senders
    gathering = 2 * numbers + message + (message + 2 * numbers) // grid.senders
    copied = max(means) * BYTES_OF["fp32"]
    return copied + (max(reducing, gathering) if grid.replicate > 1 else reducing)
