"""The training step of torch's own data parallelism, on the same work as a ZeRO row.

    for each micro-batch:  forward, loss, backward      megaspeed's samples, loss and scale
    norm, clip, AdamW                                   megaspeed's groups and learning rate

What differs from ``Worker`` is the engine alone, so the losses must agree.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.analysis.compare.data_parallel import DataParallel, Ddp, Fsdp2, local
from megaspeed.analysis.compare.variants import Baseline
from megaspeed.config.resolve import Run
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.topology.context import ParallelContext
from megaspeed.training.rank_model import (
    backward_scale,
    make_loss_function,
    make_optimizer,
    parameter_groups,
    set_matmul_precision,
)
from megaspeed.training.worker import Load, StepResult
from megaspeed.zero.reductions import sum_of_squares

_ENGINES: dict[Baseline, type[Ddp] | type[Fsdp2]] = {"ddp": Ddp, "fsdp": Fsdp2}


class BaselineWorker:
    """One rank of a baseline; it trains as ``Worker`` does. Every method is a collective.

    Args:
        baseline: which one.
        run: the resolved run, of pp 1 and tp 1.
        context: this rank's groups.
    """

    def __init__(self, baseline: Baseline, run: Run, context: ParallelContext) -> None:
        set_matmul_precision(run.config.training, context.device)
        self.run = run
        self.context = context
        self.engine: DataParallel = _ENGINES[baseline](run, context)
        self.optimizer = make_optimizer(
            parameter_groups(
                dict(self.engine.model.named_parameters()), run.config.model, run.config.optimizer
            ),
            run.config.optimizer,
        )
        self.after_backward: Callable[[], None] = lambda: None
        """Called after each micro-batch's backward."""
        self._loss_function = make_loss_function(run, TensorAxis(group=None, rank=0, size=1))

    def train_step(self, load: Load, learning_rate: float) -> StepResult:
        """One optimizer step on the micro-batches that ``load`` gives."""
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
        loss = self._loss_function(logits, batch.targets).sum()
        del logits  # what backward needs of them, the graph keeps
        (loss * backward_scale(self.run)).backward()
        self.after_backward()
        return loss.detach()

    def _clip(self) -> float:
        """Scales the gradients down to the largest norm; returns the norm that they had."""
        parameters = self.engine.model.parameters()
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        squares = sum_of_squares(gradients)
        if self.engine.sharded:
            dist.all_reduce(squares, group=self.context.dp_group)
        norm = float(squares.sqrt())
        largest = self.run.config.gradient_clipping
        if largest:
            scale = min(1.0, largest / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(scale)
        return norm
