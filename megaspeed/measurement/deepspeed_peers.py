"""Peers that train with DeepSpeed, with its defaults or as its guides recommend.

    hf-deepspeed         transformers' model   deepspeed.initialize, with the run's ZeRO stage
    deepspeed-pipeline   megaspeed's layers    deepspeed.pipe.PipelineModule, with the run's stages

The other peers are in ``torch_trainers``. All train on the run's samples, with its micro-batches,
dtype, clipping and torch's fused AdamW. megaspeed's layers start from the run's initial weights.
transformers' model draws its own.
"""

import functools
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.resolve import Run
from megaspeed.model.gpt import DTYPES, GPT
from megaspeed.model.initialization import initialize
from megaspeed.model.parameters import layer_count
from megaspeed.topology.context import ParallelContext
from megaspeed.training.rank_model import set_matmul_precision
from megaspeed.training.worker import Load, StepResult

Settings = Literal["defaults", "guide"]

_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_KEYS_OF_THE_RUN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "data_types",
    "communication_data_type",
)


class HfDeepspeed:
    """A user's loop over ``deepspeed.initialize(AutoModelForCausalLM)``."""

    def __init__(self, run: Run, context: ParallelContext, *, settings: Settings) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._micro_batches = run.batch.gradient_accumulation_steps
        set_matmul_precision(run.config.training, context.device)
        torch.manual_seed(run.config.training.seed)
        config = AutoConfig.for_model(
            **hugging_face_config(run.config.model), **_NO_SPECIAL_TOKENS, use_cache=False
        )
        with context.device:
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[run.precision])
        if run.config.parallel.activation_checkpointing == "full":
            model.gradient_checkpointing_enable()
        _prepare_deepspeed()
        self._engine, self._optimizer = _deepspeed_engine(run, model, settings)
        self._engine.train()

    def train_step(self, load: Load, learning_rate: float) -> StepResult:
        _set_rate(self._optimizer, learning_rate)
        losses = []
        for batch in map(load, range(self._micro_batches)):
            loss = _loss(self._engine(batch.tokens).logits, batch.targets)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        return _result(torch.stack(losses).mean())


class DeepspeedPipeline:
    """The loop of DeepSpeed's pipeline tutorial: ``train_batch`` over an iterator."""

    def __init__(self, run: Run, context: ParallelContext) -> None:
        set_matmul_precision(run.config.training, context.device)
        _prepare_deepspeed()
        from deepspeed.pipe import PipelineModule

        model = PipelineModule(
            _pipeline_layers(run),
            num_stages=run.grid.pp,
            loss_fn=_loss,
            partition_method="type:_Block",
            activation_checkpoint_interval=0,  # the blocks do it themselves
        )
        self._micro_batches = run.batch.gradient_accumulation_steps
        self._engine, self._optimizer = _deepspeed_engine(run, model, settings=None)

    def train_step(self, load: Load, learning_rate: float) -> StepResult:
        _set_rate(self._optimizer, learning_rate)
        batches = map(load, range(self._micro_batches))
        samples = ((batch.tokens, batch.targets) for batch in batches)
        return _result(self._engine.train_batch(data_iter=samples))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the tokens of a micro-batch: logits (B, S, V) and targets (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _result(loss: Tensor) -> StepResult:
    """The result with this rank's loss; the gradient norm is not read."""
    return StepResult(float(loss), math.nan, skipped=False)


def _set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class _Layer(nn.Module):
    """One layer of megaspeed's model with its initial weights, or a module of this layer."""

    def __init__(self, run: Run, index: int, module: str = "") -> None:
        super().__init__()
        gpt = GPT(
            run.config.model,
            chunks=[range(index, index + 1)],
            seed=run.config.training.seed,
            recomputation=run.config.parallel.activation_checkpointing,
        )
        initialize(gpt, run.config.model, run.config.training.seed)
        self.layer = gpt.get_submodule(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _Block(_Layer):
    """A transformer block. DeepSpeed finds it by its name, and gives each stage as many."""


class _Positions(_Layer):
    """The learned positions, which are added to the token embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.arange(x.shape[1], device=x.device))


def _tied_head(tokens: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, tokens.get_parameter("layer.weight"))


def _pipeline_layers(run: Run) -> list[Any]:
    """Describe the layers for DeepSpeed. A tied weight is in a module that both ends have."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    model = run.config.model
    last = layer_count(model) - 1
    blocks = [LayerSpec(_Block, run, index) for index in range(1, last)]
    if not model.tie_word_embeddings:
        return [LayerSpec(_Layer, run, 0), *blocks, LayerSpec(_Layer, run, last)]
    arguments = "tokens", _Layer, run, 0, "embedding.tokens"
    tied = functools.partial(TiedLayerSpec, *arguments, tied_weight_attr="layer.weight")
    positions = [LayerSpec(_Positions, run, 0, "embedding.positions")]
    norm = LayerSpec(_Layer, run, last, "head.norm")
    between = positions if model.positions == "learned" else []
    return [tied(), *between, *blocks, norm, tied(forward_fn=_tied_head)]


def _prepare_deepspeed() -> None:
    """Turn off what costs time on this machine, but is no part of the method.

    An extension that only inference uses would be compiled, and on a CPU, each step would start
    ten `numactl` processes.
    """
    from megaspeed.zero.workarounds import (
        declare_no_compiled_ops,
        hide_announced_renames,
        import_muon_uncompiled,
    )

    declare_no_compiled_ops()
    hide_announced_renames()
    import_muon_uncompiled()
    import deepspeed
    from deepspeed.utils import numa

    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    deepspeed.init_distributed()


def _deepspeed_engine(
    run: Run, model: nn.Module, settings: Settings | None
) -> tuple[Any, torch.optim.AdamW]:
    import deepspeed

    params = run.config.optimizer.params
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": params.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
        fused=True,
    )
    config = deepspeed_json(run, settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def deepspeed_json(run: Run, settings: Settings | None) -> dict[str, Any]:
    """Return the run's stage, batch and dtypes, with DeepSpeed's defaults or transformers' guide.

    Source: https://huggingface.co/docs/transformers/deepspeed, "ZeRO configuration", whose "auto"
    values follow from the hidden size. Logs and timers that wait for the device are off.
    """
    hidden = run.config.model.hidden_size
    values = run.config.deepspeed_json()
    zero: dict[str, Any] = {"stage": run.zero_stage}
    if settings == "guide":
        zero |= {
            "overlap_comm": run.zero_stage > 0,
            "contiguous_gradients": True,
            "reduce_bucket_size": hidden * hidden,
        }
    if settings == "guide" and run.zero_stage == 3:
        zero |= {
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
    return {
        **{key: values[key] for key in _KEYS_OF_THE_RUN if key in values},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000_000,
        "timers": {"throughput": {"enabled": False}},
    }
