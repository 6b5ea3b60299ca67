"""Rules that several keys must satisfy together.

A rule is a generator function that yields a message for each violation. ``layout.py`` has those
that depend on the processes. In a config with mistakes, the keys that are wrong themselves are
absent, and a rule that reads one of them is skipped.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import lcm

from megaspeed.config.batch_schedule import BatchSchedule
from megaspeed.config.deepspeed_keys import MuonParams
from megaspeed.config.families import FAMILIES
from megaspeed.config.model import PRESETS, Llama3Scaling, ModelConfig, YarnScaling
from megaspeed.config.run import RunConfig
from megaspeed.config.section import AbsentKey

EXPERT_MULTIPLE = 8
"""In bf16 and fp16, widths of experts are multiples of this: so many elements have 16 bytes."""

_OF_ROTATION = ("rope_theta", "rope_scaling", "partial_rotary_factor", "no_rope_layer_interval")
_OF_EXPERTS = (
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("router_aux_loss_coef", "router_bias_rate"),
)

Rule = Callable[[RunConfig], Iterator[str]]

RULES: list[Rule] = []
"""The rules of this file, in its order."""


def rule(function: Rule) -> Rule:
    """Add a function to the rules."""
    RULES.append(function)
    return function


def check(rules: Iterable[Rule], config: RunConfig) -> list[str]:
    """Return the messages of all rules that read no absent key."""
    messages: list[str] = []
    for each in rules:
        with suppress(AbsentKey):  # the key is wrong itself, which another message says
            messages += each(config)
    return messages


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order.

    >>> divisors(28)
    [1, 2, 4, 7, 14, 28]
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def listed(numbers: list[int]) -> str:
    """Return the numbers, separated by commas."""
    return ", ".join(map(str, numbers))


def nearest(number: int, divisor: int) -> str:
    """Return the multiples of the divisor around a number, without 0."""
    below = number // divisor * divisor
    return " or ".join(str(value) for value in (below, below + divisor) if value > 0)


@rule
def preset_has_this_architecture(config: RunConfig) -> Iterator[str]:
    """A stated architecture is that of the preset."""
    preset, architecture = config.model.preset, config.model.architecture
    if preset is not None and PRESETS[preset]["architecture"] != architecture:
        yield (
            f'model.architecture "{architecture}" contradicts model.preset "{preset}", which is a '
            f"{PRESETS[preset]['architecture']}; remove one of them"
        )


@rule
def fields_belong_to_features(config: RunConfig) -> Iterator[str]:
    """A field of a feature that the model does not have keeps its default."""
    model = config.model
    has_rms_norm = model.norm == "rms_norm" or model.qk_norm
    for names, is_used, condition in (
        (_OF_ROTATION, model.positions == "rotary", 'model.positions "rotary"'),
        (("rms_norm_eps",), has_rms_norm, 'model.norm "rms_norm" or model.qk_norm true'),
        (("layer_norm_epsilon",), model.norm == "layer_norm", 'model.norm "layer_norm"'),
        (_OF_EXPERTS, model.num_experts, "model.num_experts"),
    ):
        for name in () if is_used else names:
            default = ModelConfig.model_fields[name].default
            if getattr(model, name) != FAMILIES[model.architecture].features.get(name, default):
                yield f"model.{name} has no effect without {condition}; remove it"


@rule
def experts_are_those_of_the_family(config: RunConfig) -> Iterator[str]:
    """A model of a family with experts states their number, and how many of them a token uses."""
    model = config.model
    name, count, active = model.architecture, model.num_experts, model.num_experts_per_tok
    families = [key for key, family in FAMILIES.items() if "num_experts" in family.keys]
    if name in families and count is None:
        yield f'model.architecture "{name}" has experts; state model.num_experts'
    if count is None:
        return
    if name not in families:
        yield (
            f'model.num_experts {count} needs an architecture with experts, not "{name}"; set '
            f"model.architecture to one of {', '.join(families)}"
        )
    if active is None or active > count:
        stated = "it is not stated" if active is None else f"it is {active}"
        yield f"model.num_experts_per_tok must be from 1 to model.num_experts {count}, but {stated}"
    elif active == 1 and model.norm_topk_prob:
        yield (
            "model.norm_topk_prob must be false with model.num_experts_per_tok 1: the score of a "
            "token's only expert would be divided by itself, so the loss would not train the "
            "router; set it to false, or raise model.num_experts_per_tok"
        )
    if not model.is_gated:
        yield f'model.mlp must be "swiglu" with model.num_experts, but it is "{model.mlp}"'
    if model.mlp_bias:
        yield "model.mlp_bias must be false with model.num_experts: experts have no biases"


@rule
def experts_are_shared(config: RunConfig) -> Iterator[str]:
    """Only models with experts have an expert axis. Tensor ranks have complete experts, and share
    the tokens. Gradients of experts are compressed at most to bf16.
    """
    model, parallel = config.model, config.parallel
    if parallel.expert > 1 and model.num_experts is None:
        yield f"parallel.expert {parallel.expert} needs model.num_experts; remove it"
    if parallel.expert == 1 and parallel.expert_exchange != "auto":
        yield (
            f'parallel.expert_exchange "{parallel.expert_exchange}" has no effect with '
            "parallel.expert 1; remove it, or set parallel.expert"
        )
    if model.num_experts is None:
        return
    if parallel.tensor > 1 and parallel.sequence_parallel is False:
        yield (
            f"parallel.sequence_parallel must be true with model.num_experts {model.num_experts} "
            f"and parallel.tensor {parallel.tensor}, because experts are not split over tensor "
            "ranks, so all of these would compute the same tokens; set it to true, or "
            "parallel.tensor to 1"
        )
    if not isinstance(parallel.gradient_compression, str):
        yield (
            f'parallel.gradient_compression "{parallel.gradient_compression.type}" compresses a '
            "parameter as one matrix, but the experts of a block are many matrices in one "
            'parameter; set it to "bf16", or remove it'
        )
    in_16_bits = config.bf16.enabled or config.fp16.enabled
    multiple = EXPERT_MULTIPLE if in_16_bits else EXPERT_MULTIPLE // 2
    sizes = {"hidden_size": model.hidden_size, "moe_intermediate_size": model.expert_width}
    for name, size in sizes.items():
        if size % multiple:
            yield (
                f"model.{name} {size} must be a multiple of {multiple} in "
                f"{'bf16 and fp16' if in_16_bits else 'fp32'}, because in torch's grouped products "
                "a row of a matrix must be a multiple of 16 bytes; nearest: "
                f"{nearest(size, multiple)}"
            )


@rule
def heads_have_a_size(config: RunConfig) -> Iterator[str]:
    """Heads divide the hidden size unless their size is stated; rotary positions need pairs."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if "head_dim" not in model.model_fields_set and hidden % heads:
        yield (
            f"model.hidden_size {hidden} must be divisible by model.num_attention_heads {heads}, "
            f"unless model.head_dim is stated; valid num_attention_heads: "
            f"{listed(divisors(hidden))}"
        )
    elif model.positions == "rotary" and (model.rotary_dim % 2 or model.rotary_dim == 0):
        factor = model.partial_rotary_factor
        part = f" x model.partial_rotary_factor {factor}" if factor < 1 else ""
        yield (
            f"model.head_dim {model.head_dim}{part} must be even, because rotary positions rotate "
            f"pairs of elements; model.head_dim is model.hidden_size {hidden} / "
            f"model.num_attention_heads {heads} if omitted: change one of them"
        )


