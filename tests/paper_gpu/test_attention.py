"""A GPU can use torch's flash kernel for the attention of every preset, at tp 1 and 2.

Attention with dropout is the exception: it uses no fused kernel. ``test_varlen.py`` tests separate
documents and windows.

A CPU cannot show which kernel a GPU uses: torch's own ``can_use_flash_attention`` is false in a
build without CUDA. But the requirements of the kernel can be checked. The filters are listed in
torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, ``can_use_flash_attention``. Each name
stands beside the precondition that it checks. If one fails, torch silently uses a kernel that is
slower or that writes the scores (B, H, S, S) to memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.tensor_parallel.collectives import ContextAxis, TensorAxis
from megaspeed.tensor_parallel.context import share_sequences
from megaspeed.tensor_parallel.parallelize import materialize, parallelize
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.paper_gpu.shrunk_presets import SEQUENCE, every_model
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

SAMPLES = (3, 8)


@dataclass(frozen=True)
class Operand:
    """A query, key or value (B, heads, S, K) as the kernel sees it, without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Operand":
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


@dataclass(frozen=True)
class Call:
    """The arguments of one ``F.scaled_dot_product_attention``."""

    query: Operand
    key: Operand
    value: Operand
    attn_mask: bool
    dropout_p: float
    is_causal: bool
    enable_gqa: bool


class Recorder(TorchFunctionMode):
    """Record every call of ``F.scaled_dot_product_attention``, and then run it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append(call_of(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    operands = Operand.of(query), Operand.of(key), Operand.of(value)
    return Call(*operands, attn_mask is not None, dropout_p, is_causal, enable_gqa)


def why_not_flash(call: Call) -> list[str]:
    """Return the filters that refuse this call."""
    operands = (call.query, call.key, call.value)
    (batch, heads, queries, head_dim), stored = call.query.shape, call.key.shape
    filters = {
        "check_for_attn_mask": not call.attn_mask,
        "check_dtypes_flash_attention": call.query.dtype in (torch.bfloat16, torch.float16)
        and all(o.dtype == call.query.dtype for o in operands),
        "check_tensor_shapes": all(len(o.shape) == 4 for o in operands),
        # If the size is no multiple of 8, torch pads it: three copies a call.
        "check_head_dim_size_flash": all(o.shape[-1] == head_dim for o in operands)
        and head_dim <= 256
        and head_dim % 8 == 0,
        "check_flash_causal_non_square_seqlens": not call.is_causal or stored[2] == queries,
        "check_batch_size_and_num_heads_dense": call.value.shape == stored
        and stored[0] == batch
        and (stored[1] == heads or (call.enable_gqa and heads % stored[1] == 0)),
        "check_last_dim_stride_equals_1_dense": all(o.stride[-1] == 1 for o in operands),
        # No filter, but the kernel loads 16 bytes at a time and requires this.
        "16-byte rows": all(
            number % 8 == 0 for o in operands for number in (*o.stride[:-1], o.offset)
        ),
        # No filter either: dropout within the kernel would depend on the layout.
        "dropout": call.dropout_p == 0.0,
        "causal": call.is_causal,
    }
    return [name for name, passes in filters.items() if not passes]


def calls_on_rank(
    launch: LaunchEnvironment, configs: list[ModelConfig], grid: Grid, sequence_parallel: bool
) -> list[list[Call]]:
    """Return the attention calls of this rank in a training forward pass of each model in bf16."""
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        axis = TensorAxis(
            context.tp_group, context.tp_rank, grid.tp, sequence_parallel=sequence_parallel
        )
        sequence_axis = ContextAxis(context.cp_group, context.cp_rank, grid.cp)
        return [calls_of(config, axis, sequence_axis) for config in configs]


def calls_of(config: ModelConfig, axis: TensorAxis, sequence_axis: ContextAxis) -> list[Call]:
    with torch.device("meta"):
        model = GPT(config)
    shards = parallelize(model, config, axis)
    if sequence_axis.size > 1:
        share_sequences(model, sequence_axis, axis)
    materialize(
        model,
        lambda name: torch.zeros(shards[name].local_shape),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    with Recorder() as recorder:
        own = SEQUENCE // sequence_axis.size
        model(torch.zeros(len(SAMPLES), own, dtype=torch.int64), SAMPLES)
    return recorder.calls


@pytest.mark.parametrize(
    ("tensor_size", "context_size", "sequence_parallel"),
    [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)],
)
def test_every_attention_can_take_the_flash_kernel(
    tensor_size: int, context_size: int, sequence_parallel: bool, pool: RankPool
) -> None:
    models = {
        name: config
        for name, config in every_model().items()
        if config.num_attention_heads % (tensor_size * context_size) == 0
    }
    grid = Grid(pp=1, dp=1, cp=context_size, tp=tensor_size)
    configs = list(models.values())
    ranks = pool.run(grid.world_size, calls_on_rank, configs, grid, sequence_parallel)
    for rank in ranks:
        for (name, config), calls in zip(models.items(), rank, strict=True):
            (call,) = calls  # one for each layer
            assert why_not_flash(call) == [], name
            heads = config.num_attention_heads // (tensor_size * context_size)
            assert call.query.shape == (len(SAMPLES), heads, SEQUENCE, config.head_dim), name


def test_the_presets_head_sizes_are_among_those_tried() -> None:
    assert {config.head_dim for config in every_model().values()} == {8, 32, 64, 80, 128, 160}


def fits() -> Call:
    operand = Operand(torch.bfloat16, (2, 4, 16, 64), (4096, 64, 256, 1), 0)
    return Call(operand, operand, operand, False, 0.0, True, False)


def each(call: Call, **changes: Any) -> Call:
    """Return the call with all three operands changed."""
    operand = replace(call.query, **changes)
    return replace(call, query=operand, key=operand, value=operand)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(fits(), attn_mask=True, is_causal=False), "check_for_attn_mask"),
        (each(fits(), dtype=torch.float32), "check_dtypes_flash_attention"),
        (
            replace(fits(), key=replace(fits().key, dtype=torch.float32)),
            "check_dtypes_flash_attention",
        ),
        (each(fits(), shape=(2, 4, 16, 264)), "check_head_dim_size_flash"),
        (each(fits(), shape=(2, 4, 16, 20)), "check_head_dim_size_flash"),
        (each(fits(), stride=(4096, 1024, 1, 16)), "check_last_dim_stride_equals_1_dense"),
        (
            replace(fits(), query=replace(fits().query, shape=(2, 8, 16, 64))),
            "check_batch_size_and_num_heads_dense",
        ),
        (
            replace(fits(), query=replace(fits().query, shape=(2, 4, 8, 64))),
            "check_flash_causal_non_square_seqlens",
        ),
        (each(fits(), offset=4), "16-byte rows"),
        (replace(fits(), dropout_p=0.1), "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attention_that_cannot_is_noticed(call: Call, reason: str) -> None:
    assert why_not_flash(fits()) == []
    assert reason in why_not_flash(call)
