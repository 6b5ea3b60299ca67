"""What all ranks compute and send in one optimizer step, as plain numbers.

A ``Workload`` is the input of the prediction of the step time (``step_time``). It is made from a
resolved run (``workload_of``), or from a published run (``scripts/benchmark_plan.py``). Its matrix
products are read from the table of the model's parameters, as its FLOPs are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

from megaspeed.config.model import ContextMethod, ModelConfig
from megaspeed.config.resolve import BYTES_OF, Precision, Run
from megaspeed.config.run import Recomputation
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.buckets import reduction_of_matrices
from megaspeed.data_axis.gathers import most_gathered_together
from megaspeed.model.parameters import Row, block_rows, head_rows, layer_count, parameters_of
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.schedules import Pipeline, pipeline_of
from megaspeed.planning.costs.traffic import compressed_share
from megaspeed.topology.devices import Device
from megaspeed.topology.grid import Grid

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
"""The kinds of collectives."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures measured on a machine. They replace the constants of GPUs and of NCCL.

    The rates of ``Cluster.device`` are then measured, too, and are not those of a data sheet.
    """

    pointwise: float  # as ``Constants.pointwise``
    optimizer: float  # seconds of the optimizer for each parameter
    latency: float  # seconds of one hop of a message; 0 if only one rank was measured
    message_bandwidth: float  # bytes that a rank sends in one second
    # Seconds of Python and torch's dispatcher for each layer and micro-batch. A GPU computes while
    # its host prepares the next operations. A CPU does one after the other.
    host: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines. Rank r is on node r // gpus_per_node."""

    device: Device
    gpus_per_node: int = 8
    network_bandwidth: float  # GB/s for each GPU, one way
    measured: Measured | None = None  # None for GPUs
    calibration: float = 1.0  # all times are multiplied by it (``--calibrate``)

    @property
    def device_type(self) -> str:
        """What a run on these machines is resolved for: "cpu" or "cuda"."""
        return "cuda" if self.measured is None else "cpu"


class AttentionKernel(NamedTuple):
    """A kernel that writes no scores to memory: its rates, as a fraction of the device's peak."""

    forward: float
    backward: float


FLASH_ATTENTION_2 = AttentionKernel(0.62, 0.50)
"""With a causal mask: 50 to 73 % and up to 63 % on A100 (Dao 2023, FlashAttention-2, section 4)."""