@rule
def key_value_heads_divide_heads(config: RunConfig) -> Iterator[str]:
    """Each key/value head serves the same number of query heads."""
    heads, shared = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads % shared:
        yield (
            f"model.num_attention_heads {heads} must be divisible by model.num_key_value_heads "
            f"{shared}, because each key/value head serves the same number of query heads; valid "
            f"num_key_value_heads: {listed(divisors(heads))}"
        )


@rule
def rope_factors_are_ordered(config: RunConfig) -> Iterator[str]:
    """The frequencies that are not scaled are above those that are scaled in full."""
    match config.model.rope_scaling:
        case Llama3Scaling(low_freq_factor=low, high_freq_factor=high):
            names, usual = ("low_freq_factor", "high_freq_factor"), "Llama 3.1 has 1.0 and 4.0"
        case YarnScaling(beta_slow=low, beta_fast=high):
            names, usual = ("beta_slow", "beta_fast"), "YaRN has 1.0 and 32.0"
        case _:
            return
    if low >= high:
        yield (
            f"model.rope_scaling.{names[0]} {low} must be less than {names[1]} {high}, because the "
            f"scaling is blended between the two ({usual})"
        )


@rule
def yarn_has_a_base_and_one_attention_factor(config: RunConfig) -> Iterator[str]:
    """YaRN divides by the logarithm of the base; its attention factor has one source."""
    theta, scaling = config.model.rope_theta, config.model.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return
    if theta <= 1:
        yield (
            f'model.rope_theta {theta} must be more than 1 with model.rope_scaling.rope_type "yarn"'
            ", or frequencies do not decrease (most models have 10000.0)"
        )
    factor, *scales = scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim
    if any(scales) and (factor or not all(scales)):
        yield (
            f"model.rope_scaling.mscale {json.dumps(scales[0])} and mscale_all_dim "
            f"{json.dumps(scales[1])} have an effect only if both are stated and attention_factor "
            f"is not (it is {json.dumps(factor)}); state both alone, or remove both"
        )


