"""DeepSpeed's tools for observing a run: communication log, FLOPs profiler."""

from pydantic import Field

from megaspeed.config.section import PathText, Section


class CommsLoggerConfig(Section):
    """Log of DeepSpeed's collectives."""

    enabled: bool = Field(default=False, description="Record DeepSpeed's collectives.")
    prof_all: bool = Field(default=True, description="Record every operation.")
    prof_ops: tuple[str, ...] = Field(
        default=(), strict=False, description="Operations to record if prof_all is false."
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
    output_file: PathText | None = Field(
        default=None, description="File to write to. If omitted: the console."
    )
