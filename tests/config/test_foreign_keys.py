"""Every key of DeepSpeed works, is accepted with a note, or is refused with its reason."""

import ast
import copy
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main
from megaspeed.config.document import Document, merge, read_document
from megaspeed.config.foreign_keys import NO_EFFECT, REFUSED, RENAMED, remove
from megaspeed.config.layout import World
from megaspeed.config.loading import all_key_paths, check_document, parse_config
from tests.config.small import only_problem, small, write


def deepspeed_source(name: str) -> ast.Module:
    """Parse a file of the installed DeepSpeed without importing it."""
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / name).read_text())


def json_names(file: str, class_name: str) -> Iterator[str]:
    """Yield the keys of one of DeepSpeed's sections: a field's alias, or its name."""
    tree = deepspeed_source(file)
    (section,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    for field in section.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            keywords = field.value.keywords if isinstance(field.value, ast.Call) else []
            aliases = [word.value.value for word in keywords if word.arg == "alias"]  # type: ignore[attr-defined]
            yield aliases[0] if aliases else field.target.id


@pytest.mark.parametrize(
    ("section", "file", "class_name"),
    [
        ("zero_optimization", "runtime/zero/config.py", "DeepSpeedZeroConfig"),
        (
            "zero_optimization.offload_param",
            "runtime/zero/offload_config.py",
            "DeepSpeedZeroOffloadParamConfig",
        ),
        (
            "zero_optimization.offload_optimizer",
            "runtime/zero/offload_config.py",
            "DeepSpeedZeroOffloadOptimizerConfig",
        ),
        ("bf16", "runtime/precision_config.py", "DeepSpeedBF16Config"),
        ("fp16", "runtime/precision_config.py", "DeepSpeedFP16Config"),
    ],
)
def test_every_key_of_a_deepspeed_section_is_known_or_refused(
    section: str, file: str, class_name: str
) -> None:
    theirs = {f"{section}.{name}" for name in json_names(file, class_name)}
    ours = {path for path in all_key_paths() if path.rpartition(".")[0] == section}
    foreign = {*REFUSED, *NO_EFFECT, *RENAMED}
    assert theirs - ours - foreign == set(), "keys of DeepSpeed without a rule here"
    assert ours - theirs == set(), "keys that DeepSpeed does not have"
    assert set(all_key_paths()) & foreign == set()


def test_keys_that_deepspeed_removed_are_refused_unless_they_only_tune() -> None:
    removed = {
        ast.literal_eval(key)
        for node in deepspeed_source("runtime/config.py").body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "_REMOVED_TOP_LEVEL_CONFIG_KEYS"
        and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if key is not None
    }
    assert len(removed) > 5
    assert removed - set(REFUSED) == {"sparse_gradients"} <= set(NO_EFFECT)


OFF: tuple[dict[str, Any], ...] = (
    {"amp": {}},
    {"amp": {"enabled": False, "opt_level": "O1"}},
    {"torch_autocast": {"dtype": "bfloat16"}},
    {"elasticity": {"enabled": False}},
    {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}},
    {"curriculum_learning": {"enabled": False}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {
        "compression_training": {
            "row_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {"a": 1}}
        }
    },
    {"compile": {"deepcompile": False}},
    {"sparse_attention": None},
    {"prescale_gradients": False},
    {"optimizer": {"params": {"bias_correction": True, "adam_w_mode": True, "amsgrad": False}}},
    {"zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1}},
    {"zero_optimization": {"cpu_offload": False, "round_robin_gradients": False}},
    {"tensorboard": {"enabled": False, "output_path": "x"}},
    {"wandb": {"project": "x"}},
    {"comet": {"enabled": "auto"}},
    {"wandb": {"enabled": "auto"}},
    {"tensor_parallel": {"autotp_size": 0}},
)


@pytest.mark.parametrize("off", OFF, ids=str)
def test_what_is_off_is_accepted(off: dict[str, Any]) -> None:
    assert parse_config(small(**off)) == parse_config(small())


def notes(*, world_size: int | None = None, **keys: Any) -> tuple[str, ...]:
    """Return the notes about the small config with these keys. It must have no problem."""
    world = None if world_size is None else World(world_size, "--world-size")
    document = Document(small(**keys))
    assert check_document(document, world).problems == ()
    return check_document(document, world).notes


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return JSON values with this value at a dotted path."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("key", [*NO_EFFECT, "_comment", "bf16._why"])
def test_a_key_without_effect_gives_the_same_run_and_a_note(key: str) -> None:
    """A run depends only on its config. ``tests/zero/test_foreign_keys.py`` trains one."""
    values: tuple[Any, ...] = (True, 3, 0.5, "x", [], {"enabled": True, "a": 1})
    for value in values:
        changed = nested(key, value)
        assert parse_config(small(**changed)) == parse_config(small())
        assert any(key in note for note in notes(**changed)), value


def test_the_name_of_a_comment_may_have_a_dot() -> None:
    """An earlier version read the name as a path. So the comment stayed and was refused as an
    unknown key.
    """
    commented = small(**{"_see 5.2": "the reason", "bf16": {"_see 5.2": "the reason"}})
    assert parse_config(commented) == parse_config(small())


@pytest.mark.parametrize("key", ["sub_group_size", "reduce_bucket_size"])
def test_a_size_of_0_is_the_default(key: str) -> None:
    zero: dict[str, Any] = {"zero_optimization": {key: 0}}
    assert parse_config(small(**zero)) == parse_config(small())
    assert notes(**zero) == (f"no effect here: zero_optimization.{key}: 0 stands for the default",)


@pytest.mark.parametrize(
    ("key", "value", "stages"),
    [
        ("stage3_max_live_parameters", 1000, "3"),
        ("offload_param", {"device": "cpu"}, "3"),
        ("offload_optimizer", {"device": "cpu"}, "1, 2, 3"),
        ("use_multi_rank_bucket_allreduce", True, "1, 2"),
    ],
)
def test_a_key_of_another_stage_is_named(key: str, value: Any, stages: str) -> None:
    for stage in range(4):
        named = notes(zero_optimization={"stage": stage, key: value})
        note = f"no effect here: zero_optimization.{key}: it is for ZeRO-{stages}"
        assert named == (() if str(stage) in stages else (note,))


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_read_as_its_new_one(old: str) -> None:
    new = RENAMED[old]
    kinds: dict[str, Any] = {"bf16": {"enabled": True}, "parallel.tensor": 2}
    value = kinds.get(new, {"device": "cpu"} if "offload" in new else 7)
    stated = True if "offload" in new else value
    zero: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    old_values: dict[str, Any] = merge(zero, nested(old, stated))
    assert parse_config(small(**old_values)) == parse_config(
        small(**merge(zero, nested(new, value)))
    )
    assert f"{old} is read as {new}" in notes(**old_values)
    if isinstance(value, dict):
        off = {"enabled": False} if new == "bf16" else {"device": "none"}
        another = merge(old_values, nested(new, off))
        assert only_problem(**another).startswith(f"{old} means {new}, ")


@pytest.mark.parametrize("service", ["tensorboard", "wandb"])
def test_an_enabled_service_is_read_as_report_to(service: str) -> None:
    values: dict[str, Any] = {service: {"enabled": True, "output_path": "logs"}}
    assert parse_config(small(**values)).training.report_to == (service,)
    both = {**values, "training": {"report_to": [service]}}
    assert parse_config(small(**both)).training.report_to == (service,)
    assert notes(**values) == (
        f'{service} is read as training.report_to ["{service}"], which has no other keys',
    )


def test_adamw_may_be_written_in_small_letters() -> None:
    assert parse_config(small(optimizer={"type": "adamw"})).optimizer.type == "AdamW"


def leaves_of_deepspeed() -> list[str]:
    own = {"model", "parallel", "data", "training"}
    paths = [path for path in all_key_paths() if path.split(".")[0] not in own]
    sections = {path.rpartition(".")[0] for path in paths}
    return [path for path in paths if path not in sections and path != "scheduler.type"]


@pytest.mark.parametrize("key", leaves_of_deepspeed())
def test_auto_is_as_if_omitted(key: str) -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}
    if "min_ratio" in key and "params.min" in key:
        scheduler["type"] = "cosine"
    if "_lr" in key:
        scheduler["type"] = "WarmupDecayLR"
    base = small(scheduler=scheduler) if key.startswith("scheduler") else small()
    if key == "scheduler.params.warmup_num_steps":
        base["training"]["steps"] = 2000
    if key.startswith("train_micro"):
        base["gradient_accumulation_steps"] = 1
    omitted = copy.deepcopy(base)
    remove(omitted, tuple(key.split(".")))
    auto = merge(base, nested(key, "auto"))
    assert parse_config(auto) == parse_config(omitted)
    assert parse_config(auto).model_fields_set == parse_config(omitted).model_fields_set
    (note, *_) = check_document(Document(auto), World(2, "--world-size")).notes
    assert note.startswith(f'"auto" means omitted here: {key} ')


def test_the_note_lists_each_auto_with_its_value() -> None:
    """Hugging Face's Trainer accepts such a file."""
    found = notes(
        world_size=2,
        train_batch_size="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"}},
    )
    assert found == (
        '"auto" means omitted here: train_batch_size 4, '
        "gradient_accumulation_steps 1, gradient_clipping 1.0, bf16.enabled false, "
        "zero_optimization.reduce_bucket_size 8388608, optimizer.params.lr 0.001, "
        "optimizer.params.weight_decay 0.01, scheduler.params.warmup_max_lr 0.001",
    )


