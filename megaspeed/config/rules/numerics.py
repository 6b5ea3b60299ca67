"""Laws of number types, ZeRO stages and offload."""

from collections.abc import Iterator

from megaspeed.config.rules.rule import Rule, rule
from megaspeed.config.run import RunConfig


@rule("bf16.enabled", "fp16.enabled")
def one_precision(config: RunConfig) -> Iterator[str]:
    if config.bf16.enabled and config.fp16.enabled:
        yield (
            "bf16.enabled and fp16.enabled are both true, and a model has one type; turn one off "
            "(bf16 needs no loss scale)"
        )


@rule("data_types.grad_accum_dtype", "bf16.enabled")
def gradients_are_added_as_precisely_as_computed(config: RunConfig) -> Iterator[str]:
    if config.data_types.grad_accum_dtype == "bf16" and not config.bf16.enabled:
        computed = "fp16" if config.fp16.enabled else "fp32"
        yield (
            f'data_types.grad_accum_dtype "bf16" loses digits of gradients that the {computed} '
            'model computes; remove it, write "fp32", or set bf16.enabled'
        )


@rule("zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients")
def overlapped_gradients_have_a_buffer(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.overlap_comm and zero.stage < 3 and not zero.contiguous_gradients:
        yield (
            "zero_optimization.overlap_comm reduces gradients while the backward pass continues, "
            "and with contiguous_gradients false DeepSpeed frees them before they are reduced; set "
            "contiguous_gradients to true, or overlap_comm to false"
        )


@rule("zero_optimization.offload_param", "zero_optimization.stage")
def parameter_offload_needs_stage_3(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.offloads_parameters and zero.stage != 3:
        yield (
            "zero_optimization.offload_param moves partitioned parameters, which only stage 3 "
            f"has, and zero_optimization.stage is {zero.stage}; set it to 3, or take "
            "offload_param out"
        )


@rule("zero_optimization.offload_optimizer", "zero_optimization.stage")
def optimizer_offload_needs_partitioned_states(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.offloads_optimizer and zero.stage == 0:
        yield (
            "zero_optimization.offload_optimizer moves partitioned optimizer states, which stages "
            "1, 2 and 3 have, and zero_optimization.stage is 0; raise it, or take "
            "offload_optimizer out"
        )


NUMERIC_RULES: tuple[Rule[RunConfig], ...] = (
    one_precision,
    gradients_are_added_as_precisely_as_computed,
    overlapped_gradients_have_a_buffer,
    parameter_offload_needs_stage_3,
    optimizer_offload_needs_partitioned_states,
)
