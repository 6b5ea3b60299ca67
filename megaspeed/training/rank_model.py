"""The layers of one rank, its optimizer and its loss.

GPT(layers of this pipeline stage) --parallelize--> zero.build_engine --> ZeroEngine
GPT(all layers) --------------------------------------------------------> baselines of ``compare``
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megaspeed.config.deepspeed_keys import MuonParams, OptimizerConfig
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.run import TrainingConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.collectives import ContextAxis, ExpertAxis, TensorAxis
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.shards import vocabulary_rows_per_rank
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.muon import AdamWOrMuon


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


def expert_axis(run: Run, context: ParallelContext) -> ExpertAxis:
    return ExpertAxis(
        group=context.ep_group,
        rank=context.rank_along("ep"),
        size=context.grid.ep or 1,
        timeline=context.timeline,
        method=run.expert_exchange or "all_to_all",
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

    Matrices and embeddings decay, biases and norms do not. Muon updates the matrices of blocks.
    Each group multiplies the learning rate of a step by its ``lr_ratio``.
    """
    params, groups = optimizer.params, dict[tuple[bool, bool], list[nn.Parameter]]()
    for name, parameter in parameters.items():
        row = parameter_named(model, name)
        is_orthogonalized = row.is_block_matrix and isinstance(params, MuonParams)
        groups.setdefault((is_orthogonalized, row.decays), []).append(parameter)
    return [
        {
            "params": members,
            "weight_decay": params.weight_decay if decays else 0.0,
            "is_orthogonalized": is_orthogonalized,
            "lr_ratio": params.rates[0 if is_orthogonalized else 1] / params.lr,
        }
        for (is_orthogonalized, decays), members in groups.items()
    ]


def make_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """torch's fused AdamW: one kernel for each group, on CPU and GPU, without compilation. It
    applies Muon's updates to the groups that have them.
    """
    params = optimizer.params
    return AdamWOrMuon(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True)


def vocab_parallel_loss(run: Run, axis: TensorAxis) -> VocabParallelLoss:
    """The loss of the last pipeline stage, over this rank's rows of the vocabulary."""
    vocab_size = run.config.model.vocab_size
    rows = vocabulary_rows_per_rank(vocab_size, axis.size)
    start = axis.rank * rows
    vocabulary = range(min(start, vocab_size), min(start + rows, vocab_size))
    return VocabParallelLoss(vocabulary, axis, run.config.training.z_loss)


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
