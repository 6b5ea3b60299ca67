"""What a checkpoint knows of its run beside the tensors: ``run_state.json``.

Nothing in it belongs to a rank. Random numbers are functions of seeds, names and sample indices
(``model.initialization``, ``model.dropout``, ``data.sampler``), and the learning rate is one of the
number of steps taken, so seeds and counters are the whole of these states.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.config.section import Section

RUN_STATE = "run_state.json"


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
    tokenizer: str = Field(description="Fingerprint of the tokenizer.")
    sequence_length: int
    seed: int = Field(description="data.seed")


class LossScale(Section):
    """fp16's dynamic loss scale (Micikevicius et al. 2018), as DeepSpeed counts it."""

    scale: float
    iteration: int
    last_overflow_iteration: int
    hysteresis: int


class RunState(Section):
    """One checkpoint's run."""

    format: Literal[1] = 1
    progress: Progress
    data: DataIdentity
    training_seed: int = Field(description="training.seed, of which dropout masks are a function.")
    layout: Layout
    loss_scale: LossScale | None = Field(default=None, description="null unless fp16 scales.")
    config: dict[str, Any] = Field(description="The definite configuration of the run.")
    software: dict[str, str] = Field(description="Version of each package that matters.")

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
            return cls.model_validate_json(file.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "the file"
            raise CheckpointError(
                f"{file} is not the state of a run: {where}: {problem['msg']}"
            ) from error
