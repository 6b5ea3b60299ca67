"""The training step with torch's own data parallelism, for the same task as a ZeRO row.

    for each micro-batch:  forward, loss, backward    megaspeed's samples, loss and scale
    norm, clip, AdamW                                 megaspeed's parameter groups, learning rate

Only the engine differs from ``Worker``, so the losses must agree. DDP and FSDP2 are used as their
documentation recommends. With bf16, the weights stay fp32 and forward computes in bf16.

    DDP      every rank holds everything; gradients are all-reduced in the last backward of a step
             (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
             Training")
    FSDP2    parameters are gathered layer by layer, gradients are reduce-scattered
             (Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel")

    memory                 DDP                   FSDP2
    parameters             complete, fp32        1/dp of each, fp32
    gradients              complete, fp32        complete until they are reduced, then 1/dp
    optimizer states       complete              1/dp
    communication buffers  the buckets           gathered parameters, reduce-scatter buffers
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megaspeed.config.resolve import Run
from megaspeed.measurement.allocations import Allocation, AllocationLog
from megaspeed.measurement.compare.result import Baseline
from megaspeed.measurement.watched_step import Held
from megaspeed.model.gpt import GPT, Block
from megaspeed.model.initialization import initial_slice
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.model.parameters import logical_name
from megaspeed.planning.costs.memory import Category
from megaspeed.tensor_parallel.parallelize import materialize
from megaspeed.topology.context import ParallelContext
from megaspeed.training.rank_model import (
    backward_scale,
    make_optimizer,
    parameter_groups,
    plain_model,
    set_matmul_precision,
)
from megaspeed.training.worker import Load, StepResult
from megaspeed.zero.reductions import sum_of_squares


class BaselineWorker:
    """One rank of a baseline, at pp 1 and tp 1. It trains like ``Worker`` and can be watched."""

    def __init__(self, baseline: Baseline, run: Run, context: ParallelContext) -> None:
        set_matmul_precision(run.config.training, context.device)
        self.run = run
        self.context = context
        self.engine = Ddp(run, context) if baseline == "ddp" else Fsdp2(run, context)
        if isinstance(self.engine, Ddp):
            self.engine.show_buckets()
        self.model = self.engine.model
        """The module with the parameters, under their full names."""
        self.optimizer = make_optimizer(
            parameter_groups(
                dict(self.model.named_parameters()), run.config.model, run.config.optimizer
            ),
            run.config.optimizer,
        )
        self._after_backward: Callable[[], None] = lambda: None

    def train_step(self, load: Load, learning_rate: float) -> StepResult:
        """One optimizer step on the micro-batches that ``load`` returns. A collective."""
        micro_batches = self.run.batch.gradient_accumulation_steps
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for m in range(micro_batches):
            with self.engine.micro_batch(last=m == micro_batches - 1):
                loss_sum += self._forward_backward(load, m)
        norm = self._clip()
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss_sum, group=self.context.dp_group)
        return StepResult(float(loss_sum) / self.run.tokens_per_step, norm, skipped)

    def _forward_backward(self, load: Load, m: int) -> Tensor:
        batch = load(m)
        logits = self.engine.forward(batch)  # (B, S, V)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.targets.flatten(),
            ignore_index=NOT_COUNTED,
            reduction="sum",
        )
        del logits  # the graph keeps what backward needs
        (loss * backward_scale(self.run)).backward()
        self._after_backward()
        return loss.detach()

    def _clip(self) -> float:
        """Scales gradients down to the largest allowed norm. Returns the norm before clipping."""
        gradients = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        squares = sum_of_squares(gradients)
        if isinstance(self.engine, Fsdp2):
            dist.all_reduce(squares, group=self.context.dp_group)
        norm = float(squares.sqrt())
        largest = self.run.config.gradient_clipping
        if largest:
            scale = min(1.0, largest / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(scale)
        return norm

    def new_log(self) -> AllocationLog:
        return _LocalAllocationLog(self.context.device, _category_of)

    def held(self) -> Held:
        gathered = _gathered_parameters(self.model)
        parameters = list(self.model.parameters())
        states = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        return {
            "parameters": [_local(p) for p in parameters],
            "gradients": [
                *(None if p.grad is None else _local(p.grad) for p in parameters),
                *(each.unsharded_accumulated_grad for each in gathered),
                *(each.unsharded_param.grad for each in gathered),
            ],
            "optimizer_states": [_local(each) for each in states if isinstance(each, Tensor)],
            "communication_buffers": list(self.engine.buckets.values())
            if isinstance(self.engine, Ddp)
            else [],
        }

    def differentiated(self) -> Iterable[Tensor]:
        gathered = [parameter.unsharded_param for parameter in _gathered_parameters(self.model)]
        return gathered or self.model.parameters()

    def call_after_backward(self, function: Callable[[], None]) -> None:
        self._after_backward = function


class Plain:
    """The complete model on the rank's samples, without communication; bf16 runs use autocast."""

    def __init__(self, run: Run, context: ParallelContext) -> None:
        self.model = _complete_model(run, context.device)
        self._called: nn.Module = self.model
        self._autocast = run.precision == "bf16"
        self._device_type = context.device.type

    def forward(self, batch: MicroBatch) -> Tensor:
        """Logits (B, S, V) of a micro-batch."""
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._autocast):
            logits: Tensor = self._called(batch.tokens, batch.samples, batch.documents)
        return logits

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward."""
        return nullcontext()


class Ddp(Plain):
    """DistributedDataParallel over the data axis."""

    def __init__(self, run: Run, context: ParallelContext) -> None:
        super().__init__(run, context)
        on_gpu = context.device.type == "cuda"
        self._called = self._ddp = DistributedDataParallel(
            self.model,
            device_ids=[context.device] if on_gpu else None,
            process_group=context.dp_group,
            broadcast_buffers=False,  # they are constants
        )
        self._group = context.dp_group
        self.buckets: dict[int, Tensor] = {}
        """The flat gradients that the last step all-reduced, by their index; see show_buckets."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward: gradients are reduced in the last micro-batch."""
        return nullcontext() if last else self._ddp.no_sync()

    def show_buckets(self) -> None:
        """Fills ``buckets`` in each step, with a hook that does what DDP does by default.

        DDP keeps its buckets in C++, and only a hook can access them.
        """
        self._ddp.register_comm_hook(self._group, self._all_reduce)

    def _all_reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        self.buckets[bucket.index()] = bucket.buffer()
        return allreduce_hook(group, bucket)