@dataclass(frozen=True, kw_only=True)
class MuonWork:
    """What Muon computes and sends in a step, on a pipeline stage."""

    steps: int  # of Newton-Schulz
    precision: Precision
    batches: tuple[tuple[int, int, int], ...]  # of the fullest owner: matrices, rows, columns
    rounds: int
    elements: int  # that a rank holds of all matrices
    members: int  # that send each other parts of matrices, and groups of them
    groups: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all ranks compute and send in one optimizer step."""

    model: ModelConfig
    sequence_length: int
    grid: Grid
    micro_batch_size: int  # sequences
    micro_batches: int  # of a step, on each data rank
    # Of each virtual stage: the first one also has the embedding, the last one the head. With one
    # chunk, these are the pipeline stages.
    blocks: tuple[int, ...]
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    extra_in_flight: int = 0  # micro-batches, with 1f1b and one chunk
    groups: int = 1  # into which micro-batches are divided, if a stage has several chunks
    gather_policy: Literal["layers", "chunks", "chunks_ahead"] = "layers"  # of ZeRO-3
    zero_stage: int = 0
    precision: Precision = "bf16"
    gradient_bytes: int = 4  # of an element of a reduced gradient
    adds_products: bool = False  # whether products add the gradients of blocks to their fp32 sums
    sent_share: float = 1.0  # sent bytes of gradients, as a fraction of those without compression
    attention: AttentionKernel | None = FLASH_ATTENTION_2  # None: the scores are written to memory
    recomputation: Recomputation = "none"
    recomputed_share: float = 1.0  # of the blocks
    sequence_parallel: bool = False
    context_method: ContextMethod | None = None  # None without a context axis
    overlaps_dp: bool = False  # whether gradients are reduced while the backward continues
    overlaps_gathers: bool = True  # ZeRO-1, 2: whether parameters are gathered beside a forward
    reduces_in_backward: bool = True  # at ZeRO-3 with overlaps_dp; otherwise only gathers overlap
    reductions: int = 1  # of all gradients in a step: 1, or as many as groups or micro-batches
    bucket_bytes: float = math.inf  # of gradients that are reduced together
    gathered_together: float = 0.0  # ZeRO-3: most elements of one gather of several blocks
    muon: tuple[MuonWork, ...] = ()  # of each pipeline stage; none: AdamW updates everything

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            schedule=self.schedule,
            stages=self.grid.pp,
            micro_batches=self.micro_batches,
            extra_in_flight=self.extra_in_flight,
            chunks=self.chunks,
            groups=self.groups,
            backward_ticks=3 if self.recomputation == "full" else 2,
            gather_policy=self.gather_policy,
        )

    @property
    def chunks(self) -> int:
        """The number of chunks of each pipeline stage."""
        return len(self.blocks) // self.grid.pp

    @cached_property
    def blocks_of_stages(self) -> list[int]:
        """The number of blocks of each pipeline stage, in all its chunks."""
        return self.stage_sums(self.blocks)

    def stage_sums(self, values: Sequence[_Number]) -> list[_Number]:
        """Sum values of the virtual stages over the chunks of each pipeline stage."""
        if self.chunks == 1:
            return list(values)
        return [sum(values[stage :: self.grid.pp]) for stage in range(self.grid.pp)]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before the tensor axis splits them."""
        return self.micro_batch_size * self.sequence_length // self.grid.cp

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return BYTES_OF[self.precision]

    def parameters_of_rank(self, stage: int) -> float:
        model = self.model
        table = model.vocab_size * model.hidden_size
        ends = (stage == 0) + (stage == self.grid.pp - 1)
        if self.grid.pp == 1 and model.tie_word_embeddings:
            ends = 1
        blocks = self.blocks_of_stages[stage] * block_parameters(model)
        return (blocks + ends * table) / self.grid.tp


class Product(NamedTuple):
    """A matrix product of (m, k) by (k, n). A grouped product has several matrices (k, n), and each
    multiplies some of the m rows.
    """

    m: int
    n: int
    k: int
    matrices: int = 1  # more than 1 in a grouped product
    is_fp32: bool = False  # in fp32 at any precision of the run

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def backward(self) -> tuple["Product", "Product"]:
        """The gradients of the input (m, k) and of the weight (n, k)."""
        kind = self.matrices, self.is_fp32
        return Product(self.m, self.k, self.n, *kind), Product(self.n, self.k, self.m, *kind)


