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

from megaspeed.config.model import ContextMethod, ExpertExchange, ModelConfig
from megaspeed.config.resolve import BYTES_OF, Precision, Run
from megaspeed.config.run import Recomputation
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.buckets import reduction_of_matrices
from megaspeed.data_axis.gathers import most_gathered_together
from megaspeed.data_axis.orthogonalization import Orthogonalization
from megaspeed.model.parameters import Row, block_rows, head_rows, layer_count, parameters_of
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.schedules import Pipeline, pipeline_of
from megaspeed.planning.costs.activations import used_load_factor
from megaspeed.planning.costs.traffic import compressed_share
from megaspeed.topology.devices import Device
from megaspeed.topology.grid import Axis, Copies, Grid

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
    axes: tuple[Axis, Axis] = ("stage", "replica")  # of the members, and of the groups


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
    # For each pipeline stage: of its matrices and, if divided otherwise, of experts. None: AdamW.
    muon: tuple[tuple[MuonWork, ...], ...] = ()
    expert_exchange: ExpertExchange | None = None  # None if a rank has all experts
    load_factor: float = 1.0  # rows that the slowest rank computes, as a multiple of the mean

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

    @property
    def own_tokens(self) -> float:
        """Tokens of a micro-batch for which one rank computes what is not split over ``tp``."""
        return self.tokens / (self.grid.tp if self.sequence_parallel else 1)

    def held(self, stage: int) -> list[tuple[Copies, float]]:
        """The elements of a rank, with the ranks that hold copies of them."""
        model = self.model
        table = model.vocab_size * model.hidden_size
        ends = (stage == 0) + (stage == self.grid.pp - 1)
        if self.grid.pp == 1 and model.tie_word_embeddings:
            ends = 1
        blocks = [(c, self.blocks_of_stages[stage] * n) for c, n in self.held_of_block]
        (copies, first), *experts = blocks
        return [(copies, first + ends * table / self.grid.tp), *experts]

    @cached_property
    def held_of_block(self) -> list[tuple[Copies, float]]:
        """``held`` for one block."""
        grid, experts = self.grid, expert_parameters(self.model)
        others, own = (block_parameters(self.model) - experts) / grid.tp, experts / (grid.ep or 1)
        if not grid.has_expert_axes:
            return [(grid.copies, others + own)]
        return [(grid.copies, others), (grid.expert_copies, own)]


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
        muon=tuple(_muon_works(run, device_type)),
        expert_exchange=run.expert_exchange,
        load_factor=1.0 if run.expert_exchange is None else used_load_factor(run),
    )


def _muon_works(run: Run, device_type: str) -> Iterator[tuple[MuonWork, ...]]:
    for stage in range(run.grid.pp if run.muon is not None else 0):
        plans = data_axis_of(run, stage, device_type).orthogonalizations
        yield tuple(_muon_work(run, plan) for plan in plans)


def _muon_work(run: Run, plan: Orthogonalization) -> MuonWork:
    assert run.muon is not None
    fullest = plan.costs.index(max(plan.costs))
    own = [batch for batch in chain(*plan.rounds) if batch.owner == fullest]
    return MuonWork(
        steps=run.muon.ns_steps,
        precision=run.muon_dtype,
        batches=tuple((batch.matrices, batch.rows, batch.columns) for batch in own),
        rounds=len(plan.rounds),
        elements=math.ceil(sum(each.part for each in plan.sections) / plan.copies.shard),
        members=plan.members,
        groups=plan.groups,
        axes=(plan.axis, plan.copies.replica_axis),
    )


@lru_cache(maxsize=4096)  # a fit needs the products of each run thousands of times
def block_products(
    model: ModelConfig, tokens: int, tp: int, ep: int = 1, load_factor: float = 1.0
) -> tuple[Product, ...]:
    """Return the products of a block's forward on one tensor rank, without the attention's own.

    Column-parallel weights have 1/tp of the rows, row-parallel weights 1/tp of the columns. Experts
    are not split: a rank has 1/ep of them, and 1/tp of the tokens. ``load_factor`` is the number of
    its rows as a multiple of the mean.
    """
    rows = (row for row in block_rows(model).values() if not row.is_norm)
    return tuple(_of_row(row, tokens, tp, ep, load_factor) for row in rows)


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


def _of_row(row: Row, tokens: int, tp: int, ep: int = 1, load_factor: float = 1.0) -> Product:
    assert row.columns is not None, "a linear module has a matrix"
    if row.kind == "router":
        return Product(math.ceil(tokens / tp), row.rows, row.columns, 1, is_fp32=True)
    if row.kind == "experts":
        rows = math.ceil(tokens * row.active_experts * load_factor / tp)
        return Product(rows, row.rows // row.experts, row.columns, row.experts // ep)
    if row.split == "columns":
        return Product(tokens, row.rows, math.ceil(row.columns / tp))
    return Product(tokens, math.ceil(row.rows / tp), row.columns)


@lru_cache(maxsize=1024)
def block_parameters(model: ModelConfig) -> int:
    return sum(p.elements for p in parameters_of(model, range(1, 2)).values())


@lru_cache(maxsize=1024)
def expert_parameters(model: ModelConfig) -> int:
    """Return the parameters of all experts of a block."""
    block = parameters_of(model, range(1, 2)).values()
    return sum(p.elements for p in block if p.is_expert)
