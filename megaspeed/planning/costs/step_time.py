"""The time of an optimizer step, computed from shapes and from the table of accelerators.

    step      = micro-batches x slowest stage + bubble + p2p + dp + optimizer
    stage     = its blocks (+ embedding on the first stage, + head on the last)
    block     = forward + backward + recomputed part of the forward
    forward   = products + attention + pointwise + tp + cp + ep

The prediction runs nothing. Only the constants in ``FITTED`` are fitted to published runs. All
others are from data sheets, papers and source code, stated beside each constant. Each function
states the formula of its term.

This is plain arithmetic: a prediction takes a fraction of a millisecond, and loads no torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from megaspeed.config.resolve import BYTES_OF
from megaspeed.pipeline.simulation import Durations
from megaspeed.planning.costs.network_time import Network, closed_form, pipeline_seconds, simulated
from megaspeed.planning.costs.workload import (
    Cluster,
    MuonWork,
    Product,
    Workload,
    attended_tokens,
    attention_flops,
    block_products,
    head_product,
)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is fitted to published runs."""

    products: float
    """Rate of matrix products in training, as a fraction of the device's sustained rate. The
    sustained rate is measured with one large product at a time, on a cool chip."""
    pointwise: float
    """Bytes that kernels other than products move, as a multiple of the least possible. It is above
    1 because not all of them are fused, some compute in fp32, and small ones do not fill a GPU."""


FITTED = Constants(products=0.98, pointwise=3.6)
"""Fitted to 417 published runs of 16 sources with equal weight. If one source is left out,
``products`` is 0.94 to 0.99, and ``pointwise`` 3 to 4.2.

    python scripts/benchmark_plan.py
"""

MEMORY_EFFICIENCY = 0.85
"""Achieved share of the data sheet's memory bandwidth. An assumption: a triad over long vectors
reaches about 0.9, and the tensors of a training are shorter."""

GROUPED_PRODUCTS = 0.8
"""Rate of the grouped products of experts, as a fraction of that of one product with as many rows.
It is below 1 because a tile has rows of one expert only, so some tiles are not full. The number is
assumed, and not measured on a GPU."""

_OLD_KERNEL = 0.58
_NEW_DEVICES = frozenset({"h100", "h200", "h800", "gh200", "b200", "gb200", "mi300x"})
"""FlashAttention 2 reaches 35 % of the peak of an H100 (Shah et al. 2024, FlashAttention-3,
abstract), and about 60 % of an A100's, because it does not use the asynchronous instructions of
newer devices. So the rates of such kernels are multiplied by 0.35 / 0.60 on these."""

_ROWS_OF_A_BLOCK = 128
"""Queries that one processor computes at a time (Dao 2023, section 3.2)."""

_SLOW_HEAD = 4.0
"""FlashAttention needs head sizes that are multiples of 8. For other sizes, the attention takes
this many times as long."""


class LayerParts(NamedTuple):
    """The parts of a layer's forward or backward: seconds, or the share that is computed again."""

    products: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0


AGAIN: Mapping[str, LayerParts] = {
    "none": LayerParts(),
    "selective": LayerParts(pointwise=1),
    "full": LayerParts(products=1, attention=1, pointwise=1, tp=1, cp=1, ep=0.5),
}
"""Kind of recomputation -> the share of each part of a block's forward that is computed again. The
results of experts are not sent back again."""