def workload_of(run: Run, device_type: str = "cuda") -> Workload:
    """Return what a resolved run computes on "cuda" or "cpu".

    With attention dropout, FlashAttention is not used. On GPUs, it is not used in fp32 either
    (``model/attention.py``).
    """
    config, model, zero = run.config, run.config.model, run.config.zero_optimization
    head, parallel, pipeline = layer_count(model) - 1, config.parallel, pipeline_of(run)
    # Of each chunk of each stage.
    counts = [[len(c) - (0 in c) - (head in c) for c in chunks] for chunks in chunks_of_stages(run)]
    largest = max(map(sum, counts))
    recomputed = parallel.recomputed_blocks or largest
    takes_type = run.precision != "fp32" or device_type == "cpu"
    is_fused = takes_type and model.attention_dropout == 0.0
    assert zero.reduce_bucket_size is not None, "a resolved run states it"
    reduction = reduction_of_matrices(run, device_type, run.grid.copies)
    gradient_bytes = BYTES_OF[reduction.sent]
    return Workload(
        model=model,
        sequence_length=config.data.sequence_length,
        grid=run.grid,
        micro_batch_size=run.batch.micro_batch_size,
        micro_batches=pipeline.micro_batches,
        blocks=tuple(chain.from_iterable(zip(*counts, strict=True))),
        schedule=parallel.schedule,
        extra_in_flight=parallel.extra_in_flight,
        groups=pipeline.groups,
        gather_policy=pipeline.gather_policy,
        zero_stage=run.zero_stage,
        precision=run.precision,
        gradient_bytes=gradient_bytes,
        adds_products=reduction.added_by == "product",
        sent_share=compressed_share(run, 0),
        attention=FLASH_ATTENTION_2 if is_fused else None,
        # The copies of full_offloaded run beside the computation.
        recomputation="full" if parallel.recomputes_fully else parallel.activation_checkpointing,
        recomputed_share=min(1.0, recomputed / largest),
        sequence_parallel=run.sequence_parallel,
        context_method=run.context_method,
        overlaps_dp=run.zero_stage == 3 or reduction.overlaps,
        reduces_in_backward=reduction.overlaps,
        reductions=reduction.times(pipeline),
        bucket_bytes=zero.reduce_bucket_size * gradient_bytes,
        gathered_together=most_gathered_together(zero),
        muon=tuple(_muon_work(run, device_type)),
    )


def _muon_work(run: Run, device_type: str) -> Iterator[MuonWork]:
    for stage in range(run.grid.pp):
        axis = data_axis_of(run, stage, device_type)
        if (plan := axis.orthogonalization) is None or run.muon is None:
            return
        fullest = plan.costs.index(max(plan.costs))
        own = [batch for batch in chain(*plan.rounds) if batch.owner == fullest]
        yield MuonWork(
            steps=run.muon.ns_steps,
            precision=run.muon_dtype,
            batches=tuple((batch.matrices, batch.rows, batch.columns) for batch in own),
            rounds=len(plan.rounds),
            elements=sum(bucket.part for bucket in axis.orthogonalized),
            members=plan.members,
            groups=plan.groups,
        )


@lru_cache(maxsize=4096)  # a fit needs the products of each run thousands of times
def block_products(model: ModelConfig, tokens: int, tp: int) -> tuple[Product, ...]:
    """Return the products of a block's forward on one tensor rank, without the attention's own.

    Column-parallel weights have 1/tp of the rows, row-parallel weights 1/tp of the columns. Experts
    are not split.
    """
    rows = (row for row in block_rows(model).values() if not row.is_norm)
    return tuple(_of_row(row, tokens, tp) for row in rows)


@lru_cache(maxsize=4096)
def head_product(model: ModelConfig, tokens: int, tp: int) -> Product:
    """Return the product of the head's forward on one tensor rank."""
    return _of_row(head_rows(model)["output"], tokens, tp)


def attention_flops(model: ModelConfig, sequence_length: int, tokens: int, tp: int) -> float:
    """Return the FLOPs of the attention's two products in a forward, without a causal mask."""
    return 4 * tokens * sequence_length * model.num_attention_heads * model.head_dim / tp


def attended_tokens(model: ModelConfig, sequence_length: int) -> float:
    """Return how many tokens a token attends to, on average, with causal mask and window."""
    window = min(model.sliding_window or sequence_length, sequence_length)
    return window * (1 - window / (2 * sequence_length))


def _of_row(row: Row, tokens: int, tp: int) -> Product:
    assert row.columns is not None, "a linear module has a matrix"
    if row.kind in ("router", "experts"):
        width, is_fp32 = row.rows // row.experts, row.kind == "router"
        return Product(tokens * row.active_experts, width, row.columns, row.experts, is_fp32)
    if row.split == "columns":
        return Product(tokens, row.rows, math.ceil(row.columns / tp))
    return Product(tokens, math.ceil(row.rows / tp), row.columns)


@lru_cache(maxsize=1024)
def block_parameters(model: ModelConfig) -> int:
    return sum(p.elements for p in parameters_of(model, range(1, 2)).values())