def test_the_auto_of_a_micro_batch_is_chosen_if_nothing_else_determines_it() -> None:
    auto: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto"}
    for accumulation in ({}, {"gradient_accumulation_steps": "auto"}):
        config = parse_config(small(**auto, **accumulation))
        assert config.train_micro_batch_size_per_gpu == "auto"
        *_, note = sorted(notes(world_size=2, **auto, **accumulation))
        assert note.startswith('train_micro_batch_size_per_gpu "auto": a run takes the largest ')
    stated = parse_config(small(**auto, gradient_accumulation_steps=2))
    assert stated.train_micro_batch_size_per_gpu is None
    (problem,) = check_document(Document(small(train_batch_size="auto", **auto))).problems
    assert problem.startswith("the batch is not determined: write train_batch_size")


def test_auto_in_an_old_name_is_as_if_omitted() -> None:
    old: dict[str, Any] = {"stage": 3, "prefetch_bucket_size": "auto", "cpu_offload": "auto"}
    assert notes(world_size=1, bfloat16={"enabled": "auto"}, zero_optimization=old) == (
        '"auto" means omitted here: bf16.enabled false',
        "bfloat16 is read as bf16",
        '"auto" means omitted here: zero_optimization.cpu_offload',
        '"auto" means omitted here: zero_optimization.prefetch_bucket_size',
    )


