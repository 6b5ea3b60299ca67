"""Resolves a config for one world size: replaces "auto" and computes all derived numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaspeed.config.batch import Batch, StatedBatch, layout_in, solve_batch
from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.launch_rules import LAUNCH_RULES
from megaspeed.config.model import ModelConfig
from megaspeed.config.parallel import World
from megaspeed.config.rules import (
    LEARNING_RATE_RULES,
    NUMERIC_RULES,
    SOURCE_RULES,
    Launch,
    apply_rules,
)
from megaspeed.config.run import OptimizerConfig, RunConfig
from megaspeed.config.scheduler import (
    DecayParams,
    SchedulerConfig,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from megaspeed.config.shape_rules import SHAPE_RULES
from megaspeed.config.training import TrainingConfig
from megaspeed.config.zero_optimization import ZeroConfig
from megaspeed.topology.grid import Grid

GradientReduction = Literal["per_step", "per_micro_batch"]
Precision = Literal["fp32", "bf16", "fp16"]

_PATHS = {
    "data": ("train", "validation", "tokenizer"),
    "model": ("from_hf",),
    "training": ("run_dir",),
}


@dataclass(frozen=True)
class Run:
    """One run on one number of processes.

    `config` is definite: `parallel.data` is a number, the batch keys are all stated,
    `parallel.gradient_reduction` is not "auto", `training.run_dir` is a path, and ZeRO's portions
    and the scheduler's numbers that follow from other sections are filled in. Learning rates are
    scaled for the batch.
    """

    config: RunConfig
    name: str
    grid: Grid
    batch: Batch
    gradient_reduction: GradientReduction
    precision: Precision
    spare_ranks: int = 0
    """Number of processes that the grid does not use."""

    def as_json(self) -> dict[str, Any]:
        """The definite config as JSON values; a file of them gives the same run again."""
        return self.config.to_json()

    def common_json(self) -> dict[str, Any]:
        """The part of `as_json` that is the same on all ranks of a run. Paths may differ between
        nodes; what is found there is compared by its contents.
        """
        values = self.as_json()
        for section, keys in _PATHS.items():
            for key in keys:
                values[section].pop(key, None)
        return values

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return self.config.zero_optimization.stage

    @property
    def accumulation_dtype(self) -> Precision:
        """The type in which gradients are summed over micro-batches."""
        return self.config.data_types.grad_accum_dtype

    @property
    def run_dir(self) -> Path:
        """The folder the run writes to."""
        return Path(self.config.training.run_dir or default_run_dir(self.name))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all ranks."""
        return self.batch.train_batch_size * self.config.data.sequence_length


def default_run_dir(name: str) -> str:
    """The run folder if the JSON does not state one."""
    return f"runs/{name}"


def config_problems(config: RunConfig, broken: frozenset[KeyPath] = frozenset()) -> list[Problem]:
    """Problems that do not depend on the processes."""
    rules = (*SHAPE_RULES, *NUMERIC_RULES, *LEARNING_RATE_RULES, *SOURCE_RULES)
    return apply_rules(rules, config, broken)


def launch_problems(
    config: RunConfig, world: World, broken: frozenset[KeyPath] = frozenset()
) -> list[Problem]:
    """Problems of this config with this number and kind of processes."""
    return apply_rules(LAUNCH_RULES, Launch(config, world), broken)


def resolve_run(
    config: RunConfig, *, name: str, world_size: int, world_source: str, device_type: str = "cpu"
) -> Run:
    """Compute everything that depends on the number of processes.

    Args:
        config: a config that may have "auto".
        name: the run's name, which is the stem of its config file.
        world_size: number of processes.
        world_source: where that number comes from, for errors.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: with all problems, including those that do not depend on the processes.
    """
    world = World(world_size, world_source, device_type)
    problems = [*config_problems(config), *launch_problems(config, world)]
    if problems:
        raise ConfigError([problem.message for problem in problems], where=name)
    return definite_run(config, name, world)


def definite_run(config: RunConfig, name: str, world: World) -> Run:
    """The run of a config that has no problems in this world."""
    grid = layout_in(config, world)
    assert grid is not None, "the launch rules checked that the degrees multiply"
    batch = solve_batch(StatedBatch.of(config), grid.dp)
    assert batch is not None, "the launch rules checked that the batch multiplies"
    reduction = _gradient_reduction(config)
    scaling = config.training.lr_factor(batch.train_batch_size)
    definite = config.model_copy(
        update={
            "train_batch_size": batch.train_batch_size,
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
            "parallel": config.parallel.model_copy(
                update={"data": grid.dp, "gradient_reduction": reduction}
            ),
            "training": _definite_training(config, name, batch),
            "optimizer": _definite_optimizer(config, scaling),
            "scheduler": _definite_scheduler(config, scaling),
            "zero_optimization": definite_zero(config.zero_optimization, config.model, grid.tp),
        }
    )
    spare = world.size - grid.world_size
    return Run(definite, name, grid, batch, reduction, _precision(config), spare)