def head_degrees(model: ModelConfig, tp: int = 1) -> list[int]:
    """Return the degrees by which the heads of one of ``tp`` tensor ranks can be divided.

    If tp is 1, these are the valid tensor degrees, otherwise the context degrees of ulysses.
    """
    heads, shared = model.local_heads(tp)
    return [d for d in divisors(heads) if shared % d == 0 or d % shared == 0]


@rule
def tensor_divides_heads(config: RunConfig) -> Iterator[str]:
    """A tensor rank holds complete query heads, and complete or shared key/value heads."""
    model, tp = config.model, config.parallel.tensor
    heads, shared = model.num_attention_heads, model.num_key_value_heads
    valid = head_degrees(model)
    if heads % tp:
        yield (
            f"model.num_attention_heads {heads} must be divisible by parallel.tensor {tp}, because "
            f"a tensor rank holds complete heads; valid parallel.tensor: {listed(valid)}"
        )
    elif tp not in valid:
        yield (
            f"model.num_key_value_heads {shared} and parallel.tensor {tp}: one must be divisible "
            "by the other, because a tensor rank holds complete key/value heads or shares one with "
            f"its neighbours; valid parallel.tensor: {listed(valid)}"
        )


@rule
def tensor_divides_feed_forward(config: RunConfig) -> Iterator[str]:
    """Tensor ranks hold equal parts of the feed-forward layer. Experts are not divided."""
    width, tp = config.model.intermediate_size, config.parallel.tensor
    if width % tp and config.model.num_experts is None:
        yield (
            f"model.intermediate_size {width} must be divisible by parallel.tensor {tp}, because "
            "tensor ranks hold equal parts of the feed-forward layer; nearest: "
            f"{nearest(width, tp)}"
        )


@rule
def pipeline_stages_have_blocks(config: RunConfig) -> Iterator[str]:
    """There are at most as many pipeline stages as blocks."""
    layers, pp = config.model.num_hidden_layers, config.parallel.pipeline
    if layers < pp:
        yield (
            f"model.num_hidden_layers {layers} must be at least parallel.pipeline {pp}, because "
            "there are at most as many pipeline stages as blocks; valid parallel.pipeline: 1 to "
            f"{layers}"
        )


