"""Rules for the model's shape, and for the degrees that split it."""

from collections.abc import Iterator

from megaspeed.config.model import ModelConfig
from megaspeed.config.parallel import divisors
from megaspeed.config.presets import PRESETS
from megaspeed.config.rules import Rule, rule
from megaspeed.config.run import RunConfig


@rule("model.num_attention_heads", "model.hidden_size", "model.head_dim")
def heads_divide_hidden(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads, hidden = model.num_attention_heads, model.hidden_size
    if _heads_do_not_divide(model):
        yield (
            f"model.hidden_size {hidden} must be divisible by model.num_attention_heads {heads}, "
            f"unless model.head_dim is stated; valid num_attention_heads: "
            f"{_listed(divisors(hidden))}"
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
    if model.positions == "rotary" and model.head_dim % 2 and not _heads_do_not_divide(model):
        yield (
            f"model.head_dim {model.head_dim} must be even, because rotary positions rotate pairs "
            f"of elements; it is model.hidden_size {model.hidden_size} / model.num_attention_heads "
            f"{model.num_attention_heads} if omitted: change one of the three"
        )


@rule("model.architecture", "model.preset")
def preset_has_this_architecture(config: RunConfig) -> Iterator[str]:
    preset, stated = config.model.preset, config.model.architecture
    if preset is not None and PRESETS[preset]["architecture"] != stated:
        yield (
            f'model.architecture "{stated}" contradicts model.preset "{preset}", which is a '
            f"{PRESETS[preset]['architecture']}; leave one of them out"
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
    for name, used, needs in (
        ("rope_theta", model.positions == "rotary", 'model.positions "rotary"'),
        ("rope_scaling", model.positions == "rotary", 'model.positions "rotary"'),
        ("rms_norm_eps", has_rms_norm, 'model.norm "rms_norm" or model.qk_norm true'),
        ("layer_norm_epsilon", model.norm == "layer_norm", 'model.norm "layer_norm"'),
    ):
        if not used and getattr(model, name) != ModelConfig.model_fields[name].default:
            yield f"model.{name} has no meaning without {needs}; leave it out"


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
    heads, tp = config.model.num_attention_heads, config.parallel.tensor
    if heads % tp:
        yield (
            f"model.num_attention_heads {heads} must be divisible by parallel.tensor {tp}, because "
            f"a tensor rank holds whole heads; valid parallel.tensor: {_valid_tensor(config)}"
        )


@rule("parallel.tensor", "model.num_attention_heads", "model.num_key_value_heads")
def tensor_fits_key_value_heads(config: RunConfig) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor
    already_said = bool(model.num_attention_heads % tp)
    if not already_said and not _fits_key_value_heads(model, tp):
        yield (
            f"model.num_key_value_heads {model.num_key_value_heads} and parallel.tensor {tp}: one "
            "must be divisible by the other, because a tensor rank holds whole key/value heads or "
            f"shares one with its neighbours; valid parallel.tensor: {_valid_tensor(config)}"
        )


@rule("parallel.tensor", "model.intermediate_size", "model.hidden_size", "model.mlp")
def tensor_divides_feed_forward(config: RunConfig) -> Iterator[str]:
    width, tp = config.model.intermediate_size, config.parallel.tensor
    if width % tp:
        above = -(-width // tp) * tp
        below = width // tp * tp
        nearest = " or ".join(str(value) for value in (below, above) if value > 0)
        yield (
            f"model.intermediate_size {width} must be divisible by parallel.tensor {tp}, because "
            f"tensor ranks hold equal parts of the feed-forward layer; nearest: {nearest}"
        )


@rule("parallel.pipeline", "model.num_hidden_layers")
def at_most_one_pipeline_stage_a_block(config: RunConfig) -> Iterator[str]:
    layers, pp = config.model.num_hidden_layers, config.parallel.pipeline
    if layers < pp:
        yield (
            f"model.num_hidden_layers {layers} must be at least parallel.pipeline {pp}, because "
            f"there are at most as many pipeline stages as blocks; valid parallel.pipeline: 1 to "
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


SHAPE_RULES: tuple[Rule[RunConfig], ...] = (
    preset_has_this_architecture,
    fields_belong_to_features,
    heads_divide_hidden,
    key_value_heads_divide_heads,
    rotary_needs_even_heads,
    rope_factors_are_ordered,
    tensor_divides_heads,
    tensor_fits_key_value_heads,
    tensor_divides_feed_forward,
    at_most_one_pipeline_stage_a_block,
    sequence_fits_positions,
    tensor_divides_sequence,
)


def _heads_do_not_divide(model: ModelConfig) -> bool:
    """Whether ``head_dim`` was derived from a division with a remainder."""
    is_stated = "head_dim" in model.model_fields_set
    return not is_stated and model.hidden_size % model.num_attention_heads != 0


def _fits_key_value_heads(model: ModelConfig, tp: int) -> bool:
    shared = model.num_key_value_heads
    return shared % tp == 0 or tp % shared == 0


def _valid_tensor(config: RunConfig) -> str:
    """The tensor degrees that both kinds of heads allow."""
    degrees = divisors(config.model.num_attention_heads)
    return _listed([tp for tp in degrees if _fits_key_value_heads(config.model, tp)])


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