def _gradient_reduction(config: RunConfig) -> GradientReduction:
    """auto follows the ZeRO stage: 2 and 3 partition gradients, 0 and 1 do not."""
    stated = config.parallel.gradient_reduction
    if stated != "auto":
        return stated
    return "per_step" if config.zero_optimization.stage < 2 else "per_micro_batch"


def _precision(config: RunConfig) -> Precision:
    if config.bf16.enabled:
        return "bf16"
    return "fp16" if config.fp16.enabled else "fp32"


def _definite_training(config: RunConfig, name: str, batch: Batch) -> TrainingConfig:
    """Adds the run folder, and the run's batch as the base, so rates are not scaled twice."""
    update: dict[str, object] = {"run_dir": config.training.run_dir or default_run_dir(name)}
    if config.training.lr_scaling != "none":
        update["base_batch_size"] = batch.train_batch_size
    return config.training.model_copy(update=update)


def _definite_optimizer(config: RunConfig, scaling: float) -> OptimizerConfig:
    params = config.optimizer.params
    scaled = params.model_copy(update={"lr": params.lr * scaling})
    return config.optimizer.model_copy(update={"params": scaled})


def _definite_scheduler(config: RunConfig, scaling: float) -> SchedulerConfig | None:
    scheduler = config.scheduler
    if scheduler is None:
        return None
    update: dict[str, object] = {}
    params = scheduler.params
    if isinstance(params, WarmupLRParams):
        highest = params.warmup_max_lr or config.optimizer.params.lr
        update["warmup_max_lr"] = highest * scaling
        update["warmup_min_lr"] = params.warmup_min_lr * scaling
    if isinstance(params, DecayParams | WarmupDecayLRParams | WarmupCosineLRParams):
        update["total_num_steps"] = params.total_num_steps or config.training.steps
    return scheduler.model_copy(update={"params": params.model_copy(update=update)})


# The cost of dropout. GPT-2's own configuration enables it, often unnoticed.

_DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")


_FP32_BYTES, _MIB = 4, 2**20


def dropout_warning(run: Run) -> Iterator[str]:
    """A warning with the rates, the cost and a fix; nothing for a model without dropout."""
    model = run.config.model
    rates = {name: getattr(model, name) for name in _DROPOUTS if getattr(model, name) > 0.0}
    if not rates:
        return
    stated = ", ".join(f"model.{name} {rate:g}" for name, rate in rates.items())
    cost = "each mask is computed again in backward"
    if model.attention_dropout > 0.0:
        elements = (
            run.batch.micro_batch_size
            * (model.num_attention_heads // run.grid.tp)
            * run.config.data.sequence_length**2
        )
        element_bytes = _FP32_BYTES if run.precision == "fp32" else 2
        cost = (
            "attention runs without its fused kernel and keeps two S x S matrices of each head "
            f"({elements * (_FP32_BYTES + element_bytes) / _MIB:,.1f} MiB for each block and "
            "micro-batch)"
        )
    mend = " ".join(f"model.{name}=0" for name in rates)
    yield f"the model has dropout ({stated}), so {cost}; to train without it, --set {mend}"


# ZeRO's portions if the JSON omits them: they follow the size of the model.
#
# DeepSpeed's fixed defaults (5e8 elements a bucket, parameters under 1e5 elements kept whole) suit
# one size of model. With a smaller model a bucket holds the complete gradient, every parameter is
# kept, and a higher stage saves nothing. Here
#
#     reduce_bucket_size                    one block, 12 hidden_size^2 / tp
#     stage3_param_persistence_threshold    10 x hidden_size: norms and biases stay whole

_MATRICES = 12
"""Squares of the hidden size in a block: 4 in the attention, about 8 in the feed-forward layer."""


_HIDDEN_SIZES_THAT_STAY_WHOLE = 10


def definite_zero(zero: ZeroConfig, model: ModelConfig, tp: int) -> ZeroConfig:
    """``zero`` with every portion stated."""
    portions = {
        "reduce_bucket_size": _MATRICES * model.hidden_size**2 // tp,
        "stage3_param_persistence_threshold": _HIDDEN_SIZES_THAT_STAY_WHOLE * model.hidden_size,
    }
    return zero.model_copy(
        update={name: value for name, value in portions.items() if getattr(zero, name) is None}
    )