@rule
def virtual_stages_have_blocks(config: RunConfig) -> Iterator[str]:
    """Several chunks need a pipeline that runs 1f1b, and a block for each of them."""
    parallel, layers = config.parallel, config.model.num_hidden_layers
    pp, chunks = parallel.pipeline, parallel.virtual_stages
    name = f"parallel.virtual_stages {chunks}"
    if chunks == 1:
        if parallel.micro_batch_groups not in (1, "auto"):
            yield (
                f"parallel.micro_batch_groups {parallel.micro_batch_groups} has no effect with "
                "parallel.virtual_stages 1; set that to 2 or more, or remove "
                "parallel.micro_batch_groups"
            )
        if parallel.gradient_reduction == "per_visit":
            yield (
                'parallel.gradient_reduction "per_visit" needs parallel.virtual_stages 2 or more; '
                'set it to "per_step", "per_micro_batch" or "auto"'
            )
        return
    if pp == 1:
        yield f"{name} divides the layers of pipeline stages, but parallel.pipeline is 1; remove it"
    if parallel.schedule != "1f1b":
        yield f'{name} needs parallel.schedule "1f1b", not "{parallel.schedule}"'
    if pp > 1 and pp * chunks > layers:
        yield (
            f"{name} x parallel.pipeline {pp} = {pp * chunks} chunks need as many blocks, but "
            f"model.num_hidden_layers is {layers}; "
            + (f"set it to at most {layers // pp}" if layers >= 2 * pp else "remove it")
        )


@rule
def extra_micro_batches_have_a_stage_after(config: RunConfig) -> Iterator[str]:
    """Only 1f1b with one chunk keeps more micro-batches, at most one more for each later stage."""
    parallel, most = config.parallel, config.parallel.pipeline - 1
    name = f"parallel.extra_in_flight {parallel.extra_in_flight}"
    if parallel.extra_in_flight == 0:
        return
    if most == 0:
        yield f"{name} has no effect with parallel.pipeline 1; remove it"
        return
    if parallel.schedule != "1f1b":
        yield f'{name} needs parallel.schedule "1f1b", not "{parallel.schedule}"'
    if parallel.virtual_stages > 1:
        yield (
            f"{name} needs parallel.virtual_stages 1, because several chunks have more in flight "
            "already; remove one of them"
        )
    if parallel.extra_in_flight > most:
        yield (
            f"{name} must be less than parallel.pipeline {parallel.pipeline}, because a stage "
            f"keeps at most one more for each stage after it; valid: 0 to {most}"
        )


@rule
def recomputed_blocks_are_recomputed(config: RunConfig) -> Iterator[str]:
    """Recomputation is on if the number of recomputed blocks is stated."""
    blocks = config.parallel.recomputed_blocks
    if blocks is not None and config.parallel.activation_checkpointing == "none":
        yield (
            f"parallel.recomputed_blocks {blocks} has no effect with "
            'parallel.activation_checkpointing "none"; set that to "selective", "full" or '
            '"full_offloaded", or remove parallel.recomputed_blocks'
        )


@rule
def sequence_fits_positions(config: RunConfig) -> Iterator[str]:
    """The model has a position for each token of a sample."""
    length, positions = config.data.sequence_length, config.model.max_position_embeddings
    if length > positions:
        yield (
            f"data.sequence_length {length} must be at most model.max_position_embeddings "
            f"{positions}; shorten the sequence or raise the limit"
        )