def recomputed_seconds(forward: LayerParts, again: LayerParts) -> float:
    """Return the seconds of what a block's backward computes again."""
    return sum(share * seconds for share, seconds in zip(again, forward, strict=True))


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer and one micro-batch on one rank."""

    forward_parts: LayerParts
    backward_parts: LayerParts
    recomputation: float = 0.0  # of the backward
    host: float = 0.0  # half of it in each pass

    @property
    def forward(self) -> float:
        return sum(self.forward_parts) + self.host / 2

    @property
    def backward(self) -> float:
        """Seconds of a backward with what it computes again."""
        return sum(self.backward_parts) + self.recomputation + self.host / 2

    @property
    def both(self) -> float:
        return self.forward + self.backward

    @property
    def parts(self) -> LayerParts:
        """Seconds of each part in both passes, without what is computed again."""
        return LayerParts(*map(sum, zip(self.forward_parts, self.backward_parts, strict=True)))


class Layers(NamedTuple):
    """The time of each kind of layer."""

    embedding: LayerTime
    block: LayerTime
    head: LayerTime


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the rank that determines it. The terms add up to ``total``."""

    layers: Layers
    stage: int  # pipeline stage of that rank, from 0
    products: float  # of blocks
    attention: float
    pointwise: float
    head: float
    recomputation: float
    tp: float  # collectives that the rank waits for
    cp: float
    ep: float
    bubble: float  # waits for other pipeline stages
    p2p: float  # sends between pipeline stages
    dp: float  # exposed collectives of the data axis, and the slowdown of computation by others
    optimizer: float
    host: float = 0.0  # Python and torch's dispatcher; 0 on GPUs, which compute meanwhile

    @property
    def terms(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _TERMS}

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def communication(self) -> float:
        """Share of the step in which ranks wait for messages, without the bubble."""
        return (self.tp + self.cp + self.ep + self.p2p + self.dp) / self.total

    def scaled(self, factor: float) -> "StepTime":
        """Return all terms, multiplied by the same factor."""
        terms = {name: factor * seconds for name, seconds in self.terms.items()}
        return StepTime(layers=self.layers, stage=self.stage, **terms)


_TERMS = [field.name for field in fields(StepTime) if field.type is float]


def predict_step_time(work: Workload, cluster: Cluster, *, simulates: bool = False) -> StepTime:
    """Predict the step time of the rank that determines it.

    Args:
        work: what the ranks compute and send.
        simulates: whether bubble and p2p come from a simulation of the schedule, which takes up to
            a second, or from closed forms.

    Raises:
        ValueError: the device cannot compute in this precision.
    """
    rates = Rates(work, cluster)
    return rates.step(rates.layers(), simulates=simulates)


def stage_times(work: Workload, layers: Layers) -> tuple[list[float], list[float]]:
    """Return the seconds of the forward and of the backward of each virtual stage for one
    micro-batch.
    """
    both = []
    passes = zip(*((layer.forward, layer.backward) for layer in layers), strict=True)
    for embedding, block, head in passes:
        times = [block * blocks for blocks in work.blocks]
        times[0] += embedding
        times[-1] += head
        both.append(times)
    return both[0], both[1]