class Fsdp2:
    """``fully_shard`` over the data axis: embedding, each block, head, and the root.

    A tied weight belongs to embedding and head. So neither is wrapped separately. Both are part of
    the root, whose parameters stay gathered from the first forward to the last backward.

    Args:
        run: the run.
        context: of this rank.
        guided: at ZeRO-3, two blocks are gathered ahead (torch's FSDP2 tutorial, "Explicit
            prefetching"). At lower stages, parameters stay gathered for the complete step, because
            megaspeed's ranks also hold them (``reshard_after_forward=False``).
    """

    def __init__(self, run: Run, context: ParallelContext, *, guided: bool = False) -> None:
        mesh = DeviceMesh.from_group(context.dp_group, context.device.type)
        bf16 = torch.bfloat16 if run.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
        tied = run.config.model.tie_word_embeddings

        def shard(layer: nn.Module) -> None:
            if isinstance(layer, Block) or not tied:
                fully_shard(layer, mesh=mesh, mp_policy=policy)

        self.model = _complete_model(run, context.device, on_layer_ready=shard)
        self._root = fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self._keeps = guided and run.zero_stage < 3
        if self._keeps:
            self._root.set_reshard_after_forward(False)
        elif guided:
            blocks: list[Any] = [each for each in self.model.modules() if isinstance(each, Block)]
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        self._every_micro_batch = run.gradient_reduction == "per_micro_batch"

    def forward(self, batch: MicroBatch) -> Tensor:
        """Logits (B, S, V) of a micro-batch."""
        logits: Tensor = self.model(batch.tokens, batch.samples, batch.documents)
        return logits

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward. Reduces gradients as the run configures it."""
        self._root.set_requires_gradient_sync(last or self._every_micro_batch)
        self._root.set_reshard_after_backward(last or not self._keeps)
        return nullcontext()


class _LocalAllocationLog(AllocationLog):
    """Counts the local part of a sharded tensor. The DTensor itself has a size but no memory."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then calls it again with the local parts
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _record(self, tensor: Tensor, category: Category | None) -> Allocation | None:
        return super()._record(
            tensor._local_tensor if isinstance(tensor, DTensor) else tensor, category
        )


def _category_of(module: str) -> Category | None:
    if module.startswith(("torch.distributed.fsdp.", "torch.distributed.algorithms.")):
        return "communication_buffers"
    return None


def _gathered_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's record of each parameter while it is gathered; empty for DDP.

    These are internals of torch 2.13, because FSDP2 has no public interface to them.
    """
    states: list[Any] = [
        fully_shard.state(module)  # type: ignore[attr-defined]
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return [
        parameter
        for state in states
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; the complete tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _complete_model(
    run: Run, device: torch.device, on_layer_ready: Callable[[nn.Module], None] = lambda layer: None
) -> GPT:
    """The model with all layers and megaspeed's initial values, in fp32."""
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