@rule
def ulysses_divides_heads(config: RunConfig) -> Iterator[str]:
    """With ulysses, each context rank has complete heads in its attention."""
    model, parallel = config.model, config.parallel
    cp, tp, method = parallel.context, parallel.tensor, parallel.context_method
    if method != "auto" and cp == 1:
        yield (
            f'parallel.context_method "{method}" has no effect with parallel.context 1; remove it, '
            "or set parallel.context"
        )
    if method != "ulysses" or tp not in head_degrees(model):
        return
    if cp not in (valid := head_degrees(model, tp)):
        heads, shared = model.local_heads(tp)
        yield (
            f"parallel.context {cp} must divide the {heads} query heads of a tensor rank, and "
            f"divide its {shared} key/value heads or be a multiple of them, because with "
            'parallel.context_method "ulysses" a rank has complete heads; valid parallel.context: '
            f'{listed(valid)}; or set parallel.context_method to "all_gather"'
        )


@rule
def ranks_divide_sequence(config: RunConfig) -> Iterator[str]:
    """Context ranks hold equal parts of the sequence; with sequence parallelism, tensor ranks of
    these parts.
    """
    parallel, length = config.parallel, config.data.sequence_length
    cp, tp = parallel.context, parallel.tensor
    has_experts = config.model.num_experts is not None
    splits = tp > 1 and parallel.sequence_parallel in (True, "auto" if has_experts else True)
    gathers_keys = parallel.context_method == "all_gather"
    if parallel.context_method == "auto":
        gathers_keys = cp not in head_degrees(config.model, tp)
    runs = 2 if gathers_keys else 1  # with all_gather, one from each half of the sequence
    divisor = cp * (lcm(runs, tp) if splits else runs)
    if length % divisor == 0:
        return
    if cp == 1:
        reason = "with experts" if has_experts else "if parallel.sequence_parallel is true"
        yield (
            f"data.sequence_length {length} must be divisible by parallel.tensor {tp} {reason}, "
            f"because tensor ranks hold equal parts of the sequence; nearest: {nearest(length, tp)}"
        )
        return
    factors = [f"parallel.context {cp} x 2 (a part of each half for each rank)"] * gathers_keys
    factors += [f"parallel.context {cp} x parallel.tensor {tp}"] * splits
    law = " and by ".join(factors or [f"parallel.context {cp}"])
    yield (
        f"data.sequence_length {length} must be divisible by {law}, because the ranks hold equal "
        f"parts of the sequence; nearest: {nearest(length, divisor)}"
    )


@rule
def weights_are_stated_for_all_sources_or_none(config: RunConfig) -> Iterator[str]:
    """Weights are relative to each other, so one without the others means nothing."""
    data = config.data
    for key, sources in (
        ("data.train", data.train_sources),
        ("data.validation", data.validation_sources or ()),
    ):
        without = [index for index, source in enumerate(sources) if source.weight is None]
        if 0 < len(without) < len(sources):
            yield (
                f"{key} must state a weight for all of its sources or for none, but it states one "
                f"for {len(sources) - len(without)} of {len(sources)}; {key}[{without[0]}] "
                f"({sources[without[0]]}) is the first without one"
            )


@rule
def streams_are_known_beforehand(config: RunConfig) -> Iterator[str]:
    """The samples of a stream are known before step 1, although it is tokenized later."""
    data = config.data
    for i, source in enumerate(data.train_sources):
        name, dataset, commit = f"data.train[{i}].tokens", str(source.dataset), source.revision
        if source.tokens is None:
            continue
        if not re.fullmatch("[0-9a-f]{40}", commit or "") or os.path.exists(dataset):
            yield (
                f"{name} needs text that cannot change: dataset must be on the hub, and revision a "
                f"commit of 40 hexadecimal digits, but dataset is {json.dumps(dataset)} and "
                f"revision is {json.dumps(commit)}; state both, or remove tokens"
            )
        if data.tokenizer == "train":
            yield (
                f'{name} needs a tokenizer that exists, but data.tokenizer is "train"; state '
                "the path of one, for example from `megaspeed train-tokenizer`"
            )
        if source.weight is None and len(data.train) > 1:
            yield (
                f"{name} needs a weight for each of the {len(data.train)} sources, because a "
                "stream is read in its own order; state the weights"
            )
        if source.shard_tokens <= data.sequence_length:
            yield (
                f"{name} {source.tokens} makes shards of {source.shard_tokens} tokens, which must "
                f"be more than data.sequence_length {data.sequence_length}; state at least "
                f"{64 * data.sequence_length + 1}, or remove tokens"
            )
    for i, source in enumerate(data.validation_sources or ()):
        if source.tokens is not None:
            yield f"data.validation[{i}].tokens must be removed: all is tokenized before step 1"


