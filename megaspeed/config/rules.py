"""Rules that several keys must satisfy together, at any number of processes.

Each rule is a generator function that yields a message for each violation.
"""

from collections.abc import Callable, Iterator, Set
from typing import Generic, TypeVar

from megaspeed.config.errors import KeyPath
from megaspeed.config.model import PRESETS, ModelConfig
from megaspeed.config.run import RunConfig
from megaspeed.config.scheduler import Constant, Decay, WarmupCosineLR, WarmupDecayLR, WarmupLR

Subject = TypeVar("Subject")
Check = Callable[[Subject], Iterator[str]]


class Rules(Generic[Subject]):
    """A list of rules about a subject."""

    def __init__(self) -> None:
        self._rules: list[tuple[list[KeyPath], Check[Subject]]] = []

    def reads(self, *keys: str) -> Callable[[Check[Subject]], Check[Subject]]:
        """Decorates a rule, with the dotted keys that it reads."""

        def add(check: Check[Subject]) -> Check[Subject]:
            self._rules.append(([tuple(key.split(".")) for key in keys], check))
            return check

        return add

    def violations(self, subject: Subject, invalid: Set[KeyPath] = frozenset()) -> list[str]:
        """The messages of all rules in their order. Skips rules that read an invalid key."""
        parents = {path[:length] for path in invalid for length in range(len(path))}

        def is_valid(key: KeyPath) -> bool:
            itself_and_parents = {key[:length] for length in range(1, len(key) + 1)}
            return key not in parents and itself_and_parents.isdisjoint(invalid)

        return [
            message
            for keys, check in self._rules
            if all(map(is_valid, keys))
            for message in check(subject)
        ]


CONFIG_RULES = Rules[RunConfig]()
"""All rules of this file."""

rule = CONFIG_RULES.reads


