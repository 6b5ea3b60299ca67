"""One training step of each peer, with its defaults and as its guide recommends.

    peer                 model               engine
    plain                megaspeed's         torch alone: what a step takes without communication
    hf-deepspeed         transformers'       deepspeed.initialize, with the run's ZeRO stage
    fsdp2                megaspeed's         torch's fully_shard on each layer
    ddp                  megaspeed's         torch's DistributedDataParallel
    deepspeed-pipeline   megaspeed's layers  deepspeed.pipe.PipelineModule, with the run's stages

All train on the run's samples, with its micro-batches, dtype, clipping and torch's fused AdamW.
megaspeed's models start from the run's initial weights. transformers' model draws its own.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.resolve import Run
from megaspeed.measurement.compare.baselines import Ddp, Fsdp2, Plain
from megaspeed.model.gpt import DTYPES, GPT
from megaspeed.model.initialization import initialize
from megaspeed.model.parameters import layer_count
from megaspeed.topology.context import ParallelContext
from megaspeed.training.rank_model import parameter_groups, set_matmul_precision
from megaspeed.training.worker import Load

PeerName = Literal["plain", "hf-deepspeed", "fsdp2", "ddp", "deepspeed-pipeline"]
Settings = Literal["defaults", "guide"]

Step = Callable[[Load, float], Tensor]
"""Trains on micro-batches, at a learning rate. Returns this rank's mean loss, on the device."""

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


def make_step(
    peer: PeerName, settings: Settings | None, run: Run, context: ParallelContext
) -> Step:
    """Builds the peer's model and engine. A collective."""
    set_matmul_precision(run.config.training, context.device)
    torch.manual_seed(run.config.training.seed)
    return _PEERS[peer](run, context, settings)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of a micro-batch: logits (B, S, V) and targets (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _adamw(groups: list[dict[str, Any]], run: Run) -> torch.optim.AdamW:
    params = run.config.optimizer.params
    return torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True)


def _set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _torch_step(engine: Plain | Fsdp2, run: Run) -> Step:
    """The loop of torch's tutorials: gradients are reduced in the last micro-batch of a step, or
    in each one if FSDP2's are and the run is configured so.
    """
    parameters = dict(engine.model.named_parameters())
    optimizer = _adamw(parameter_groups(parameters, run.config.model, run.config.optimizer), run)
    micro_batches = run.batch.gradient_accumulation_steps

    def step(load: Load, learning_rate: float) -> Tensor:
        losses = []
        for m in range(micro_batches):
            batch = load(m)
            with engine.micro_batch(last=m == micro_batches - 1):
                loss = _loss(engine.forward(batch), batch.targets) / micro_batches
                loss.backward()
            losses.append(loss.detach())
        if run.config.gradient_clipping:
            nn.utils.clip_grad_norm_(parameters.values(), run.config.gradient_clipping)
        _set_rate(optimizer, learning_rate)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def _hf_deepspeed(run: Run, context: ParallelContext, settings: Settings | None) -> Step:
    """A user's loop over ``deepspeed.initialize(AutoModelForCausalLM)``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **hugging_face_config(run.config.model), **_NO_SPECIAL_TOKENS, use_cache=False
    )
    with context.device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[run.precision])
    if run.config.parallel.activation_checkpointing == "full":
        model.gradient_checkpointing_enable()
    engine, optimizer = _deepspeed_engine(run, model, settings)
    engine.train()

    def step(load: Load, learning_rate: float) -> Tensor:
        _set_rate(optimizer, learning_rate)
        losses = []
        for m in range(run.batch.gradient_accumulation_steps):
            batch = load(m)
            loss = _loss(engine(batch.tokens).logits, batch.targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def _deepspeed_pipeline(run: Run, context: ParallelContext, settings: Settings | None) -> Step:
    """The loop of DeepSpeed's pipeline tutorial: ``train_batch`` over an iterator."""
    _prepare_deepspeed()
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(
        _pipeline_layers(run),
        num_stages=run.grid.pp,
        loss_fn=_loss,
        partition_method="type:_Block",
        activation_checkpoint_interval=0,  # the blocks do it themselves
    )
    engine, optimizer = _deepspeed_engine(run, model, settings)

    def micro_batches(load: Load) -> Iterator[tuple[Tensor, Tensor]]:
        for m in range(run.batch.gradient_accumulation_steps):
            batch = load(m)
            yield batch.tokens, batch.targets

    def step(load: Load, learning_rate: float) -> Tensor:
        _set_rate(optimizer, learning_rate)
        loss: Tensor = engine.train_batch(data_iter=micro_batches(load))
        return loss

    return step


class _Layer(nn.Module):
    """One layer of megaspeed's model with its initial weights, or a module of this layer."""

    def __init__(self, run: Run, index: int, module: str = "") -> None:
        super().__init__()
        gpt = GPT(
            run.config.model,
            layers=range(index, index + 1),
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
    """DeepSpeed's description of the layers. A tied weight is in a module that both ends have."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    model = run.config.model
    last = layer_count(model) - 1
    blocks = [LayerSpec(_Block, run, index) for index in range(1, last)]
    if not model.tie_word_embeddings:
        return [LayerSpec(_Layer, run, 0), *blocks, LayerSpec(_Layer, run, last)]
    tied = functools.partial(
        TiedLayerSpec,
        *("tokens", _Layer, run, 0, "embedding.tokens"),
        tied_weight_attr="layer.weight",
    )
    positions = [LayerSpec(_Positions, run, 0, "embedding.positions")]
    norm = LayerSpec(_Layer, run, last, "head.norm")
    between = positions if model.positions == "learned" else []
    return [tied(), *between, *blocks, norm, tied(forward_fn=_tied_head)]


def _prepare_deepspeed() -> None:
    """Turns off what costs time on this machine, but is no part of the method.

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
    _prepare_deepspeed()
    import deepspeed

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = run.config.optimizer.params.weight_decay
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = _adamw([group for group in groups if group["params"]], run)
    config = deepspeed_json(run, settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def deepspeed_json(run: Run, settings: Settings | None) -> dict[str, Any]:
    """The run's stage, batch and dtypes, with DeepSpeed's defaults or as transformers' guide says.

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


_Make = Callable[[Run, ParallelContext, Settings | None], Step]
_PEERS: Mapping[PeerName, _Make] = MappingProxyType(
    {
        "plain": lambda run, context, _: _torch_step(Plain(run, context), run),
        "hf-deepspeed": _hf_deepspeed,
        "fsdp2": lambda run, context, settings: _torch_step(
            Fsdp2(run, context, guided=settings == "guide"), run
        ),
        "ddp": lambda run, context, _: _torch_step(Ddp(run, context), run),
        "deepspeed-pipeline": _deepspeed_pipeline,
    }
)
PEERS: tuple[PeerName, ...] = tuple(_PEERS)
WITH_A_GUIDE: tuple[PeerName, ...] = ("hf-deepspeed", "fsdp2")
"""Peers whose guide recommends other settings than their defaults."""