@rule
def samples_fit_the_sequence(config: RunConfig) -> Iterator[str]:
    """An end-of-text and a continuation fit a sequence. Prompts are not tokenized here."""
    training, length = config.training, config.data.sequence_length
    if training.sample_prompts and training.sample_tokens >= length:
        yield (
            f"training.sample_tokens {training.sample_tokens:,} must be less than "
            f"data.sequence_length {length:,}, because a prompt has tokens, too; lower it"
        )


@rule
def top_k_has_a_temperature(config: RunConfig) -> Iterator[str]:
    """top-k limits a draw, and only a temperature above 0 makes the run draw tokens."""
    training = config.training
    if training.sample_top_k is not None and training.sample_temperature == 0:
        yield (
            f"training.sample_top_k {training.sample_top_k:,} has no effect with "
            "training.sample_temperature 0, which draws nothing; set a temperature, such as 0.8, "
            "or remove training.sample_top_k"
        )


@rule
def one_precision(config: RunConfig) -> Iterator[str]:
    """A model is trained in bf16 or in fp16, not in both."""
    if config.bf16.enabled and config.fp16.enabled:
        yield (
            "bf16.enabled and fp16.enabled are both true, but a model has one type; turn one off "
            "(bf16 needs no loss scale)"
        )


@rule
def gradients_are_summed_in_the_models_type_or_fp32(config: RunConfig) -> Iterator[str]:
    """A sum of gradients is at least as precise as the gradients."""
    if config.data_types.grad_accum_dtype == "bf16" and not config.bf16.enabled:
        computed = "fp16" if config.fp16.enabled else "fp32"
        yield (
            f'data_types.grad_accum_dtype "bf16" loses digits of gradients that the {computed} '
            'model computes; remove it, write "fp32", or set bf16.enabled'
        )


@rule
def one_type_of_messages(config: RunConfig) -> Iterator[str]:
    """Only one key may state what is sent for a gradient."""
    sent, compression = config.communication_data_type, config.parallel.gradient_compression
    if sent is not None and compression != "none":
        name = compression if isinstance(compression, str) else compression.type
        yield (
            f'parallel.gradient_compression "{name}" and communication_data_type "{sent}" both '
            "state what is sent for a gradient; remove one of them"
        )


@rule
def compression_has_complete_gradients(config: RunConfig) -> Iterator[str]:
    """Compression needs the complete sum of a step on each rank, if there are no replicas."""
    compression, zero = config.parallel.gradient_compression, config.zero_optimization
    if isinstance(compression, str) or config.parallel.replicate > 1:
        return
    name = f'parallel.gradient_compression "{compression.type}"'
    reduction = config.parallel.gradient_reduction
    if reduction in ("per_visit", "per_micro_batch") and zero.stage >= 2:
        yield (
            f"{name} compresses the complete gradient of a step, but with zero_optimization.stage "
            f'{zero.stage} and parallel.gradient_reduction "{reduction}" no rank keeps it; set '
            'parallel.gradient_reduction to "per_step" or "auto"'
        )
    if zero.overlap_comm:
        yield (
            f"{name} compresses the gradient of a step after its last backward, so nothing can be "
            "sent while it runs; remove zero_optimization.overlap_comm, or compress to "
            '"bf16"'
        )