class Rates:
    """The times of the parts of a step, of one workload on one cluster."""

    def __init__(self, work: Workload, cluster: Cluster, constants: Constants = FITTED) -> None:
        self.work, self.cluster, self.measured = work, cluster, cluster.measured
        device, efficiency = cluster.device, MEMORY_EFFICIENCY
        self.network = Network(work, cluster)
        self.host = 0.0
        if self.measured is not None:
            self.host = self.measured.host
            constants = Constants(products=1.0, pointwise=self.measured.pointwise)
            efficiency = 1.0
        self.constants = constants
        sustained = device.peak_fp32 if work.precision == "fp32" else device.sustained_16
        if sustained == 0:
            raise ValueError(
                f"the table of devices has no rate of {work.precision} on {device.name}"
            )
        self.rate = constants.products * 1e12 * sustained  # of a large product
        self.memory = efficiency * 1e9 * device.memory_bandwidth
        self.width = work.element_bytes

    def layers(self) -> Layers:
        return Layers(self.embedding(), self.block(), self.head())

    def step(self, layers: Layers, *, simulates: bool = False) -> StepTime:
        """Return the time of the step of the slowest stage, if layers take these times."""
        work, (embedding, block, head) = self.work, layers
        forward, backward = stage_times(work, layers)
        times = work.stage_sums([sum(both) for both in zip(forward, backward, strict=True)])
        slowest = times.index(max(times))
        count, last = work.micro_batches, work.grid.pp - 1
        # Micro-batches for which that stage computes a block, the embedding and the head.
        blocks = count * work.blocks_of_stages[slowest]
        embeddings, heads = count * (slowest == 0), count * (slowest == last)
        simulates = simulates or work.extra_in_flight > 0  # there is no closed form of it
        pipeline = simulated if simulates else closed_form
        message, waits = self.network.message, None
        bubble, p2p = pipeline(work, forward, backward, message)
        gather, reduce = self.network.collectives
        if simulates and gather:
            durations = Durations(
                forward=forward, backward=backward, message=message, gather=gather, reduce=reduce
            )
            waits = pipeline_seconds(work, durations) - count * max(times) - bubble - p2p
        parts, first, end = block.parts, embedding.parts, head.parts
        return StepTime(
            layers=layers,
            stage=slowest,
            products=blocks * parts.products,
            attention=blocks * parts.attention,
            pointwise=blocks * parts.pointwise + embeddings * first.pointwise,
            head=heads * (head.both - end.tp - head.host),
            recomputation=blocks * block.recomputation,
            tp=blocks * parts.tp + embeddings * first.tp + heads * end.tp,
            cp=blocks * parts.cp,
            ep=blocks * parts.ep,
            bubble=bubble,
            p2p=p2p,
            dp=self.network.dp(slowest, block.forward, block.backward, waits),
            optimizer=self.optimizer(slowest),
            host=(blocks + embeddings + heads) * self.host,
        )

    def linear(self, product: Product) -> tuple[float, float]:
        """Forward and backward of a linear module, a router or experts.

        A grouped product reads the matrices of all experts, or writes the gradients of all.
        """
        rate, width, device = self.rate, self.width, self.cluster.device
        if product.is_fp32:
            rate, width = self.constants.products * 1e12 * device.peak_fp32, BYTES_OF["fp32"]
        if product.matrices == 1:
            return _linear_seconds(product, (rate, self.memory, device.processors, width))
        m, n, k = product[:3]
        if self.measured is None:
            rate *= GROUPED_PRODUCTS
        moved = width * (m * k + product.matrices * k * n + m * n)
        seconds = max(product.flops / rate, moved / self.memory)
        return seconds, 2 * seconds

    def block(self) -> LayerTime:
        work = self.work
        tp, ep = work.grid.tp, work.grid.ep or 1
        products = block_products(work.model, work.tokens, tp, ep, work.load_factor)
        linear = map(sum, zip(*map(self.linear, products), strict=True))
        network = self.network.tp, self.network.cp, self.network.ep
        each = (linear, self.attention(), self.pointwise(products), *network)
        forward, backward = (LayerParts(*seconds) for seconds in zip(*each, strict=True))
        again = recomputed_seconds(forward, AGAIN[work.recomputation])
        return LayerTime(
            forward_parts=forward,
            backward_parts=backward,
            recomputation=work.recomputed_share * again,
            host=self.host,
        )

    def attention(self) -> tuple[float, float]:
        """Scores, softmax and mix.

        FlashAttention computes half of the square, and 2.5 times that in the backward, which
        computes the scores again (Dao 2023, section 4.1). If there are fewer blocks of queries
        than processors, the other processors are idle.

        Without FlashAttention, the full square is computed and written. Each product reads or
        writes one matrix of S x S for each head. Softmax and dropout read and write it, and dropout
        also has a mask of one byte (Korthikanti et al. 2022, figure 3). Tensor cores need rows of a
        multiple of 16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", section 3).
        With other head sizes, the two products do not use tensor cores.
        """
        work, model, tp = self.work, self.work.model, self.work.grid.tp
        device = self.cluster.device
        flops = attention_flops(model, work.sequence_length, work.tokens, tp)
        kernel = work.attention
        if kernel is None:
            rate = self.rate
            scores = work.tokens * work.sequence_length * model.num_attention_heads / tp
            matrix = scores * self.width / self.memory
            if model.head_dim % 8 and self.measured is None:
                rate = min(rate, 1e12 * device.peak_fp32)
            product = max(flops / 2 / rate, matrix)
            return 2 * product + 4.5 * matrix, 4 * product + 5.5 * matrix
        kept = attended_tokens(model, work.sequence_length) / work.sequence_length
        if self.measured is not None:
            return kept * flops / self.rate, 2.5 * kept * flops / self.rate
        slower = 1.0
        if device.name.split("-")[0] in _NEW_DEVICES:
            slower /= _OLD_KERNEL
        heads = work.micro_batch_size * model.num_attention_heads / tp / work.grid.cp
        blocks = heads * math.ceil(work.sequence_length / _ROWS_OF_A_BLOCK)
        slower *= max(1.0, device.processors / blocks)
        if model.head_dim % 8:
            slower *= _SLOW_HEAD
        seconds = kept * flops * slower / (1e12 * device.peak_16)
        return seconds / kernel.forward, 2.5 * seconds / kernel.backward

    def pointwise(self, products: Sequence[Product]) -> tuple[float, float]:
        """Everything between the products, limited by memory.

        The table shows how many elements are read and written for each token in the forward and in
        the backward, at least: if each line is one fused kernel.

            norm               2 D            3 D        two of each in a block
            residual sum       3 D            3 D
            rotation, layout   2 (q + k + v)  2 (q + k + v)
            gelu               2 F            3 F
            swiglu             3 F            5 F

        With k experts for each token, F is k times the width of an expert, and these are added:

            input of router    3 D            6 D            converted to fp32
            rows of tokens     3 k D + D      5 k D + D      gathered, and summed for each token
            with all_to_all    4 k D          6 k D          also in the order of experts, and back

        The choice of experts is not counted. It moves a few numbers for each token and expert.
        Norms of each head (``qk_norm``) and dropout of hidden states are not counted.

        The gradient of a weight is added to its sum: the gradient is read, and the sum is read and
        written. If the product adds it, the gradient is neither read nor written. ZeRO-3 instead
        copies each gathered weight out of the receive buffer in both passes, and each gradient into
        a send buffer.
        """
        work, model, tp = self.work, self.work.model, self.work.grid.tp
        hidden = model.hidden_size / (tp if work.sequence_parallel else 1)
        width = model.expert_width * (model.num_experts_per_tok or 1) * work.load_factor / tp
        heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / tp
        gated = model.is_gated
        factor = self.constants.pointwise * self.width * work.tokens / self.memory
        forward = factor * (10 * hidden + 2 * heads + (3 if gated else 2) * width)
        backward = factor * (12 * hidden + 2 * heads + (5 if gated else 3) * width)
        if model.num_experts_per_tok is not None:
            forward += factor * (4 + 3 * model.num_experts_per_tok) * hidden
            backward += factor * (7 + 5 * model.num_experts_per_tok) * hidden
        if work.expert_exchange == "all_to_all":
            forward += factor * 4 * (model.num_experts_per_tok or 1) * hidden
            backward += factor * 6 * (model.num_experts_per_tok or 1) * hidden
        weights = sum(product.matrices * product.n * product.k for product in products)
        if work.zero_stage < 3:
            gradients = weights * (self.width + 2 * work.gradient_bytes)
            if work.adds_products:
                plain = (each for each in products if each.matrices == 1 and not each.is_fp32)
                gradients -= 2 * self.width * sum(product.n * product.k for product in plain)
            backward += gradients / self.memory
        elif any(copies.shard > 1 for copies, _ in work.held_of_block):
            forward += weights * 2 * self.width / self.memory
            backward += weights * (3 * self.width + work.gradient_bytes) / self.memory
        return forward, backward

    def embedding(self) -> LayerTime:
        """Look-up and scatter: three reads or writes of (tokens, D) in each pass."""
        seconds = 3 * self.work.tokens * self.work.model.hidden_size * self.width / self.memory
        tp, _ = self.network.tp_of_ends
        return LayerTime(
            forward_parts=LayerParts(pointwise=seconds, tp=tp),
            backward_parts=LayerParts(pointwise=seconds),
            host=self.host,
        )

    def head(self) -> LayerTime:
        """The product with the vocabulary, and the cross-entropy over its logits.

        Logits are read in 16 bits, written in fp32, read for the maximum, read for the sum, and
        the gradient is written in 16 bits, and read: 18 bytes in all.
        """
        product = head_product(self.work.model, self.work.tokens, self.work.grid.tp)
        loss = 9 * self.width * product.m * product.n / self.memory
        forward, backward = self.linear(product)
        _, tp = self.network.tp_of_ends
        return LayerTime(
            forward_parts=LayerParts(products=forward, pointwise=loss / 2, tp=tp),
            backward_parts=LayerParts(products=backward, pointwise=loss / 2),
            host=self.host,
        )

    def optimizer(self, stage: int) -> float:
        """AdamW: reads and writes master weight and two moments in fp32 (24 bytes), reads the
        gradient for its norm and for the update (8), writes the 16-bit weight (2). Muon: ``_muon``,
        for the matrices of blocks."""
        updated = sum(elements / copies.shard for copies, elements in self.work.held(stage))
        seconds = 0.0
        for muon in self.work.muon[stage] if self.work.muon else ():
            seconds, updated = seconds + self._muon(muon), max(0.0, updated - muon.elements)
        if self.measured is not None:
            return seconds + self.measured.optimizer * updated
        return seconds + 34 * updated / self.memory

    def _muon(self, muon: MuonWork) -> float:
        """Momentum, Newton-Schulz steps of the owner with the most FLOPs, and exchanges.

        A step of a matrix (n, m) with n <= m has the products X X^T, A A and (b A + c A A) X, which
        are 4 n^2 m + 2 n^3 FLOPs. Those of a batch are computed as one.

        Bytes of an element in memory: the norm reads the gradient (4). Kernels for the momentum
        (8 + 12), the update (8 + 12) and the weights (8 + 8) read and write fp32. The update is
        converted (4, if it is not fp32), the 16-bit weight is written (2). In ``ns_dtype``, the
        update is written, copied into messages and out of them in both directions, and read: 10
        elements.
        """
        width, device, products = BYTES_OF[muon.precision], self.cluster.device, 0.0
        sustained = device.peak_fp32 if muon.precision == "fp32" else device.sustained_16
        rates = (self.constants.products * 1e12 * sustained, self.memory, device.processors, width)
        for count, *shape in muon.batches:
            n, m = sorted(shape)
            each = (Product(count * n, n, m), Product(count * n, n, n), Product(count * n, m, n))
            products += muon.steps * sum(product_seconds(product, *rates) for product in each)
        copied = (62 + 4 * (width < 4) + 10 * width) * muon.elements / self.memory
        return copied + products + self.network.orthogonalization(muon, products)


