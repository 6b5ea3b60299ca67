"""The state of a run in a checkpoint beside the tensors: ``run_state.json``.

Nothing in it depends on a rank. Random numbers are functions of seeds, names and sample indices
(``model.initialization``, ``model.dropout``, ``data.sampler``), and the learning rate is a
function of the number of steps taken. So seeds and counters are their complete state.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.tensors import compression_tensors
from megaspeed.config.batch_schedule import BatchSchedule
from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Compression
from megaspeed.config.section import Section
from megaspeed.files.paths import read_file
from megaspeed.model.parameters import Shape
from megaspeed.topology.grid import Grid

RUN_STATE = "run_state.json"

_COMPRESSION: TypeAdapter[Compression] = TypeAdapter(
    Annotated[Compression, Field(discriminator="type")]
)

NOT_STATED = "not stated"
"""Replaces a tokenizer's fingerprint if the token files do not contain one."""


class Progress(Section):
    """The counters of a run."""

    step: NonNegativeInt = 0  # optimizer steps, skipped ones included
    steps_taken: NonNegativeInt = 0  # optimizer steps that were not skipped
    skipped_in_a_row: NonNegativeInt = 0  # how many of the last steps were skipped
    samples: NonNegativeInt = 0  # samples used
    tokens: NonNegativeInt = 0  # tokens predicted
    loss: float | None = None  # of the last step, in nats; None if it was not finite
    # loss and gradient norm of each of the last steps, the newest last; see ``training.spikes``
    recent: tuple[tuple[float, float], ...] = ()

    def last_step(self, config: Mapping[str, Any]) -> int:
        """The last step of a run that continues from here with this resolved configuration.

        With training.tokens, the tokens trained so far count, whatever their batch was."""
        if (tokens := config["training"].get("tokens")) is None:
            return int(config["training"]["steps"])
        stated, batch = config.get("train_batch_size_schedule"), config["train_batch_size"]
        length, schedule = config["data"]["sequence_length"], BatchSchedule.of(stated, batch)
        rest = schedule.stretches(length, step=self.step, tokens=self.tokens, all_tokens=tokens)
        return self.step + sum(stretch.steps for stretch in rest)


class Layout(Section):
    """The layout of the run when it was saved."""

    pp: int
    dp: int
    tp: int
    replicate: int = 1
    cp: int = 1
    ep: int | None = None
    expert_shard: int = 1
    zero_stage: int
    schedule: str
    sequence_parallel: bool
    precision: str

    @model_validator(mode="after")
    def _is_a_grid(self) -> Self:
        _ = self.grid  # Grid raises a ValueError
        return self

    @property
    def grid(self) -> Grid:
        return Grid(self.pp, self.dp, self.tp, self.replicate, self.cp, self.ep, self.expert_shard)

    def __str__(self) -> str:
        without_replicas = replace(self.grid, replicate=1)
        return f"{without_replicas}, ZeRO-{self.zero_stage}, {self.precision}"


class DataIdentity(Section):
    """The training stream is a function of these values and of the sample index."""

    corpus: str  # fingerprint of the training documents
    tokenizer: str  # fingerprint of the tokenizer, or NOT_STATED
    sequence_length: int
    seed: int  # data.seed


class LossScale(Section):
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018), with DeepSpeed's counters."""

    scale: float
    iteration: int
    last_overflow_iteration: int
    hysteresis: int


class RunState(Section):
    """The state of a run, or of an imported model, which has no run and no optimizer state."""

    format: Literal[1] = 1
    imported_from: str | None = None  # the source of an imported model; None for a run
    progress: Progress
    data: DataIdentity | None = None  # None if imported
    training_seed: int | None = None  # training.seed, which determines dropout; None if imported
    layout: Layout | None = None  # None if imported
    loss_scale: LossScale | None = None  # None if the loss is not scaled
    config: dict[str, Any]  # the resolved configuration; if imported, only the model section
    software: dict[str, str]  # versions of packages

    @model_validator(mode="after")
    def _is_of_a_run_or_imported(self) -> Self:
        of_a_run = (self.data, self.training_seed, self.layout)
        if self.imported_from is None and None in of_a_run:
            raise ValueError("data, training_seed and layout of the run that saved it are missing")
        return self

    @property
    def optimizer(self) -> str | None:
        """The ``optimizer.type`` of the run, AdamW if it is not stated; None if imported.

        Adam means AdamW."""
        optimizer = self.config.get("optimizer")
        stated = optimizer.get("type") if isinstance(optimizer, dict) else None
        return None if self.imported_from is not None else stated or "AdamW"

    def compression_tensors(self, model: ModelConfig) -> dict[str, Shape]:
        """Name -> shape of the tensors that compressed gradients add to the checkpoint.

        Raises CheckpointError if the configuration names no valid compression.
        """
        parallel = self.config.get("parallel")
        stated = parallel.get("gradient_compression") if isinstance(parallel, dict) else None
        if self.layout is None or not isinstance(stated, dict):
            return {}
        try:
            compression = _COMPRESSION.validate_python(stated)
        except ValidationError as error:
            raise _invalid(RUN_STATE, "parallel.gradient_compression", error) from error
        return compression_tensors(model, compression, self.layout.grid)

    @property
    def origin(self) -> str:
        """Where the checkpoint comes from, for messages."""
        if self.imported_from is not None:
            return f"imported from {self.imported_from}"
        return f"saved at {self.layout}"

    def model_section(self) -> ModelConfig:
        """The model, which determines the names and shapes of all tensors.

        Raises CheckpointError if the configuration has no valid model.
        """
        try:
            return ModelConfig.model_validate(self.config.get("model"))
        except ValidationError as error:
            raise _invalid(RUN_STATE, "config.model", error) from error

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the state of the checkpoint in ``folder``.

        Raises CheckpointError if the file cannot be read, or is not the state of a run.
        """
        file = folder / RUN_STATE
        try:
            return cls.model_validate_json(read_file(file))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            raise _invalid(file, "state of a run", error) from error


def _invalid(file: Path | str, what: str, error: ValidationError) -> CheckpointError:
    problem = error.errors()[0]
    where = "".join(f"{place}: " for place in problem["loc"])
    return CheckpointError(f"{file} has no valid {what}: {where}{problem['msg']}")