@rule
def compression_has_fp32_sums(config: RunConfig) -> Iterator[str]:
    """What was not sent is much smaller than the gradient to which it is added."""
    compression, dtype = config.parallel.gradient_compression, config.data_types.grad_accum_dtype
    if not isinstance(compression, str) and dtype != "fp32":
        yield (
            f'parallel.gradient_compression "{compression.type}" adds what was not sent to the '
            f'gradient of the next step, and data_types.grad_accum_dtype "{dtype}" loses numbers '
            '256 times smaller than the sum; set grad_accum_dtype to "fp32"'
        )


@rule
def compressed_matrices_have_no_copies(config: RunConfig) -> Iterator[str]:
    """Copies of a key/value head on several tensor ranks must stay equal."""
    compression, tp = config.parallel.gradient_compression, config.parallel.tensor
    shared = config.model.num_key_value_heads
    if not isinstance(compression, str) and tp > shared:
        yield (
            f'parallel.gradient_compression "{compression.type}" compresses the part of a matrix '
            f"that a tensor rank holds, so copies of a key/value head would differ: "
            f"parallel.tensor {tp} must be at most model.num_key_value_heads {shared}"
        )


@rule
def muon_has_both_learning_rates(config: RunConfig) -> Iterator[str]:
    """If only muon_lr or adam_lr is stated, the other rate would be the default of lr."""
    params, scheduler = config.optimizer.params, config.scheduler
    if not isinstance(params, MuonParams):
        return
    stated = params.model_fields_set & {"lr", "muon_lr", "adam_lr"}
    if len(stated) == 1 and "lr" not in stated:
        name = next(iter(stated))
        other = {"muon_lr": "embeddings, head, norms and biases", "adam_lr": "matrices of blocks"}
        yield (
            f"optimizer.params.{name} {getattr(params, name)} is stated, but no learning rate of "
            f"{other[name]}; state optimizer.params.lr, or muon_lr and adam_lr"
        )
    full = getattr(None if scheduler is None else scheduler.params, "warmup_max_lr", None)
    if full not in (None, params.lr) and params.rates != (full, full):
        yield (
            f"scheduler.params.warmup_max_lr {full} is one learning rate, but optimizer.params "
            f"states {params.rates[0]} for matrices of blocks and {params.rates[1]} for other "
            "parameters; remove warmup_max_lr: both have their full rate after the warmup"
        )


@rule
def muon_has_gradients_on_the_device(config: RunConfig) -> Iterator[str]:
    """Muon needs gradients on the device, without int8 or PowerSGD compression."""
    compression, zero = config.parallel.gradient_compression, config.zero_optimization
    if config.optimizer.type != "Muon":
        return
    if zero.offloads_optimizer:
        yield (
            "zero_optimization.offload_optimizer keeps gradients and momentum in host memory, but "
            'optimizer.type "Muon" computes matrix products from them on the device in every step; '
            "remove one of them"
        )
    if not isinstance(compression, str):
        yield (
            f'parallel.gradient_compression "{compression.type}" changes the small singular values '
            'of a gradient, and optimizer.type "Muon" makes all singular values about equal, so '
            'the error would be as large as the update; compress to "bf16", or remove one of them'
        )


@rule
def length_is_stated_once(config: RunConfig) -> Iterator[str]:
    """Steps or tokens state the length. A resolved configuration has both, and they agree."""
    steps, tokens, follows = config.training.steps, config.training.tokens, config.number_of_steps()
    if steps is None and tokens is None:
        yield 'training.steps is missing: state it, or training.tokens, such as "20B"'
    elif steps is not None and steps != follows:  # then tokens are stated, too
        other = f"training.tokens {tokens}" if follows is None else config.length(follows)
        yield (
            f"training.steps {steps} and {other} both state the length; remove one of them: "
            "--set training.steps=null keeps the tokens"
        )


