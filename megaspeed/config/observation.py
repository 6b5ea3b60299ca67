"""DeepSpeed's ways to look at a run: communication log, FLOPs profiler, monitors."""

from typing import Literal

from pydantic import Field

from megaspeed.config.section import Section


class CommsLoggerConfig(Section):
    """Log of DeepSpeed's collectives."""

    enabled: bool = Field(default=False, description="Record DeepSpeed's collectives.")
    prof_all: bool = Field(default=True, description="Record every operation.")
    prof_ops: tuple[str, ...] = Field(
        default=(), strict=False, description="Operations to record where prof_all is false."
    )
    verbose: bool = Field(default=False, description="A log line for every operation.")
    debug: bool = Field(default=False, description="Name the calling function in the log.")


class FlopsProfilerConfig(Section):
    """DeepSpeed's FLOPs profiler: one forward pass of pipeline stage 0."""

    enabled: bool = Field(default=False, description="Profile one step.")
    recompute_fwd_factor: float = Field(
        default=0.0, ge=0, description="Share of the forward FLOPs that recomputation adds."
    )
    profile_step: int = Field(default=1, gt=0, description="Step that is profiled.")
    module_depth: int = Field(default=-1, ge=-1, description="Depth reported; -1: the deepest.")
    top_modules: int = Field(default=1, gt=0, description="Modules listed for each depth.")
    detailed: bool = Field(default=True, description="Print the profile of each module.")
    output_file: str | None = Field(
        default=None, min_length=1, description="File to write to. Left out: the console."
    )


class TensorBoardConfig(Section):
    """TensorBoard monitor."""

    enabled: bool = Field(default=False, description="Write TensorBoard events.")
    output_path: str = Field(default="", description="Folder of the logs; empty: a default one.")
    job_name: str = Field(default="DeepSpeedJobName", description="Folder within output_path.")


class CsvMonitorConfig(Section):
    """CSV monitor."""

    enabled: bool = Field(default=False, description="Write CSV files.")
    output_path: str = Field(default="", description="Folder of the files; empty: a default one.")
    job_name: str = Field(default="DeepSpeedJobName", description="Folder within output_path.")


class WandbConfig(Section):
    """Weights & Biases monitor."""

    enabled: bool = Field(default=False, description="Send events to Weights & Biases.")
    group: str | None = Field(default=None, description="Group of the run.")
    team: str | None = Field(default=None, description="Team of the run.")
    project: str = Field(default="deepspeed", description="Project of the run.")


class CometConfig(Section):
    """Comet monitor."""

    enabled: bool = Field(default=False, description="Send events to Comet.")
    samples_log_interval: int = Field(
        default=100, gt=0, description="Samples between two submissions."
    )
    project: str | None = Field(default=None, description="Project of the experiment.")
    workspace: str | None = Field(default=None, description="Workspace of the experiment.")
    api_key: str | None = Field(
        default=None, description="Key of the service; better left to COMET_API_KEY."
    )
    experiment_name: str | None = Field(default=None, description="Name of the experiment.")
    experiment_key: str | None = Field(
        default=None, description="Key of the experiment, 32 to 50 letters and digits."
    )
    online: bool | None = Field(
        default=None, description="Send to the server (true) or store here (false)."
    )
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        default=None, description="Continue an experiment, start one, or whichever is needed."
    )
