"""Rules for several keys: each message has the rule, the numbers and the valid values."""

from collections.abc import Iterator

import pytest

from megaspeed.config import layout
from megaspeed.config.loading import parse_config
from megaspeed.config.run import RunConfig
from tests.config.small import only_problem, problems, small

LLAMA = ("model.architecture=llama", "model.intermediate_size=384")


def test_the_small_config_has_no_problems() -> None:
    assert problems(world_size=1) == []


def test_heads_divide_the_hidden_size() -> None:
    assert only_problem("model.hidden_size=100", "model.num_attention_heads=12") == (
        "model.hidden_size 100 must be divisible by model.num_attention_heads 12, unless "
        "model.head_dim is stated; valid num_attention_heads: 1, 2, 4, 5, 10, 20, 25, 50, 100"
    )


def test_tensor_divides_the_heads_and_valid_degrees_are_listed() -> None:
    message = only_problem(
        "model.num_attention_heads=28", "model.hidden_size=224", "parallel.tensor=8"
    )
    assert message == (
        "model.num_attention_heads 28 must be divisible by parallel.tensor 8, because a tensor "
        "rank holds complete heads; valid parallel.tensor: 1, 2, 4, 7, 14, 28"
    )


def test_valid_tensor_degrees_are_those_that_pass() -> None:
    """12 heads that share 4 key/value heads: every degree is tried and compared with the list."""
    shape = (*LLAMA, "model.num_key_value_heads=4")
    passing = [tp for tp in range(1, 13) if not problems(*shape, f"parallel.tensor={tp}")]
    assert passing == [1, 2, 4, 12]
    message = next(m for m in problems(*shape, "parallel.tensor=6") if "key_value" in m)
    assert message.endswith("valid parallel.tensor: 1, 2, 4, 12")


@pytest.mark.parametrize(
    ("shared", "tp", "is_valid"),
    [(4, 2, True), (4, 4, True), (2, 4, True), (1, 12, True), (3, 6, True), (3, 2, False)],
)
def test_key_value_heads_divide_by_tensor_or_tensor_by_them(
    shared: int, tp: int, is_valid: bool
) -> None:
    found = problems(*LLAMA, f"model.num_key_value_heads={shared}", f"parallel.tensor={tp}")
    assert (found == []) == is_valid


def test_key_value_heads_divide_the_heads() -> None:
    assert "valid num_key_value_heads: 1, 2, 3, 4, 6, 12" in only_problem(
        *LLAMA, "model.num_key_value_heads=5"
    )


