"""Training with torch alone, for the same task as megaspeed: DDP, FSDP2, or without communication.

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
from megaspeed.measurement.watched_step import Held
from megaspeed.model.gpt import GPT, Block
from megaspeed.model.initialization import initial_slice
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.model.parameters import logical_name
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


def refusal(run: Run, *, has_pipeline: bool = False, autocasts: bool = False) -> str | None:
    """Return why a peer that lacks features of a run cannot train it, if so.

    Args:
        has_pipeline: whether the peer has a pipeline axis.
        autocasts: whether the peer computes in bf16 with torch's autocast.
    """
    grid, zero = run.grid, run.config.zero_optimization
    if grid.tp > 1 or (grid.pp > 1 and not has_pipeline):
        axes = "data and pipeline axes" if has_pipeline else "a data axis"
        mend = "parallel.tensor" if has_pipeline else "both"
        return (
            f"it has only {axes}, but parallel.pipeline is {grid.pp} and parallel.tensor is "
            f"{grid.tp}; set {mend} to 1"
        )
    if grid.cp > 1:
        return f"it has no context axis, but parallel.context is {grid.cp}; set it to 1"
    if (grid.ep or 1) > 1:
        return f"it has no expert axis, but parallel.expert is {grid.ep}; set it to 1"
    if run.precision == "fp16":
        return "it is run without a loss scale, but fp16.enabled is true; set bf16.enabled instead"
    if zero.offloads_optimizer or zero.offloads_parameters:
        return "it is run without offload; remove it from zero_optimization"
    if run.muon is not None:
        return 'it is run with torch\'s AdamW, but optimizer.type is "Muon"; set it to "AdamW"'
    if autocasts and run.precision == "bf16" and run.config.model.num_experts is not None:
        return (
            "torch's autocast does not cover the grouped products of experts (pytorch#174763), but "
            "bf16.enabled is true; set it to false"
        )
    if z_loss := run.config.training.z_loss:
        return f"it has no z-loss, but training.z_loss is {z_loss}; set it to 0"
    for name in ("router_aux_loss_coef", "router_bias_rate"):
        if value := getattr(run.config.model, name):
            return f"it does not balance experts, but model.{name} is {value}; set it to 0"
    return None


class Plain:
    """The complete model on the rank's samples, without communication; bf16 runs use autocast.

    Args:
        run: the run, at pp 1 and tp 1.
        context: of this rank.
        watched: whether the norm is always computed, and a step is skipped if it is not finite, as
            megaspeed does it. The host then waits for the GPU in each step. Also, DDP shows its
            buckets.
    """

    def __init__(self, run: Run, context: ParallelContext, *, watched: bool = False) -> None:
        set_matmul_precision(run.config.training, context.device)
        self.run, self.context = run, context
        self.buckets: dict[int, Tensor] = {}
        """Communication buffers that only DDP's hook can reach."""
        self._watched = watched
        self.model = self._complete_model()
        """The module with the parameters, under their full names."""
        self._called = self._engine()
        parameters = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(
            parameter_groups(parameters, run.config.model, run.config.optimizer),
            run.config.optimizer,
        )

    def _shard(self, layer: nn.Module) -> None:
        """Called for each layer whose parameters have their initial values."""

    def _engine(self) -> nn.Module:
        """The module whose forward is called."""
        return self.model

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward."""
        return nullcontext()

    def _logits(self, batch: MicroBatch) -> Tensor:
        # FSDP2 converts parameters itself.
        bf16 = self.run.precision == "bf16" and not isinstance(self.model, FSDPModule)
        with torch.autocast(self.context.device.type, torch.bfloat16, enabled=bf16):
            logits: Tensor = self._called(batch.tokens, batch.samples, batch.documents)
        return logits  # (B, S, V)

    def train_step(
        self, load: Load, learning_rate: float, after_backward: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Train one optimizer step on the micro-batches of ``load``, as torch's tutorials do it.

        The loss of the result is this rank's: the mean over the ranks is that of the step.
        """
        micro_batches = self.run.batch.gradient_accumulation_steps
        losses = []
        for m in range(micro_batches):
            with self._micro_batch(last=m == micro_batches - 1):
                loss = self._loss(load(m))
                loss.backward()
            losses.append(loss.detach())
            after_backward()
        norm = self._clip()
        skipped = self._watched and not math.isfinite(norm)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(float(torch.stack(losses).sum()), float(norm), skipped)

    def _loss(self, batch: MicroBatch) -> Tensor:
        total = F.cross_entropy(
            self._logits(batch).flatten(0, 1).float(),
            batch.targets.flatten(),
            ignore_index=NOT_COUNTED,
            reduction="sum",
        )
        return total * backward_scale(self.run)

    def _clip(self) -> Tensor | float:
        """Scale gradients down to the largest allowed norm. Return the norm before clipping."""
        largest = self.run.config.gradient_clipping
        if not largest and not self._watched:
            return math.nan
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(self.model, FSDPModule):
            squares = norm.double().square()
            dist.all_reduce(squares, group=self.context.data_group)
            norm = squares.sqrt().float()
        if largest:
            torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def held(self) -> Held:
        """Return the tensors that the rank holds now; see ``Watched``."""
        gathered = _gathered_parameters(self.model)
        parameters = list(self.model.parameters())
        states = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        return {
            "parameters": [local(p) for p in parameters],
            "gradients": [
                *(None if p.grad is None else local(p.grad) for p in parameters),
                *(each.unsharded_accumulated_grad for each in gathered),
                *(each.unsharded_param.grad for each in gathered),
            ],
            "optimizer_states": [local(each) for each in states if isinstance(each, Tensor)],
            "communication_buffers": list(self.buckets.values()),
        }

    def differentiated(self) -> Iterable[Tensor]:
        """Return the tensors whose gradients autograd computes."""
        gathered = [parameter.unsharded_param for parameter in _gathered_parameters(self.model)]
        return gathered or self.model.parameters()

    def _complete_model(self) -> GPT:
        """The model with all layers and megaspeed's initial values, in fp32."""
        config, seed = self.run.config.model, self.run.config.training.seed
        model = plain_model(self.run)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        materialize(
            model,
            lambda name: initial_slice(config, seed, logical_name(config, name), shapes[name]),
            device=self.context.device,
            dtype=torch.float32,
            on_layer_ready=self._shard,
        )
        return model