def test_a_switch_is_read_as_stage_1() -> None:
    for stage, switch in enumerate((False, True)):
        assert parse_config(small(zero_optimization=switch)).zero_optimization.stage == stage


def test_a_key_without_effect_is_not_called_off() -> None:
    """Gradients are contiguous, whatever the key states."""
    (note,) = notes(zero_optimization={"contiguous_gradients": False})
    assert note.endswith("each part to the rank that owns it")
    params = {"bias_correction": True, "amsgrad": False}
    assert notes(optimizer={"params": params}) == (
        "no effect here: optimizer.params.bias_correction, optimizer.params.amsgrad: this value "
        "changes nothing",
    )


def test_an_old_name_keeps_a_value_of_0() -> None:
    zero = parse_config(small(zero_optimization={"max_live_parameters": 0})).zero_optimization
    assert zero.stage3_max_live_parameters == 0


def test_a_key_in_an_extended_file_is_removed_by_null(tmp_path: Path) -> None:
    base = write(tmp_path / "base.json", small(pipeline={"stages": 2}, graph_harvesting=True))
    file = write(tmp_path / "run.json", {"extends": "base.json"})
    found = check_document(read_document(file, ["hybrid_engine.enabled=true"])).problems
    assert f"no longer supports it; set it to null (from {base})" in found[1]
    assert found[0].endswith(f"set parallel.pipeline (from {base})")
    assert found[2].endswith("it is not for pretraining; remove it (from --set)")
    cleared = ["graph_harvesting=null", "pipeline=null"]
    assert check_document(read_document(file, cleared)).problems == ()


def test_check_prints_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "run.json", small(steps_per_print=2000, gradient_clipping="auto"))
    report = tmp_path / "report.json"
    assert main(["check", "--config", str(file), "--json", str(report)]) == 0
    listed = json.loads(report.read_text())["notes"]
    assert len(listed) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"note: {note}" for note in listed]
    assert lines[-1] == f"{file}: no problem found"