@rule
def warmup_ends_before_the_schedule(config: RunConfig) -> Iterator[str]:
    """The full learning rate is reached, and a rate that falls has steps left to fall."""
    scheduler, end = config.scheduler, config.number_of_steps()
    if scheduler is None:
        return
    warmup, law = scheduler.params.warmup_num_steps, config.length(end or 0)
    reason = "or the full learning rate is never reached"
    if scheduler.type != "constant" and scheduler.type != "WarmupLR":
        reason = "because the rate falls after warmup"
        if (total := scheduler.params.total_num_steps) is not None:
            end, law = total, f"scheduler.params.total_num_steps {total}"
    if end is not None and scheduler.type == "wsd":
        decay = scheduler.params.decay_num_steps
        if warmup + decay > end:
            yield (
                f"scheduler.params.warmup_num_steps {warmup} + scheduler.params.decay_num_steps "
                f"{decay} must be at most {law}, {reason}; shorten them, for example to "
                f"{end // 10} and {max(end // 5, 1)}"
            )
    elif end is not None and warmup >= end:
        shorter = f"scheduler.params.warmup_num_steps={max(end // 10, 1)}"
        if end == 1:  # DeepSpeed's schedules have at least one step of warmup
            shorter = "scheduler=null"
        yield (
            f"scheduler.params.warmup_num_steps {warmup} must be less than {law}, "
            f"{reason}; shorten the warmup: --set {shorter}"
        )


@rule
def rate_stays_above_zero(config: RunConfig) -> Iterator[str]:
    """A schedule that ends at 0 is at least as long as the run."""
    scheduler, steps, lowest = config.scheduler, config.number_of_steps(), 0.0
    if scheduler is None or scheduler.type == "constant" or scheduler.type == "WarmupLR":
        return
    if scheduler.type == "WarmupCosineLR":
        lowest = scheduler.params.cos_min_ratio
    elif scheduler.type != "WarmupDecayLR":
        lowest = scheduler.params.min_ratio
    total = scheduler.params.total_num_steps
    if lowest == 0 and total is not None and steps is not None and total < steps:
        yield (
            f"scheduler.params.total_num_steps {total} must be at least {config.length(steps)}, "
            f"or the last {steps - total} steps have a learning rate of 0; remove it"
        )


@rule
def profiled_steps_are_trained(config: RunConfig) -> Iterator[str]:
    """The run takes the steps that are to be profiled."""
    profile, steps = config.training.profile, config.number_of_steps()
    if profile and steps is not None and profile.start_step + profile.steps - 1 > steps:
        yield (
            f"training.profile.start_step {profile.start_step} + training.profile.steps "
            f"{profile.steps} - 1 is the last profiled step, and must be at most "
            f"{config.length(steps)}; profile earlier or fewer steps"
        )


@rule
def milestones_are_saved(config: RunConfig) -> Iterator[str]:
    """Milestones are among the checkpoints that are saved at intervals."""
    every, interval = config.training.keep_every, config.training.save_interval
    if every > 0 and (interval == 0 or every % interval):
        mend = (
            f"nearest: {nearest(every, interval)}" if interval else f"set the interval to {every}"
        )
        yield (
            f"training.keep_every {every} must be a multiple of training.save_interval {interval}, "
            f"because only a checkpoint that is saved can be kept; {mend}"
        )


@rule
def schedule_has_the_batch(config: RunConfig) -> Iterator[str]:
    """train_batch_size is the largest batch of the schedule. A resolved configuration has both."""
    if (schedule := config.train_batch_size_schedule) is None:
        return
    largest, stated = BatchSchedule.of(schedule, None).batches[-1], config.train_batch_size
    if stated not in (None, largest):
        yield (
            f"train_batch_size {stated} is not the largest batch of train_batch_size_schedule "
            f'"{schedule}", which is {largest}; remove train_batch_size'
        )
    if config.training.lr_scaling != "none":
        yield (
            f'training.lr_scaling "{config.training.lr_scaling}" scales the learning rate to one '
            "batch, but train_batch_size_schedule has several; remove training.lr_scaling, and "
            "state the learning rate that is right for the run"
        )


@rule
def scaling_has_a_base(config: RunConfig) -> Iterator[str]:
    """Scaling of the learning rate and the batch that it starts from are stated together."""
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
