"""torch's two kinds of data parallelism, each round one whole plain GPT.

    DDP      every rank holds everything; gradients are all-reduced in a step's last backward
             (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
             Training")
    FSDP2    ``fully_shard`` over embedding, blocks, head and root: parameters are gathered layer by
             layer, gradients reduce-scattered (Zhao et al. 2023, "PyTorch FSDP: Experiences on
             Scaling Fully Sharded Data Parallel")

Both are used as their documentation tells: DDP under ``no_sync`` until the last micro-batch, FSDP2
with ``set_requires_gradient_sync`` as ``gradient_reduction`` says. In bf16 the weights stay fp32
and forward computes in bf16: by autocast (DDP) or by ``MixedPrecisionPolicy`` (FSDP2).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megaspeed.config.resolve import Run
from megaspeed.model.gpt import GPT, Block
from megaspeed.model.initialization import initial_slice
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.model.parameters import logical_name
from megaspeed.tensor_parallel.parallelize import materialize
from megaspeed.topology.context import ParallelContext
from megaspeed.training.rank_model import plain_model


class DataParallel(Protocol):
    """One rank's replica or shard of the model."""

    model: GPT
    """The module that holds the parameters, under their full names."""
    sharded: bool
    """Whether each rank holds its own part of every gradient, or all hold the whole."""

    def forward(self, batch: MicroBatch) -> Tensor:
        """Logits (B, S, V) of a micro-batch."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Round forward and backward of a micro-batch; ``last`` of the step or not."""


class Ddp:
    """DistributedDataParallel over the data axis."""

    sharded = False

    def __init__(self, run: Run, context: ParallelContext) -> None:
        self.model = _plain_model(run, context.device)
        on_gpu = context.device.type == "cuda"
        self._ddp = DistributedDataParallel(
            self.model,
            device_ids=[context.device] if on_gpu else None,
            process_group=context.dp_group,
            broadcast_buffers=False,  # they are constants
        )
        self.buckets: dict[int, Tensor] = {}
        """The flat gradients that the last step all-reduced, by their order."""
        # The hook does what DDP does without one, and shows the buckets, which DDP keeps in C++.
        self._ddp.register_comm_hook(context.dp_group, self._all_reduce)
        self._autocast = run.precision == "bf16"
        self._device_type = context.device.type

    def forward(self, batch: MicroBatch) -> Tensor:
        """Under autocast in bf16."""
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._autocast):
            logits: Tensor = self._ddp(batch.tokens, batch.samples, batch.documents)
        return logits

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """``no_sync`` until the last one."""
        return nullcontext() if last else self._ddp.no_sync()

    def _all_reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        self.buckets[bucket.index()] = bucket.buffer()
        return allreduce_hook(group, bucket)


class Fsdp2:
    """``fully_shard`` over the data axis.

    A tied weight belongs to embedding and head, so both stay with the root, whose parameters are
    gathered from the first forward to the last backward.
    """

    sharded = True

    def __init__(self, run: Run, context: ParallelContext) -> None:
        mesh = DeviceMesh.from_group(context.dp_group, context.device.type)
        bf16 = torch.bfloat16 if run.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
        tied = run.config.model.tie_word_embeddings

        def shard(layer: nn.Module) -> None:
            if isinstance(layer, Block) or not tied:
                fully_shard(layer, mesh=mesh, mp_policy=policy)

        self.model = _plain_model(run, context.device, on_layer_ready=shard)
        self._root = fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self._every_micro_batch = run.gradient_reduction == "per_micro_batch"

    def forward(self, batch: MicroBatch) -> Tensor:
        """In bf16 where the policy says so."""
        logits: Tensor = self.model(batch.tokens, batch.samples, batch.documents)
        return logits

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduces after this micro-batch, or only adds up."""
        self._root.set_requires_gradient_sync(last or self._every_micro_batch)
        return nullcontext()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _plain_model(
    run: Run,
    device: torch.device,
    on_layer_ready: Callable[[nn.Module], None] = lambda layer: None,
) -> GPT:
    config, seed = run.config.model, run.config.training.seed
    model = plain_model(run)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    materialize(
        model,
        lambda name: initial_slice(config, seed, logical_name(config, name), shapes[name]),
        device=device,
        dtype=torch.float32,
        on_layer_ready=on_layer_ready,
    )
    return model
