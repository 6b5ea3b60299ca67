"""One rank's part of the model, on the meta device, and the initial values of its parameters.

GPT(layers of this pipeline stage) --parallelize--> RankModel --zero.build_engine--> ZeroEngine
GPT(all layers) -----------------------------------------------> the baselines of `compare`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaspeed.config.deepspeed_keys import OptimizerConfig
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.run import TrainingConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import parameter_named
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megaspeed.tensor_parallel.parallelize import initial_shard, parallelize
from megaspeed.tensor_parallel.plan import ParameterShard, vocabulary_rows_per_rank
from megaspeed.topology.context import ParallelContext


@dataclass(frozen=True)
class RankModel:
    """The layers of one pipeline stage, each with this tensor rank's shards.

    Attributes:
        module: on the meta device.
        shards: full name -> the part of the parameter that this rank holds.
        axis: the tensor axis.
        run: the resolved run.
    """

    module: GPT
    shards: dict[str, ParameterShard]
    axis: TensorAxis
    run: Run

    def initial_value(self, name: str) -> Tensor:
        """This rank's shard of a parameter's initial value: fp32, on the CPU."""
        config = self.run.config
        return initial_shard(config.model, config.training.seed, name, self.shards[name])


def rank_model(run: Run, context: ParallelContext) -> RankModel:
    """The part of the model that this rank trains."""
    axis = TensorAxis(
        group=context.tp_group,
        rank=context.tp_rank,
        size=context.tp_size,
        sequence_parallel=run.config.parallel.sequence_parallel and context.tp_size > 1,
        timeline=context.timeline,
    )
    module = plain_model(run, layers_of_stages(run)[context.pp_rank])
    return RankModel(module, parallelize(module, run.config.model, axis), axis, run)


def plain_model(run: Run, layers: range | None = None) -> GPT:
    """The layers ``layers`` of the run's model on the meta device; all layers if omitted."""
    with torch.device("meta"):
        return GPT(
            run.config.model,
            layers=layers,
            seed=run.config.training.seed,
            recompute_blocks=run.config.parallel.activation_checkpointing == "full",
        )


# AdamW over two groups: matrices and embeddings decay, biases and norms do not (law 4).


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], model: ModelConfig, optimizer: OptimizerConfig
) -> list[dict[str, Any]]:
    """Groups for ``torch.optim``: those that decay, then those that do not; empty ones left out."""
    decaying = [p for name, p in parameters.items() if parameter_named(model, name).decays]
    others = [p for name, p in parameters.items() if not parameter_named(model, name).decays]
    groups = [
        {"params": decaying, "weight_decay": optimizer.params.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """torch's AdamW in its fused form: one kernel a group, on CPU and GPU, nothing compiled."""
    params = optimizer.params
    return torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True)


# The loss of a step: the sum over predicted tokens divided by their global number (law 3).


def make_loss_function(run: Run, axis: TensorAxis) -> Callable[[Tensor, Tensor], Tensor]:
    """(this rank's logits, targets (B, S)) -> losses (B, S), nats, the same on all tensor ranks."""
    vocab_size = run.config.model.vocab_size
    rows = vocabulary_rows_per_rank(vocab_size, axis.size)
    start = axis.rank * rows
    vocabulary = range(min(start, vocab_size), min(start + rows, vocab_size))
    return lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, vocabulary, axis)


def backward_scale(run: Run) -> float:
    """What a rank's sum of losses is multiplied by before its backward pass.

    ZeRO averages gradients over the data axis, so the mean over all tokens is dp / tokens times the
    local sum.
    """
    return run.grid.dp / run.tokens_per_step


# How exactly a GPU multiplies matrices: process-wide switches of torch, set from the JSON.
#
#     training.allow_tf32                           fp32 products in TF32 (10 mantissa bits)
#     training.allow_reduced_precision_reduction    bf16 and fp16 products whose partial sums, where
#                                                   cuBLAS splits the inner dim, are bf16 or fp16
#
# Both are false by default: layouts split a product in different places, so only exact sums let
# them agree. torch's own default for the second is true. nanoGPT and litgpt turn TF32 on. Source:
# https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32" and the two sections after
# it.


def set_matmul_precision(training: TrainingConfig, device: torch.device) -> None:
    """Sets this process's switches; does nothing on a CPU, which sums fp32 in fp32."""
    if device.type != "cuda":
        return
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = training.allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = training.allow_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = training.allow_reduced_precision_reduction