def divisors(number: int) -> list[int]:
    """All divisors in ascending order.

    >>> divisors(28)
    [1, 2, 4, 7, 14, 28]
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


@rule("model.architecture", "model.preset")
def preset_has_this_architecture(config: RunConfig) -> Iterator[str]:
    preset, architecture = config.model.preset, config.model.architecture
    if preset is not None and PRESETS[preset]["architecture"] != architecture:
        yield (
            f'model.architecture "{architecture}" contradicts model.preset "{preset}", which is a '
            f"{PRESETS[preset]['architecture']}; remove one of them"
        )


@rule(
    "model.positions",
    "model.norm",
    "model.qk_norm",
    "model.rope_theta",
    "model.rope_scaling",
    "model.rms_norm_eps",
    "model.layer_norm_epsilon",
)
def fields_belong_to_features(config: RunConfig) -> Iterator[str]:
    model = config.model
    has_rms_norm = model.norm == "rms_norm" or model.qk_norm
    for name, is_used, condition in (
        ("rope_theta", model.positions == "rotary", 'model.positions "rotary"'),
        ("rope_scaling", model.positions == "rotary", 'model.positions "rotary"'),
        ("rms_norm_eps", has_rms_norm, 'model.norm "rms_norm" or model.qk_norm true'),
        ("layer_norm_epsilon", model.norm == "layer_norm", 'model.norm "layer_norm"'),
    ):
        if not is_used and getattr(model, name) != ModelConfig.model_fields[name].default:
            yield f"model.{name} has no effect without {condition}; remove it"


def _has_uneven_heads(model: ModelConfig) -> bool:
    """Whether head_dim is omitted, and hidden_size / num_attention_heads has a remainder."""
    is_stated = "head_dim" in model.model_fields_set
    return not is_stated and model.hidden_size % model.num_attention_heads != 0


@rule("model.num_attention_heads", "model.hidden_size", "model.head_dim")
def heads_divide_hidden(config: RunConfig) -> Iterator[str]:
    model = config.model
    if _has_uneven_heads(model):
        yield (
            f"model.hidden_size {model.hidden_size} must be divisible by model.num_attention_heads "
            f"{model.num_attention_heads}, unless model.head_dim is stated; valid "
            f"num_attention_heads: {_listed(divisors(model.hidden_size))}"
        )


@rule("model.num_key_value_heads", "model.num_attention_heads")
def key_value_heads_divide_heads(config: RunConfig) -> Iterator[str]:
    heads, shared = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads % shared:
        yield (
            f"model.num_attention_heads {heads} must be divisible by model.num_key_value_heads "
            f"{shared}, because each key/value head serves the same number of query heads; valid "
            f"num_key_value_heads: {_listed(divisors(heads))}"
        )


@rule("model.positions", "model.hidden_size", "model.num_attention_heads", "model.head_dim")
def rotary_needs_even_heads(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.positions == "rotary" and model.head_dim % 2 and not _has_uneven_heads(model):
        yield (
            f"model.head_dim {model.head_dim} must be even, because rotary positions rotate pairs "
            f"of elements; it is model.hidden_size {model.hidden_size} / model.num_attention_heads "
            f"{model.num_attention_heads} if omitted: change one of the three"
        )


@rule("model.rope_scaling")
def rope_factors_are_ordered(config: RunConfig) -> Iterator[str]:
    scaling = config.model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            f"model.rope_scaling.low_freq_factor {scaling.low_freq_factor} must be less than "
            f"high_freq_factor {scaling.high_freq_factor}, because the scaling is blended between "
            "the two (Llama 3.1 has 1.0 and 4.0)"
        )


@rule("parallel.tensor", "model.num_attention_heads", "model.num_key_value_heads")
def tensor_divides_heads(config: RunConfig) -> Iterator[str]:
    heads, shared = config.model.num_attention_heads, config.model.num_key_value_heads
    tp = config.parallel.tensor
    valid = [d for d in divisors(heads) if shared % d == 0 or d % shared == 0]
    if heads % tp:
        yield (
            f"model.num_attention_heads {heads} must be divisible by parallel.tensor {tp}, because "
            f"a tensor rank holds complete heads; valid parallel.tensor: {_listed(valid)}"
        )
    elif tp not in valid:
        yield (
            f"model.num_key_value_heads {shared} and parallel.tensor {tp}: one must be divisible "
            "by the other, because a tensor rank holds complete key/value heads or shares one with "
            f"its neighbours; valid parallel.tensor: {_listed(valid)}"
        )


@rule("parallel.tensor", "model.intermediate_size", "model.hidden_size", "model.mlp")
def tensor_divides_feed_forward(config: RunConfig) -> Iterator[str]:
    width, tp = config.model.intermediate_size, config.parallel.tensor
    if width % tp:
        below = width // tp * tp
        nearest = " or ".join(str(value) for value in (below, below + tp) if value > 0)
        yield (
            f"model.intermediate_size {width} must be divisible by parallel.tensor {tp}, because "
            f"tensor ranks hold equal parts of the feed-forward layer; nearest: {nearest}"
        )


@rule("parallel.pipeline", "model.num_hidden_layers")
def pipeline_stages_have_blocks(config: RunConfig) -> Iterator[str]:
    layers, pp = config.model.num_hidden_layers, config.parallel.pipeline
    if layers < pp:
        yield (
            f"model.num_hidden_layers {layers} must be at least parallel.pipeline {pp}, because "
            "there are at most as many pipeline stages as blocks; valid parallel.pipeline: 1 to "
            f"{layers}"
        )


@rule("data.sequence_length", "model.max_position_embeddings")
def sequence_fits_positions(config: RunConfig) -> Iterator[str]:
    length, positions = config.data.sequence_length, config.model.max_position_embeddings
    if length > positions:
        yield (
            f"data.sequence_length {length} must be at most model.max_position_embeddings "
            f"{positions}; shorten the sequence or raise the limit"
        )


@rule("parallel.sequence_parallel", "parallel.tensor", "data.sequence_length")
def tensor_divides_sequence(config: RunConfig) -> Iterator[str]:
    length, tp = config.data.sequence_length, config.parallel.tensor
    if config.parallel.sequence_parallel and length % tp:
        yield (
            f"data.sequence_length {length} must be divisible by parallel.tensor {tp} if "
            "parallel.sequence_parallel is true, because tensor ranks hold equal parts of the "
            f"sequence; nearest: {length // tp * tp} or {-(-length // tp) * tp}"
        )


@rule("bf16.enabled", "fp16.enabled")
def one_precision(config: RunConfig) -> Iterator[str]:
    if config.bf16.enabled and config.fp16.enabled:
        yield (
            "bf16.enabled and fp16.enabled are both true, and a model has one type; turn one off "
            "(bf16 needs no loss scale)"
        )


@rule("data_types.grad_accum_dtype", "bf16.enabled")
def gradients_are_summed_in_the_models_type_or_fp32(config: RunConfig) -> Iterator[str]:
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
            f"has, and zero_optimization.stage is {zero.stage}; set it to 3, or remove "
            "offload_param"
        )


@rule("zero_optimization.offload_optimizer", "zero_optimization.stage")
def optimizer_offload_needs_partitioned_states(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.offloads_optimizer and zero.stage == 0:
        yield (
            "zero_optimization.offload_optimizer moves partitioned optimizer states, which stages "
            "1, 2 and 3 have, and zero_optimization.stage is 0; raise it, or remove "
            "offload_optimizer"
        )


@rule("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "training.steps")
def warmup_ends_before_the_schedule(config: RunConfig) -> Iterator[str]:
    scheduler = config.scheduler
    if scheduler is None:
        return
    warmup = scheduler.params.warmup_num_steps
    end, source = config.training.steps, "training.steps"
    reason = "or the full learning rate is never reached"
    if not isinstance(scheduler, Constant | WarmupLR):
        reason = "because the rate falls after warmup"
        if scheduler.params.total_num_steps is not None:
            end, source = scheduler.params.total_num_steps, "scheduler.params.total_num_steps"
    if warmup >= end:
        yield (
            f"scheduler.params.warmup_num_steps {warmup} must be less than {source} {end}, "
            f"{reason}; shorten the warmup"
        )


@rule(
    "scheduler.params.total_num_steps",
    "scheduler.params.cos_min_ratio",
    "scheduler.params.min_ratio",
    "training.steps",
)
def rate_stays_above_zero(config: RunConfig) -> Iterator[str]:
    scheduler, steps = config.scheduler, config.training.steps
    if isinstance(scheduler, Decay):
        ends_at_zero = scheduler.params.min_ratio == 0
    elif isinstance(scheduler, WarmupCosineLR):
        ends_at_zero = scheduler.params.cos_min_ratio == 0
    elif isinstance(scheduler, WarmupDecayLR):
        ends_at_zero = True
    else:
        return
    total = scheduler.params.total_num_steps
    if ends_at_zero and total is not None and total < steps:
        yield (
            f"scheduler.params.total_num_steps {total} must be at least training.steps {steps}, "
            f"or the last {steps - total} steps have a learning rate of 0; remove it"
        )


@rule("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "optimizer.params.lr")
def warmup_rises(config: RunConfig) -> Iterator[str]:
    scheduler = config.scheduler
    if isinstance(scheduler, WarmupLR | WarmupDecayLR):
        low, high = scheduler.params.warmup_min_lr, scheduler.params.warmup_max_lr
        source = "scheduler.params.warmup_max_lr"
        if high is None:
            high, source = config.optimizer.params.lr, "optimizer.params.lr"
        if low > high:
            yield (
                f"scheduler.params.warmup_min_lr {low} must be at most {source} {high}, because "
                "the rate rises during warmup"
            )


@rule("training.lr_scaling", "training.base_batch_size")
def scaling_has_a_base(config: RunConfig) -> Iterator[str]:
    scaling, base = config.training.lr_scaling, config.training.base_batch_size
    if scaling != "none" and base is None:
        yield (
            f'training.lr_scaling "{scaling}" multiplies the learning rate by a function of '
            "train_batch_size / training.base_batch_size; state training.base_batch_size, the "
            "batch for which optimizer.params.lr is right"
        )
    if scaling == "none" and base is not None:
        yield (
            f'training.base_batch_size {base} has no effect with training.lr_scaling "none"; set '
            'training.lr_scaling to "linear" or "sqrt", or remove training.base_batch_size'
        )


@rule("data.train", "data.validation")
def weights_are_stated_for_all_sources_or_none(config: RunConfig) -> Iterator[str]:
    for key, sources in (
        ("data.train", config.data.train_sources),
        ("data.validation", config.data.validation_sources or ()),
    ):
        without = [index for index, source in enumerate(sources) if source.weight is None]
        if 0 < len(without) < len(sources):
            yield (
                f"{key} must state a weight for all of its sources or for none, and states it for "
                f"{len(sources) - len(without)} of {len(sources)}; {key}[{without[0]}] "
                f"({sources[without[0]]}) is the first without one"
            )
