"""The JSON of a run: read strictly, checked whole, made definite for a number of processes.

    read_config(path)                          -> RunConfig, which may say "auto"
    load_run(path, world_size=8, ...)          -> Run, definite for 8 processes
    check_config(path, world_size=8)           -> every problem, or nothing

A value travels through these files in this order:

    strict_json -> document (extends, --set) -> validation (each key) -> rules (keys together)
        -> resolve (what depends on the number of processes)
"""

from megaspeed.config.batch import Batch
from megaspeed.config.check import check_config
from megaspeed.config.data import BUNDLED_CORPUS, DataConfig
from megaspeed.config.degrees import Degrees, World
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import load_run, parse_config, read_config
from megaspeed.config.model import ModelConfig, RopeScaling
from megaspeed.config.optimizer import AdamParams, OptimizerConfig
from megaspeed.config.parallel import ParallelConfig
from megaspeed.config.presets import PRESETS
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.config.scheduler import (
    SchedulerConfig,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from megaspeed.config.training import TrainingConfig
from megaspeed.config.zero_optimization import ZeroConfig

__all__ = [
    "BUNDLED_CORPUS",
    "PRESETS",
    "AdamParams",
    "Batch",
    "ConfigError",
    "DataConfig",
    "Degrees",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RopeScaling",
    "Run",
    "RunConfig",
    "SchedulerConfig",
    "TrainingConfig",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "World",
    "ZeroConfig",
    "check_config",
    "load_run",
    "parse_config",
    "read_config",
    "resolve_run",
]
