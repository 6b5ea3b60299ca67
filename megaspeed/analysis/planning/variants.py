"""The same training under other settings: what a plan compares, and how to type the difference.

    Training (the file as it is stated, and the run that it gives)
        .under(settings)       -> Run      the same samples a step, other degrees, ZeRO stage, ...
        .set_text(settings)    -> what to type after --set to get it from the file

Model, data, optimizer and ``train_batch_size`` stay; the number of micro-batches follows. A variant
is made from what the file states, so that what it leaves open follows from the variant itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may differ between two ways to do the same training."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: Literal["none", "full"]
    sequence_parallel: bool
    schedule: Literal["gpipe", "1f1b"]
    gradient_reduction: Literal["auto", "per_step", "per_micro_batch"]

    @property
    def world_size(self) -> int:
        """Ranks that these degrees need."""
        return self.pp * self.dp * self.tp


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is to be planned.

    Attributes:
        stated: the configuration as the file and the command line have it; it may say "auto".
        run: what it gives on the planned number of ranks.
    """

    stated: RunConfig
    run: Run

    @classmethod
    def of(cls, stated: RunConfig, *, name: str, world_size: int) -> "Training":
        """The training of a configuration on GPUs.

        Raises:
            ConfigError: where it cannot run on so many ranks.
        """
        return cls(stated=stated, run=_resolved(stated, name, world_size))

    @property
    def settings(self) -> Settings:
        """Those of the run; a gradient reduction that is left open stays open."""
        run, parallel = self.run, self.run.config.parallel
        return Settings(
            pp=run.grid.pp,
            dp=run.grid.dp,
            tp=run.grid.tp,
            zero_stage=run.zero_stage,
            micro_batch_size=run.batch.micro_batch_size,
            activation_checkpointing=parallel.activation_checkpointing,
            sequence_parallel=parallel.sequence_parallel,
            schedule=parallel.schedule,
            gradient_reduction=self.stated.parallel.gradient_reduction,
        )

    def under(self, settings: Settings) -> Run:
        """The same training under these settings.

        Raises:
            ConfigError: with every law of the configuration that the settings break.
        """
        keys = {
            **_layout_keys(settings),
            "parallel.data": settings.dp,
            "train_batch_size": self.run.batch.train_batch_size,
            "train_micro_batch_size_per_gpu": settings.micro_batch_size,
            "gradient_accumulation_steps": None,
        }
        return _resolved(_with_keys(self.stated, keys), self.run.name, settings.world_size)

    def set_text(self, settings: Settings) -> tuple[str, ...]:
        """What to type after ``--set`` so that the file gives the run of these settings.

        Raises:
            ConfigError: where the settings break a law of the configuration.
        """
        wanted = self.under(settings)
        before, after = _layout_keys(self.settings), _layout_keys(settings)
        changed = {key: value for key, value in after.items() if value != before[key]}
        if self.stated.parallel.data not in ("auto", settings.dp):
            changed["parallel.data"] = settings.dp
        for batch_keys in _batch_keys(wanted):
            keys = {**changed, **batch_keys}
            if self._gives(wanted, keys):
                return tuple(f"{key}={_typed(value)}" for key, value in keys.items())
        raise AssertionError("all three numbers of the batch together always give it")

    def _gives(self, wanted: Run, keys: Mapping[str, Any]) -> bool:
        config = _with_keys(self.stated, keys)
        try:
            run = _resolved(config, self.run.name, wanted.grid.world_size)
        except ConfigError:
            return False
        return run.batch == wanted.batch


def _layout_keys(settings: Settings) -> dict[str, Any]:
    return {
        "parallel.pipeline": settings.pp,
        "parallel.tensor": settings.tp,
        "parallel.sequence_parallel": settings.sequence_parallel,
        "parallel.schedule": settings.schedule,
        "parallel.activation_checkpointing": settings.activation_checkpointing,
        "parallel.gradient_reduction": settings.gradient_reduction,
        "zero_optimization.stage": settings.zero_stage,
    }


def _batch_keys(run: Run) -> Iterator[dict[str, int]]:
    """Ways to state the batch, the shortest first: which is enough depends on the file."""
    batch = run.batch
    train = {"train_batch_size": batch.train_batch_size}
    micro = {"train_micro_batch_size_per_gpu": batch.micro_batch_size}
    accumulation = {"gradient_accumulation_steps": batch.gradient_accumulation_steps}
    yield from ({}, micro, accumulation, train, {**micro, **accumulation})
    yield {**train, **micro, **accumulation}


def _with_keys(config: RunConfig, keys: Mapping[str, Any]) -> RunConfig:
    """The config with these dotted keys replaced; its laws are checked when it is resolved."""
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[name] = value
    for section, update in sections.items():
        top[section] = getattr(config, section).model_copy(update=update)
    return config.model_copy(update=top)


def _resolved(config: RunConfig, name: str, world_size: int) -> Run:
    """For GPUs, whatever machine plans it."""
    return resolve_run(
        config, name=name, world_size=world_size, world_source="the plan", device_type="cuda"
    )


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