def test_an_own_head_size_need_not_divide_the_hidden_size() -> None:
    for head_dim in (16, 100 // 12):
        assert problems("model.hidden_size=100", f"model.head_dim={head_dim}") == []


def test_tensor_divides_the_feed_forward() -> None:
    message = only_problem("model.intermediate_size=100", "parallel.tensor=3")
    assert "100 must be divisible by parallel.tensor 3" in message
    assert message.endswith("nearest: 99 or 102")


def test_a_pipeline_stage_has_at_least_one_block() -> None:
    message = only_problem("parallel.pipeline=5")
    assert "model.num_hidden_layers 4 must be at least parallel.pipeline 5" in message
    assert message.endswith("valid parallel.pipeline: 1 to 4")


def test_layers_need_not_divide_by_the_pipeline_nor_vocabulary_by_tensor() -> None:
    assert problems("parallel.pipeline=3", "parallel.tensor=4", "model.vocab_size=303") == []


def test_recomputed_blocks_are_blocks_of_the_model() -> None:
    full = "parallel.activation_checkpointing=full"
    assert problems(full, "parallel.recomputed_blocks=4") == []
    message = only_problem(full, "parallel.recomputed_blocks=5")
    assert "recomputed_blocks 5 must be at most model.num_hidden_layers 4" in message
    assert only_problem("parallel.recomputed_blocks=2").endswith(
        'parallel.activation_checkpointing "none"; set that to "selective" or "full", or remove '
        "parallel.recomputed_blocks"
    )


def test_a_sequence_is_no_longer_than_the_positions() -> None:
    assert problems("data.sequence_length=64") == []
    assert only_problem("data.sequence_length=65") == (
        "data.sequence_length 65 must be at most model.max_position_embeddings 64; shorten the "
        "sequence or raise the limit"
    )


def test_sequence_parallel_splits_the_sequence_evenly() -> None:
    split = ("parallel.sequence_parallel=true", "parallel.tensor=3")
    assert only_problem(*split).endswith("nearest: 30 or 33")
    assert problems(*split, "data.sequence_length=33") == []
    assert problems("parallel.tensor=3") == [], "without sequence_parallel any length will do"


def test_a_rotary_head_has_an_even_size() -> None:
    assert "model.head_dim 3 must be even" in only_problem(*LLAMA, "model.num_attention_heads=32")
    assert problems("model.num_attention_heads=32") == [], "gpt2 has no rotary positions"


def test_fields_of_a_disabled_feature_are_refused() -> None:
    assert only_problem("model.rope_theta=5e5") == (
        'model.rope_theta has no effect without model.positions "rotary"; remove it'
    )
    assert only_problem(*LLAMA, "model.layer_norm_epsilon=1e-6").startswith(
        'model.layer_norm_epsilon has no effect without model.norm "layer_norm"'
    )


def test_a_preset_keeps_its_architecture() -> None:
    found = problems("model.preset=gpt2", "model.architecture=llama", "model.intermediate_size=384")
    assert any('model.architecture "llama" contradicts model.preset "gpt2"' in m for m in found)


def test_rope_factors_are_ordered() -> None:
    scaling = (
        '{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, '
        '"original_max_position_embeddings": 32}'
    )
    assert "low_freq_factor 4.0 must be less than high_freq_factor 4.0" in only_problem(
        *LLAMA, f"model.rope_scaling={scaling}"
    )


def test_a_model_has_one_precision() -> None:
    message = only_problem("bf16.enabled=true", "fp16.enabled=true")
    assert "both true" in message


@pytest.mark.parametrize(
    ("overrides", "is_valid"),
    [
        (["data_types.grad_accum_dtype=bf16", "bf16.enabled=true"], True),
        (["data_types.grad_accum_dtype=fp32", "bf16.enabled=true"], True),
        (["data_types.grad_accum_dtype=fp32"], True),
        (["data_types.grad_accum_dtype=bf16"], False),
        (["data_types.grad_accum_dtype=bf16", "fp16.enabled=true"], False),
    ],
)
def test_gradients_are_added_as_precisely_as_they_are_computed(
    overrides: list[str], is_valid: bool
) -> None:
    assert (problems(*overrides) == []) == is_valid


@pytest.mark.parametrize(
    "kind", ["cosine", "linear", "constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
)
def test_warmup_is_shorter_than_the_run(kind: str) -> None:
    scheduler = f"scheduler.type={kind}"
    assert problems(scheduler, "scheduler.params.warmup_num_steps=99") == []
    message = only_problem(scheduler, "scheduler.params.warmup_num_steps=100")
    assert "warmup_num_steps 100 must be less than training.steps 100" in message


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("kind", ["cosine", "constant", "WarmupLR", "WarmupDecayLR"])
def test_the_warmup_that_the_message_names_is_valid(kind: str, steps: int) -> None:
    scheduler = (f"scheduler.type={kind}", "scheduler.params.warmup_num_steps=100")
    run = (*scheduler, f"training.steps={steps}")
    message = only_problem(*run)
    mend = message.partition("; shorten the warmup: --set ")[2]
    assert problems(*run, mend) == [], message


def test_warmup_is_shorter_than_the_stated_schedule() -> None:
    message = only_problem(
        "scheduler.type=WarmupCosineLR",
        "scheduler.params.warmup_num_steps=50",
        "scheduler.params.total_num_steps=40",
    )
    assert "50 must be less than scheduler.params.total_num_steps 40" in message


@pytest.mark.parametrize(
    ("kind", "floor", "is_valid"),
    [
        ("WarmupDecayLR", None, False),
        ("WarmupCosineLR", 0, False),
        ("WarmupCosineLR", 0.1, True),
        ("cosine", 0, False),
        ("linear", 0, False),
        ("linear", 0.1, True),
    ],
)
def test_no_step_has_a_learning_rate_of_zero(
    kind: str, floor: float | None, is_valid: bool
) -> None:
    params: dict[str, float] = {"warmup_num_steps": 5, "total_num_steps": 80}
    if floor is not None:
        params["min_ratio" if kind in ("cosine", "linear") else "cos_min_ratio"] = floor
    found = problems(scheduler={"type": kind, "params": params})
    assert (found == []) == is_valid
    if not is_valid:
        assert "the last 20 steps have a learning rate of 0" in found[0]


def test_warmup_rises() -> None:
    params = {"warmup_num_steps": 5, "warmup_min_lr": 0.01}
    message = only_problem(scheduler={"type": "WarmupLR", "params": params})
    assert "warmup_min_lr 0.01 must be at most optimizer.params.lr 0.001" in message


def test_profiled_steps_and_ranks_exist() -> None:
    profile = ("training.steps=12", "training.profile.start_step=10")
    assert problems(*profile, world_size=1) == []
    assert only_problem(*profile, "training.profile.steps=4") == (
        "training.profile.start_step 10 + training.profile.steps 4 - 1 is the last profiled step, "
        "and must be at most training.steps 12; profile earlier or fewer steps"
    )
    ranks = (*profile, "training.profile.ranks=[0, 3]")
    assert problems(*ranks, world_size=4) == problems(*ranks) == []
    assert only_problem(*ranks, world_size=2) == (
        "training.profile.ranks names rank 3, but world size 2 (from WORLD_SIZE) has the ranks 0 "
        "to 1; remove it"
    )
    assert problems(*ranks, "parallel.spare_ranks=true", world_size=2) == []
    for wrong in ("start_step=0", "steps=0", "ranks=[-1]", "ranks=[]", "every=5"):
        assert problems(*profile, f"training.profile.{wrong}") != [], wrong
    assert "training.profile.start_step" in only_problem("training.profile.steps=4")


def test_a_scaled_rate_has_a_base_and_a_base_scales() -> None:
    both = ["training.lr_scaling=sqrt", "training.base_batch_size=8"]
    assert problems(*both) == problems("training.lr_scaling=none") == []
    assert "state training.base_batch_size" in only_problem(both[0])
    assert 'no effect with training.lr_scaling "none"' in only_problem(both[1])


def test_a_learning_rate_is_scaled_to_a_number_above_0_and_at_most_1e20() -> None:
    scaled = ("training.lr_scaling=linear", "training.base_batch_size=1")
    assert problems("optimizer.params.lr=6e18", *scaled, world_size=1) == []
    assert only_problem("optimizer.params.lr=1e19", *scaled, world_size=1).startswith(
        "optimizer.params.lr 1e+19 is scaled to 1.6e+20 (training.lr_scaling linear, "
        "train_batch_size 16, training.base_batch_size 1), but it must be above 0"
    )
    tiny = ("optimizer.params.lr=5e-324", scaled[0], "training.base_batch_size=1000")
    assert "is scaled to 0.0 " in only_problem(*tiny, world_size=1)


@pytest.mark.parametrize("setting", ["train", "validation"])
def test_weights_are_stated_for_all_sources_of_a_list_or_for_none(setting: str) -> None:
    heavy, light = {"path": "a.txt", "weight": 3}, {"path": "b.txt", "weight": 0.5}
    assert problems(data={setting: [heavy, light]}) == problems(data={setting: ["a", "b"]}) == []
    assert only_problem(data={setting: [heavy, "c.txt", light]}) == (
        f"data.{setting} must state a weight for all of its sources or for none, but it states "
        f"one for 2 of 3; data.{setting}[1] (c.txt) is the first without one"
    )


def test_the_pure_config_is_checked_without_a_world() -> None:
    parse_config(small(train_batch_size=17))  # 17 is odd and the micro-batch 2: a law of the world
    assert len(problems(train_batch_size=17, world_size=1)) == 1


def test_only_a_key_that_is_wrong_itself_lets_a_rule_be_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A misspelt name in a rule once counted as an absent key, so the rule was always skipped."""

    def misspelt(config: RunConfig) -> Iterator[str]:
        yield f"{config.model.hidden_siz}"  # type: ignore[attr-defined]

    monkeypatch.setattr(layout, "RULES", [misspelt])
    with pytest.raises(AttributeError, match="hidden_siz"):
        problems()


# --- gradient compression -------------------------------------------------------------------------

INT8 = 'parallel.gradient_compression={"type": "int8"}'
POWER_SGD = 'parallel.gradient_compression={"type": "powersgd"}'


@pytest.mark.parametrize("how", [INT8, POWER_SGD, "parallel.gradient_compression=bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_compresses(how: str, stage: int) -> None:
    assert problems(how, f"zero_optimization.stage={stage}", world_size=2) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_reduced_in_parts_is_not_compressed(stage: int) -> None:
    each = ("parallel.gradient_reduction=per_micro_batch", f"zero_optimization.stage={stage}")
    assert only_problem(INT8, *each) == (
        'parallel.gradient_compression "int8" compresses the complete gradient of a step, but '
        f'with zero_optimization.stage {stage} and parallel.gradient_reduction "per_micro_batch" '
        'no rank keeps it; set parallel.gradient_reduction to "per_step" or "auto"'
    )
    assert problems("parallel.gradient_compression=bf16", *each) == []
    assert problems(INT8, each[0], "zero_optimization.stage=1") == []


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        ("zero_optimization.overlap_comm=true", "remove zero_optimization.overlap_comm"),
        ("communication_data_type=fp32", "remove one of them"),
        ("data_types.grad_accum_dtype=bf16", 'set grad_accum_dtype to "fp32"'),
    ],
)
@pytest.mark.parametrize("how", [INT8, POWER_SGD])
def test_what_contradicts_compression_is_refused(how: str, override: str, mend: str) -> None:
    message = only_problem(how, override, "bf16.enabled=true")
    assert message.startswith("parallel.gradient_compression") and mend in message


def test_two_keys_cannot_state_the_type_of_messages() -> None:
    assert only_problem("parallel.gradient_compression=bf16", "communication_data_type=bf16") == (
        'parallel.gradient_compression "bf16" and communication_data_type "bf16" both state what '
        "is sent for a gradient; remove one of them"
    )


def test_copies_of_key_value_heads_are_not_compressed_apart() -> None:
    shared = (*LLAMA, "model.num_key_value_heads=2", "parallel.tensor=4")
    assert problems(*shared) == []
    assert only_problem(*shared, INT8).endswith(
        "parallel.tensor 4 must be at most model.num_key_value_heads 2"
    )
    assert problems(*shared[:-1], "parallel.tensor=2", INT8) == []
