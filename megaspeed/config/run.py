"""A whole run as one immutable object: our four sections and DeepSpeed's keys."""

from typing import Any

from pydantic import Field

from megaspeed.config.data import DataConfig
from megaspeed.config.deepspeed import DeepSpeedKeys
from megaspeed.config.model import ModelConfig
from megaspeed.config.parallel import ParallelConfig
from megaspeed.config.training import TrainingConfig


class RunConfig(DeepSpeedKeys):
    """One JSON file. What depends on the number of processes may still be "auto"."""

    model: ModelConfig = Field(description="The shape of the model.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How the ranks share the work."
    )
    data: DataConfig = Field(description="The corpus and how it is cut into samples.")
    training: TrainingConfig = Field(
        description="The length of the run, what it reports and what it keeps."
    )

    def to_json(self) -> dict[str, Any]:
        """The config as JSON values, every default written out; it loads back to an equal one."""
        return self.model_dump(mode="json", exclude_none=True)

    def deepspeed_json(self) -> dict[str, Any]:
        """DeepSpeed's keys alone, as JSON values: what its `initialize` may be given.

        Keys that are left to DeepSpeed or to the caller (null here) are left out.
        """
        return self.model_dump(
            mode="json", exclude_none=True, include=set(DeepSpeedKeys.model_fields)
        )