class Ddp(Plain):
    """DistributedDataParallel over the data axis: reduces in the last micro-batch of a step."""

    def _engine(self) -> nn.Module:
        # All data ranks, because pp and tp are 1.
        group, device = self.context.world_group, self.context.device
        self._ddp = DistributedDataParallel(
            self.model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=group,
            broadcast_buffers=False,  # they are constants
        )
        if self._watched:  # DDP keeps its buckets in C++, and only a hook can access them
            self._ddp.register_comm_hook(group, self._all_reduce)
        return self._ddp

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def _all_reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        """What DDP does by default."""
        self.buckets[bucket.index()] = bucket.buffer()
        return allreduce_hook(group, bucket)


class Fsdp2(Plain):
    """``fully_shard`` over the data axis: embedding, each block, head, and the root.

    A tied weight belongs to embedding and head. So neither is wrapped separately. Both are part of
    the root, whose parameters stay gathered from the first forward to the last backward. Gradients
    are reduced as the run configures it.

    If it is ``guided``, at ZeRO-3 two blocks are gathered ahead (torch's FSDP2 tutorial, "Explicit
    prefetching"). At lower stages, parameters stay gathered for the complete step, because
    megaspeed's ranks also hold them (``reshard_after_forward=False``).
    """

    def __init__(
        self, run: Run, context: ParallelContext, *, watched: bool = False, guided: bool = False
    ) -> None:
        self._guided, self._keeps = guided, guided and run.zero_stage < 3
        bf16 = torch.bfloat16 if run.precision == "bf16" else None
        self._how: dict[str, Any] = {
            "mesh": _mesh(context),
            "mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32),
        }
        super().__init__(run, context, watched=watched)

    def _shard(self, layer: nn.Module) -> None:
        if isinstance(layer, Block) or not self.run.config.model.tie_word_embeddings:
            fully_shard(layer, **self._how)

    def _engine(self) -> nn.Module:
        self._root: Any = fully_shard(self.model, **self._how)
        if self._keeps:
            self._root.set_reshard_after_forward(False)
        elif self._guided:
            blocks: list[Any] = [each for each in self.model.modules() if isinstance(each, Block)]
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        return self.model

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        every_time = self.run.gradient_reduction == "per_micro_batch"
        self._root.set_requires_gradient_sync(last or every_time)
        self._root.set_reshard_after_backward(last or not self._keeps)
        return nullcontext()


def _mesh(context: ParallelContext) -> DeviceMesh:
    """The data ranks: one dimension, or replicas x shards (torch's hybrid sharding)."""
    device, grid = context.device.type, context.grid
    if context.replica_group is None or grid.shard == 1:
        return DeviceMesh.from_group(context.data_group, device)
    ranks = torch.arange(grid.dp).view(grid.replicate, grid.shard)
    groups = [context.replica_group, context.shard_group]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("replica", "shard"))


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds; the tensor itself if it is not sharded."""
    # ``to_local`` would record an operation of autograd.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
