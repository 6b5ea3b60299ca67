"""An unknown key is an error that names the key that was probably meant."""

from typing import Any

import pytest

from megaspeed.config.validation import OTHER_NAMES, all_key_paths, keys_at
from tests.config.small import only_problem, problems


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("gradient_clipp1ng=1.0", "gradient_clipping"),
        ("zero_optimisation.stage=1", "zero_optimization"),
        ("model.hiden_size=4", "model.hidden_size"),
        ("optimizer.params.beta=[0.9, 0.9]", "optimizer.params.betas"),
        (
            "zero_optimization.offload_optimizer.devise=cpu",
            "zero_optimization.offload_optimizer.device",
        ),
        ("hidden_size=4", "model.hidden_size"),
        ("training.sequence_length=4", "data.sequence_length"),
        ("model.n_layer=4", "model.num_hidden_layers"),
        ("parallel.tp=4", "parallel.tensor"),
        ("parallel.tensor_parallel=4", "parallel.tensor"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    unknown = override.partition("=")[0].replace("zero_optimisation.stage", "zero_optimisation")
    assert only_problem(override) == (
        f"{unknown} is an unknown key; the nearest known key is {nearest}"
    )


def test_a_rule_is_silent_about_the_key_that_was_meant() -> None:
    """Otherwise the default of 1000 warmup steps would be a second problem."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_steps": 4}}
    assert only_problem(scheduler=scheduler).endswith("is scheduler.params.warmup_num_steps")


def test_a_misspelt_required_key_is_not_missing_too() -> None:
    assert only_problem(data={"sequence_length": None, "sequence_lenght": 32}) == (
        "data.sequence_lenght is an unknown key; the nearest known key is data.sequence_length"
    )


def test_a_key_without_a_nearest_one_gets_the_keys_of_its_section() -> None:
    assert only_problem(data={"zzz": 1}) == (
        "data.zzz is an unknown key; the keys of data are reset_at_documents, seed, "
        "sequence_length, tokenizer, train, validation, validation_fraction"
    )


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("wieght", "the nearest known key is data.train[1].weight"),
        ("textfield", "the nearest known key is data.train[1].text_field"),
        (
            "zzz",
            "the keys of data.train[1] are configuration, dataset, path, revision, split, "
            "streaming, text_field, weight",
        ),
    ],
)
def test_an_unknown_key_of_a_source_is_reported_as_such(key: str, message: str) -> None:
    """A source may also be a string, but the message does not ask for one."""
    sources = ["a.txt", {"path": "b.txt", key: 1}]
    assert only_problem(data={"train": sources}) == (
        f"data.train[1].{key} is an unknown key; {message}"
    )


def test_a_key_of_another_scheduler_is_reported_as_such() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "cos_min_ratio": 0.1}}
    assert "belongs to another scheduler.type" in only_problem(scheduler=scheduler)


def test_unknown_keys_are_reported_all_at_once() -> None:
    found = problems(aa=1, model={"bb": 1, "cc": 1}, optimizer={"params": {"dd": 1}})
    assert len(found) == 4


def test_other_names_lead_to_keys_that_exist_and_are_not_keys() -> None:
    assert set(OTHER_NAMES.values()) <= set(all_key_paths())
    leaves = {path.rpartition(".")[2] for path in all_key_paths()}
    assert not leaves & set(OTHER_NAMES)


def test_the_keys_of_a_section_do_not_depend_on_where_it_stands_in_a_list() -> None:
    assert keys_at(("data", "train", 3)) == keys_at(("data", "train"))
    assert "weight" in keys_at(("data", "train"))
    assert {"model", "train_batch_size"} < set(keys_at(()))


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ("int9", '"none" or "bf16" or an object with the type "int8" or "powersgd"'),
        ({"type": "int9"}, '"int8" or "powersgd"'),
        ({"rank": 3}, '"int8" or "powersgd"'),
        ({"type": "int8", "block": 3}, "at least 16"),
    ],
)
def test_a_wrong_compression_lists_the_valid_ones(stated: Any, wanted: str) -> None:
    message = only_problem(parallel={"gradient_compression": stated})
    assert message.startswith("parallel.gradient_compression")
    assert message.endswith(f"wanted {wanted}")


def test_a_key_of_another_compression_is_reported_as_such() -> None:
    stated = {"type": "int8", "rank": 3}
    assert "belongs to another parallel.gradient_compression.type" in only_problem(
        parallel={"gradient_compression": stated}
    )
