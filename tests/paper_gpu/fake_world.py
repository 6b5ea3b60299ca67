"""One process as any rank of any grid, over torch's ``fake`` process groups, on a CPU or a GPU.

    with fake_rank(run, rank) as worker:        the real worker, the real DeepSpeed engine
        worker.train_step(batches(run), 1e-3)

A fake collective returns at once, with only this rank's own part, and a message from another stage
is zeros. An exception is an all-to-all of whole numbers, which are numbers of rows: this rank
receives what it sends, so later messages are not empty. So the numbers mean nothing, except that
they are finite. Only the order of the calls is meaningful.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.model.documents import Documents, take
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.model.sequence_part import SequencePart
from megaspeed.topology import context
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import Worker
from tests.support.tiny import merge

CPU = torch.device("cpu")
_ARRIVING = (
    "recv_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_base_",
)
"""Operators whose first argument is what the rank receives."""

GPT2 = {
    "architecture": "gpt2",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
LLAMA = {
    **GPT2,
    "architecture": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
MOE = {
    **GPT2,
    "architecture": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
    "router_bias_rate": 0.001,
}
"""A mixture of experts with both methods of balance."""


def paper_run(
    *,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    device_type: Literal["cpu", "cuda"] = "cpu",
    **changes: Any,
) -> Run:
    """Return a tiny bf16 run: 2 blocks, 2 micro-batches a step. ``changes`` are JSON keys."""
    values = {
        "model": GPT2,
        "parallel": {"pipeline": pp, "context": cp, "tensor": tp},
        "data": {"train": ["never read"], "sequence_length": 16},
        "training": {"steps": 10, "compile": False},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        # About the size of a block: there are several buckets, and each block is gathered by
        # itself.
        "zero_optimization": {
            "reduce_bucket_size": 12 * 32**2,
            "stage3_prefetch_bucket_size": 12 * 32**2,
        },
    }
    config = parse_config(merge(values, changes))
    return resolve_run(config, World(pp * dp * cp * tp, "test", device_type), name="paper")


def batches(run: Run, device: torch.device = CPU) -> Callable[[int], MicroBatch]:
    """Return micro-batches of fixed tokens, already on the device.

    If attention restarts at each document, the documents have 6, 10 and 16 tokens. With a context
    axis, all ranks have the part of the first one.
    """
    shape = (run.batch.micro_batch_size, run.config.data.sequence_length)
    part = SequencePart(run.context_method or "ulysses", 0, run.grid.cp)
    tokens = torch.arange(shape[0] * shape[1]).view(shape) % run.config.model.vocab_size
    tokens = take(tokens, part.ranges(shape[1])).contiguous()
    documents = None
    if run.config.data.reset_at_documents:
        begins = torch.zeros(shape, dtype=torch.bool)
        begins[0, 6] = True
        documents = Documents.beginning_at(begins, part.attention)
    batch = MicroBatch(tokens, tokens.clone(), torch.arange(shape[0]), documents).to(device)
    return lambda micro_batch: batch


@contextmanager
def fake_context(grid: Grid, rank: int) -> Iterator[ParallelContext]:
    """Create the context of one rank. Its groups are created like real ones, but send nothing."""
    launch = LaunchEnvironment(
        rank=rank,
        world_size=grid.world_size,
        local_rank=0,
        local_world_size=1,
        source="the fake world",
    )
    new_group = dist.new_group

    def fake_group(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = new_group(ranks, **(options | {"backend": "fake"}))
        return group

    def split_group(split_ranks: list[list[int]], **options: Any) -> dist.ProcessGroup:
        return fake_group(next(ranks for ranks in split_ranks if rank in ranks), **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(context, "start_default_group", _start_fake_group))
        # No other rank answers.
        stack.enter_context(patch.object(context, "check_group", lambda *args: None))
        stack.enter_context(patch.object(dist, "new_group", fake_group))
        stack.enter_context(patch.object(dist, "split_group", split_group))
        stack.enter_context(_zeros_arrive())
        made = ParallelContext.create(grid, launch, timeout_seconds=60, store=dist.HashStore())
        yield stack.enter_context(made)


@contextmanager
def _zeros_arrive() -> Iterator[None]:
    """Let fake messages be zeros, because torch's fake groups do not write all that arrives.

    They do not write what a rank receives from another stage (torch 2.13), nor the results of
    reduce-scatters and all-to-alls (torch 2.11). Such memory often contains NaN, so it is set to
    zero. A result that shares memory with what was sent is kept.
    """

    def arrive(results: Any, *arguments: Any) -> torch.ScriptObject:
        sent = {one.untyped_storage()._cdata for one in tree_leaves(arguments) if _is_tensor(one)}
        with _disable_current_modes():  # nobody records this as a part of the step
            for one in filter(_is_tensor, tree_leaves(results)):
                if one.untyped_storage()._cdata not in sent:
                    one.detach().zero_()
        return FakeWork().boxed()

    def arrive_and_return(result: Any, *arguments: Any) -> tuple[Any, torch.ScriptObject]:
        return result, arrive(result, *arguments)

    def exchange(received: Tensor, sent: Tensor, group: Any, *more: Any) -> torch.ScriptObject:
        if received.is_floating_point():
            return arrive(received, sent)
        with _disable_current_modes():
            exchange_counts(received, sent, dist.ProcessGroup.unbox(group))
        return FakeWork().boxed()

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that torch's own operators are replaced
        for name, key in product(_ARRIVING, ("CPU", "CUDA")):
            others = {"_reduce_scatter_base_": arrive_and_return, "alltoall_base_": exchange}
            library.impl(name, others.get(name, arrive), key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def exchange_counts(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Let the whole numbers of an all-to-all arrive. A test may replace it."""
    received.copy_(sent)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@contextmanager
def fake_rank(run: Run, rank: int) -> Iterator[Worker]:
    """Build rank ``rank`` of the run, ready to train."""
    grid = run.grid
    with fake_context(grid, rank) as made:
        yield Worker(run, made)


def _start_fake_group(
    store: dist.Store, launch: LaunchEnvironment, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    dist.init_process_group(
        "fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD
