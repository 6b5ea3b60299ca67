"""What a checkpoint knows of its run beside the tensors: ``run_state.json``.

Nothing in it belongs to a rank. Random numbers are functions of seeds, names and sample indices
(``model.initialization``, ``model.dropout``, ``data.sampler``), and the learning rate is one
of the number of steps taken, so seeds and counters are the whole of these states.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.tensors import KINDS, WEIGHTS
from megaspeed.config.model import ModelConfig
from megaspeed.config.section import Section
from megaspeed.files.reading import read_whole

RUN_STATE = "run_state.json"

NOT_STATED = "not stated"
"""In the place of a tokenizer's fingerprint: the token files are of programs that tell none."""


class Progress(Section):
    """How far a run has come."""

    step: int = Field(default=0, ge=0, description="Optimizer steps, skipped ones included.")
    steps_taken: int = Field(default=0, ge=0, description="Optimizer steps that were not skipped.")
    skipped_in_a_row: int = Field(default=0, ge=0, description="Steps skipped at the end.")
    samples: int = Field(default=0, ge=0, description="Samples of the training stream consumed.")
    tokens: int = Field(default=0, ge=0, description="Tokens predicted.")
    loss: float | None = Field(
        default=None, description="Of the last step, nats; null where it was not finite."
    )


class Layout(Section):
    """Over which ranks the run was split when it was saved."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    schedule: str
    sequence_parallel: bool
    precision: str

    def __str__(self) -> str:
        return (
            f"pp {self.pp} x dp {self.dp} x tp {self.tp}, ZeRO-{self.zero_stage}, {self.precision}"
        )


class DataIdentity(Section):
    """What the training stream is a function of, beside the sample index (law 2)."""

    corpus: str = Field(description="Fingerprint of the training documents.")
    tokenizer: str = Field(description="Fingerprint of the tokenizer, or NOT_STATED.")
    sequence_length: int
    seed: int = Field(description="data.seed")


class LossScale(Section):
    """fp16's dynamic loss scale (Micikevicius et al. 2018), as DeepSpeed counts it."""

    scale: float
    iteration: int
    last_overflow_iteration: int
    hysteresis: int


class RunState(Section):
    """One checkpoint's run; an imported model has none behind it, and no moments."""

    format: Literal[1] = 1
    imported_from: str | None = Field(
        default=None, description="Where the weights are from, if no run saved them."
    )
    progress: Progress
    data: DataIdentity | None = Field(default=None, description="null if imported.")
    training_seed: int | None = Field(
        default=None,
        description="training.seed, of which dropout masks are a function; null if imported.",
    )
    layout: Layout | None = Field(default=None, description="null if imported.")
    loss_scale: LossScale | None = Field(default=None, description="null unless fp16 scales.")
    config: dict[str, Any] = Field(
        description="The definite configuration of the run; if imported, the model section alone."
    )
    software: dict[str, str] = Field(description="Version of each package that matters.")

    @model_validator(mode="after")
    def _is_of_a_run_or_imported(self) -> Self:
        of_a_run = (self.data, self.training_seed, self.layout)
        if self.imported_from is None and None in of_a_run:
            raise ValueError("data, training_seed and layout of the run that saved it are missing")
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which tensors of each parameter the checkpoint has."""
        return KINDS if self.imported_from is None else (WEIGHTS,)

    @property
    def origin(self) -> str:
        """Where the checkpoint is from, in a few words."""
        if self.imported_from is not None:
            return f"imported from {self.imported_from}"
        return f"saved at {self.layout}"

    def model_section(self) -> ModelConfig:
        """The model. Tensors follow from it alone; how the run was split and trained is no matter.

        Raises:
            CheckpointError: the configuration names none.
        """
        try:
            return ModelConfig.model_validate(self.config.get("model"))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, ("config", "model", *problem["loc"])))
            raise CheckpointError(
                f"{RUN_STATE} names no model: {where}: {problem['msg']}"
            ) from error

    def to_bytes(self) -> bytes:
        """What stands in the file."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of the checkpoint in ``folder``.

        Raises:
            CheckpointError: there is none, or it is not one.
        """
        file = folder / RUN_STATE
        try:
            return cls.model_validate_json(read_whole(file))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "the file"
            raise CheckpointError(
                f"{file} is not the state of a run: {where}: {problem['msg']}"
            ) from error