@lru_cache(maxsize=1 << 16)
def _linear_seconds(product: Product, rates: tuple[float, float, int, int]) -> tuple[float, float]:
    for_input, for_weight = (product_seconds(each, *rates) for each in product.backward)
    return product_seconds(product, *rates), for_input + for_weight


def product_seconds(
    product: Product, rate: float, memory: float, processors: int, width: int
) -> float:
    """Return the seconds of one matrix product: the larger of computing it and moving its matrices.

    The result is divided into tiles of 256 x 128, each computed by one processor, in waves: a wave
    that is not full takes as long as a full one (NVIDIA, "Matrix Multiplication Background User's
    Guide", sections 3.1 and 3.2). To fill the waves, k can be divided into parts of at least 1,024,
    whose results are written in fp32 and read again to be added (the same, section 2.2: split-K).
    """
    m, n, k = product[:3]
    tiles = min(math.ceil(m / a) * math.ceil(n / b) for a, b in ((256, 128), (128, 256)))

    def computing(parts: int) -> float:
        waves = tiles * parts / processors
        sums = 8 * parts * m * n / memory if parts > 1 else 0.0
        return product.flops / rate * math.ceil(waves) / waves + sums

    moving = width * (m * k + k * n + m * n) / memory
    return max(min(computing(parts) for parts in range(1, 1 + min(8, max(1, k // 1024)))), moving)
