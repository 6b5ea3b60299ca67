"""The layers of one rank, its optimizer and its loss.

GPT(layers of this pipeline stage) --parallelize--> zero.build_engine --> ZeroEngine
GPT(all layers) --------------------------------------------------------> baselines of ``compare``
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megaspeed.config.deepspeed_keys import OptimizerConfig
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.run import TrainingConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.collectives import ContextAxis, TensorAxis
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.shards import vocabulary_rows_per_rank
from megaspeed.topology.context import ParallelContext


def tensor_axis(run: Run, context: ParallelContext) -> TensorAxis:
    return TensorAxis(
        group=context.tp_group,
        rank=context.tp_rank,
        size=context.grid.tp,
        sequence_parallel=run.sequence_parallel,
        timeline=context.timeline,
    )


def context_axis(run: Run, context: ParallelContext) -> ContextAxis:
    return ContextAxis(
        group=context.cp_group,
        rank=context.cp_rank,
        size=context.grid.cp,
        timeline=context.timeline,
        method=run.context_method or "ulysses",
    )


def plain_model(run: Run, chunks: Sequence[range] | None = None) -> GPT:
    """These chunks of layers of the run's model on the meta device; all layers if omitted."""
    with torch.device("meta"):  # a rank may not have memory for all layers
        return GPT(
            run.config.model,
            chunks=chunks,
            seed=run.config.training.seed,
            recomputation=run.config.parallel.activation_checkpointing,
            recomputed_blocks=run.config.parallel.recomputed_blocks,
        )


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], model: ModelConfig, optimizer: OptimizerConfig
) -> list[dict[str, Any]]:
    """The groups of ``torch.optim`` that are not empty.

    Matrices and embeddings decay, biases and norms do not.
    """
    decaying = [p for name, p in parameters.items() if parameter_named(model, name).decays]
    others = [p for name, p in parameters.items() if not parameter_named(model, name).decays]
    groups = [
        {"params": decaying, "weight_decay": optimizer.params.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class _AdamW(torch.optim.AdamW):
    """torch's AdamW, without the wrappers that keep ``torch.compile`` out of an optimizer.

    Each of them imports torch's compiler, which takes 0.7 s of each rank's processor time. A run
    compiles no optimizer.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)


def make_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """torch's fused AdamW: one kernel for each group, on CPU and GPU, without compilation."""
    params = optimizer.params
    return _AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True)


def vocab_parallel_loss(run: Run, axis: TensorAxis) -> VocabParallelLoss:
    """The loss of the last pipeline stage, over this rank's rows of the vocabulary."""
    vocab_size = run.config.model.vocab_size
    rows = vocabulary_rows_per_rank(vocab_size, axis.size)
    start = axis.rank * rows
    vocabulary = range(min(start, vocab_size), min(start + rows, vocab_size))
    return VocabParallelLoss(vocabulary, axis)


def backward_scale(run: Run) -> float:
    """The factor by which a rank multiplies its sum of losses before backward.

    The loss of a step is the mean over all predicted tokens. ZeRO averages gradients over data and
    context ranks, so this mean is dp cp / tokens times the local sum.
    """
    return run.grid.dp_cp / run.tokens_per_step


def set_matmul_precision(training: TrainingConfig, device: torch.device) -> None:
    """Set the precision of a GPU's matrix products in this process. Does nothing on a CPU.

        training.allow_tf32                           fp32 products in TF32 (10 mantissa bits)
        training.allow_reduced_precision_reduction    if cuBLAS splits the inner dim of a bf16 or
                                                      fp16 product, the partial sums are bf16 or
                                                      fp16, too

    Both are false by default. Layouts split a product in different places, so they agree only if
    sums are exact. torch's own default for the second is true. Source:
    https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32" and the two sections
    after it.
    """
    if device.type != "cuda":
        return
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = training.allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = training.allow_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = training.allow_reduced_precision_reduction
