"""Files extend files, and the command line changes both."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.document import merge, parse_override, read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config
from tests.config.small import small, write


def test_merging_follows_rfc_7396() -> None:
    base = {"a": {"x": 1, "y": {"z": 2}}, "b": [1, 2], "c": 3, "d": {"e": 1}}
    patch = {"a": {"y": {"w": 4}}, "b": [5], "c": None, "d": 6}
    assert merge(base, patch) == {"a": {"x": 1, "y": {"z": 2, "w": 4}}, "b": [5], "d": 6}
    assert base["a"] == {"x": 1, "y": {"z": 2}}, "the base is unchanged"


def test_a_null_with_nothing_to_remove_is_kept() -> None:
    assert merge({}, {"scheduler": None}) == {"scheduler": None}


def test_extends_is_relative_to_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "base.json", small())
    write(tmp_path / "deep" / "middle.json", {"extends": "../base.json", "training": {"seed": 7}})
    write(tmp_path / "top.json", {"extends": "deep/middle.json", "train_batch_size": 32})
    config = read_config(tmp_path / "top.json")
    assert (config.train_batch_size, config.training.seed, config.training.steps) == (32, 7, 100)


def test_null_removes_an_inherited_key(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    write(tmp_path / "base.json", small(scheduler=scheduler, gradient_clipping=0.5))
    write(
        tmp_path / "top.json",
        {"extends": "base.json", "scheduler": None, "gradient_clipping": None},
    )
    config = read_config(tmp_path / "top.json")
    assert config.scheduler is None
    assert config.gradient_clipping == 1.0, "DeepSpeed's default"


def test_extends_in_a_circle_shows_the_circle(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        write(tmp_path / f"{name}.json", {"extends": f"{parent}.json"})
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "a.json")
    files = [str(tmp_path / f"{name}.json") for name in "abca"]
    assert f"extends forms a cycle: {' -> '.join(files)}" in caught.value.problems[0]
    assert len(caught.value.problems) == 1, "a missing key is not reported again"


def test_a_file_that_extends_itself_is_a_circle(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"extends": "./a.json"})
    with pytest.raises(ConfigError, match="forms a cycle"):
        read_config(file)


def test_the_same_base_under_two_files_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path / "base.json", small())
    write(tmp_path / "zero1.json", {"extends": "base.json", "zero_optimization": {"stage": 1}})
    write(tmp_path / "zero2.json", {"extends": "zero1.json", "zero_optimization": {"stage": 2}})
    assert read_config(tmp_path / "zero2.json").zero_optimization.stage == 2


def test_a_missing_file_is_named_with_its_referrer_and_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path / "base.json", small())
    file = write(tmp_path / "top.json", {"extends": "bsae.json"})
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    (problem,) = caught.value.problems
    assert f"which {file} extends, does not exist" in problem
    assert f"did you mean {tmp_path / 'base.json'}?" in problem


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        read_config(tmp_path)


@pytest.mark.parametrize("parent", [["base.json"], 3, {"a": 1}])
def test_extends_accepts_one_path(tmp_path: Path, parent: Any) -> None:
    file = write(tmp_path / "top.json", {"extends": parent})
    with pytest.raises(ConfigError, match="wanted the path of one file") as caught:
        read_config(file)
    assert len(caught.value.problems) == 1


def test_a_syntax_error_in_the_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"a" 1}')
    file = write(tmp_path / "top.json", {"extends": "base.json"})
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    (problem,) = caught.value.problems
    assert str(tmp_path / "base.json") in problem and "line 1, column 6" in problem


def test_a_problem_names_the_file_that_has_its_key(tmp_path: Path) -> None:
    write(tmp_path / "base.json", small(gradient_cliping=1.0, training={"stepz": 3}))
    file = write(tmp_path / "top.json", {"extends": "base.json", "data": {"sead": 1}})
    with pytest.raises(ConfigError) as caught:
        read_config(file, ["parallel.tensr=2"])
    found = sorted(caught.value.problems)
    assert found == [
        "data.sead is an unknown key; the nearest known key is data.seed",
        "gradient_cliping is an unknown key; the nearest known key is gradient_clipping "
        f"(from {tmp_path / 'base.json'})",
        "parallel.tensr is an unknown key; the nearest known key is parallel.tensor (from --set)",
        "training.stepz is an unknown key; the nearest known key is training.steps "
        f"(from {tmp_path / 'base.json'})",
    ]


def test_schema_key_is_for_editors_only(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"$schema": "megaspeed.schema.json", **small()})
    assert read_config(file) == read_config(write(tmp_path / "b.json", small()))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("parallel.tensor=2", {"parallel": {"tensor": 2}}),
        ("bf16.enabled=true", {"bf16": {"enabled": True}}),
        ("scheduler=null", {"scheduler": None}),
        ("training.run_dir=runs/a=b", {"training": {"run_dir": "runs/a=b"}}),
        ('data.tokenizer="16"', {"data": {"tokenizer": "16"}}),
        ("optimizer.params.betas=[0.9, 0.95]", {"optimizer": {"params": {"betas": [0.9, 0.95]}}}),
        ('zero_optimization={"stage": 3}', {"zero_optimization": {"stage": 3}}),
        ("training.run_dir=", {"training": {"run_dir": ""}}),
    ],
)
def test_set_values_are_json_or_plain_strings(text: str, tree: dict[str, Any]) -> None:
    assert parse_override(text) == (tree, [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("parallel.tensor", "write key.path=value"),
        ("=3", "write key.path=value"),
        ("parallel..tensor=3", "write key.path=value"),
        ("parallel. tensor=3", "write key.path=value"),
        ("extends=base.json", "belongs in the file"),
        ('data={"seed": 1, "seed": 2}', "is a duplicate key"),
    ],
)
def test_a_wrong_set_is_quoted_with_its_reason(text: str, reason: str) -> None:
    _, (problem,) = parse_override(text)
    assert problem.message.startswith(f"--set {text}: ")
    assert reason in problem.message


def test_overrides_apply_in_order_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", small())
    document = read_document(file, ["training.seed=1", "training.seed=2", "train_batch_size=null"])
    assert document.values["training"]["seed"] == 2
    assert "train_batch_size" not in document.values


def test_a_set_below_a_number_is_a_wrong_type(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", small())
    with pytest.raises(ConfigError) as caught:
        read_config(file, ["train_batch_size.x=1"])
    assert caught.value.problems == (
        'train_batch_size: given {"x": 1} (an object), wanted a whole number (from --set)',
    )


def test_all_wrong_overrides_are_reported_with_the_problems_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", small(zzz=1))
    with pytest.raises(ConfigError) as caught:
        read_config(file, ["one", "two", "parallel.tensor=5"])
    assert len(caught.value.problems) == 5  # two --set, zzz, 12 heads % 5, 384 % 5


def test_a_wrong_path_to_extend_names_its_file_and_keeps_the_other_problems(tmp_path: Path) -> None:
    middle = tmp_path / "middle.json"
    middle.write_text('{"training": {"steps": 1, "steps": 2}, "extends": 5}')
    (tmp_path / "top.json").write_text('{"extends": "middle.json"}')
    document = read_document(tmp_path / "top.json")
    messages = [problem.message for problem in document.problems]
    assert len(messages) == 2 and all(f"(in {middle})" in message for message in messages)
    assert "wanted the path of one file" in messages[1]
    assert document.values == {"training": {"steps": 2}} and not document.is_complete


def test_a_length_in_another_unit_replaces_the_one_before(tmp_path: Path) -> None:
    write(tmp_path / "base.json", small())
    file = write(tmp_path / "top.json", {"extends": "base.json", "training": {"tokens": "1.5M"}})
    training = read_config(file).training
    assert (training.steps, training.tokens) == (None, 1_500_000)
    training = read_config(file, ["training.seed=1", "training.steps=7"]).training
    assert (training.steps, training.tokens) == (7, None)
    both = read_document(file, ['training={"steps": 7, "tokens": 5}', "training.tokens=null"])
    assert both.values["training"] == {"steps": 7}
