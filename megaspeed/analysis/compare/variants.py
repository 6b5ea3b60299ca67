"""The rows of a comparison: one run, changed in nothing but how its data axis shares memory.

ZeRO-0, ZeRO-1    gradients are reduced once a step, whatever gradient_reduction says
ZeRO-2, ZeRO-3    two rows where a step has several micro-batches: reducing after each of them
                  takes less memory, reducing once takes less traffic
DDP, FSDP2        torch's own; DDP reduces once, FSDP2 has two rows where ZeRO-3 has
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import GradientReduction, Run, resolve_run
from megaspeed.config.run import RunConfig

Baseline = Literal["ddp", "fsdp"]
Engine = Literal["zero", "ddp", "fsdp"]

ZERO_STAGES = (0, 1, 2, 3)
BASELINES: dict[Baseline, str] = {"ddp": "DDP", "fsdp": "FSDP2"}

_Reductions = tuple[GradientReduction | None, ...]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row.

    Attributes:
        label: its name, different for every row.
        engine: what shares memory and sums gradients over the data axis.
        run: what is trained; None where the configuration does not allow it.
        refused: why it is not allowed; None where it is.
    """

    label: str
    engine: Engine
    run: Run | None
    refused: str | None = None


def zero_variants(run: Run, zero_stages: Sequence[int], device_type: str) -> list[Variant]:
    """One variant for each ZeRO stage, or two where ``gradient_reduction`` makes a difference.

    Args:
        run: the layout, the model and the batch, which all variants share.
        zero_stages: of 0, 1, 2, 3.
        device_type: "cpu" or "cuda".
    """
    variants = []
    for stage in sorted(set(zero_stages)):
        zero = run.config.zero_optimization.model_copy(update={"stage": stage})
        config = run.config.model_copy(update={"zero_optimization": zero})
        for reduction in _reductions(run, stage):
            variants.append(_variant(run, config, "zero", f"ZeRO-{stage}", reduction, device_type))
    return variants


def baseline_variants(run: Run, baselines: Sequence[Baseline], device_type: str) -> list[Variant]:
    """The variants of torch's own data parallelism, in the order of ``BASELINES``.

    Raises:
        ConfigError: they cannot do this run's work.
    """
    problems = list(_baseline_problems(run)) if baselines else []
    if problems:
        raise ConfigError(problems, where=f"{run.name} with --baselines {' '.join(baselines)}")
    # DDP keeps whole gradients, so it has nothing to win from reducing more than once.
    reductions: dict[Baseline, _Reductions] = {"ddp": (None,), "fsdp": _reductions(run, 3)}
    return [
        _variant(run, run.config, baseline, label, reduction, device_type)
        for baseline, label in BASELINES.items()
        if baseline in baselines
        for reduction in reductions[baseline]
    ]


def _reductions(run: Run, zero_stage: int) -> _Reductions:
    """The settings that differ at this ZeRO stage; None alone where they do not."""
    several = run.batch.gradient_accumulation_steps > 1 and run.grid.dp > 1
    return ("per_micro_batch", "per_step") if zero_stage >= 2 and several else (None,)


def _variant(
    run: Run,
    config: RunConfig,
    engine: Engine,
    name: str,
    reduction: GradientReduction | None,
    device_type: str,
) -> Variant:
    """``config`` with this reduction; without one it is reduced once, where that is a choice."""
    label = name if reduction is None else f"{name} {reduction}"
    parallel = config.parallel.model_copy(update={"gradient_reduction": reduction or "per_step"})
    try:
        resolved = resolve_run(
            config.model_copy(update={"parallel": parallel}),
            name=run.name,
            world_size=run.grid.world_size,
            world_source="--world-size",
            device_type=device_type,
        )
    except ConfigError as error:
        return Variant(label=label, engine=engine, run=None, refused=" ".join(error.problems))
    return Variant(label=label, engine=engine, run=resolved)


def _baseline_problems(run: Run) -> Iterator[str]:
    grid = run.grid
    if grid.pp > 1 or grid.tp > 1:
        yield (
            "DDP and FSDP2 know the data axis alone, and this layout has parallel.pipeline "
            f"{grid.pp} and parallel.tensor {grid.tp}; set both to 1, or leave --baselines "
            "out"
        )
    if run.precision == "fp16":
        yield (
            "DDP and FSDP2 are run without a loss scale, and fp16.enabled is true; set "
            "bf16.enabled instead, or leave --baselines out"
        )
