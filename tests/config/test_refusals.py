"""Every key of DeepSpeed's either works or is refused with its reason."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.loading import parse_config
from megaspeed.config.refusals import REFUSED_KEYS
from megaspeed.config.validation import all_key_paths
from tests.config.small import only_problem, problems, small


def deepspeed_source(name: str) -> ast.Module:
    """A file of the installed DeepSpeed, parsed and not imported."""
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / name).read_text())


def json_names(file: str, class_name: str) -> Iterator[str]:
    """The keys that a section of DeepSpeed's takes: a field's alias, or its name."""
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
        ("comms_logger", "comm/config.py", "CommsLoggerConfig"),
    ],
)
def test_every_key_of_a_deepspeed_section_is_known_or_refused(
    section: str, file: str, class_name: str
) -> None:
    theirs = {f"{section}.{name}" for name in json_names(file, class_name)}
    ours = {path for path in all_key_paths() if path.rpartition(".")[0] == section}
    refused = {name for name in REFUSED_KEYS if name.rpartition(".")[0] == section}
    assert theirs - ours - refused == set(), "keys of DeepSpeed's that we say nothing about"
    assert ours - theirs == set(), "keys that DeepSpeed does not have"
    assert ours & refused == set()


def test_keys_that_deepspeed_removed_are_refused() -> None:
    removed = [
        ast.literal_eval(key)
        for node in deepspeed_source("runtime/config.py").body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "_REMOVED_TOP_LEVEL_CONFIG_KEYS"
        and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if key is not None
    ]
    assert len(removed) > 5
    assert set(removed) <= set(REFUSED_KEYS)


@pytest.mark.parametrize(
    ("patch", "mend"),
    [
        ({"pipeline": {"stages": 2}}, "set parallel.pipeline"),
        ({"tensor_parallel": {"autotp_size": 2}}, "set parallel.tensor"),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "set parallel.activation_checkpointing",
        ),
        ({"checkpoint": {"load_universal": True}}, "its own checkpoints"),
        ({"amp": {"enabled": True}}, "use bf16"),
        ({"sparse_attention": {"mode": "fixed"}}, "no longer supports it"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "with pipeline or tensor"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "with pipeline or tensor"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "no longer train the same model"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "tied embeddings"),
        ({"zero_optimization": {"enable_sanity_checks": True}}, "a deadlock"),
        ({"zero_optimization": {"cpu_offload": True}}, '"offload_optimizer": {"device": "cpu"}'),
        ({"gradient_allreduce_op": "sum"}, "means over the complete batch"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "set gradient_clipping"),
    ],
)
def test_a_key_that_cannot_work_here_is_refused_with_its_mend(patch: Any, mend: str) -> None:
    message = only_problem(**patch)
    assert " cannot be used here: " in message
    assert mend in message


def test_nvme_is_refused_with_its_path() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}}
    assert problems(zero_optimization=zero) == [
        "zero_optimization.offload_param.nvme_path cannot be used here: it is for NVMe "
        "offload; state can only move to host memory, so remove it",
        'zero_optimization.offload_param.device: given "nvme" (a string), wanted "none" or "cpu"; '
        'state can only move to host memory, so write "cpu"',
    ]


def test_a_refused_key_without_effect_is_accepted_and_not_passed_to_deepspeed() -> None:
    config = parse_config(
        small(
            prescale_gradients=False,
            zero_optimization={"zero_hpz_partition_size": 1, "round_robin_gradients": False},
        )
    )
    assert config == parse_config(small())


MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def test_every_monitor_of_deepspeeds_is_refused() -> None:
    (monitors,) = (
        node
        for node in deepspeed_source("monitor/config.py").body
        if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedMonitorConfig"
    )
    theirs = {
        field.target.id
        for field in monitors.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert theirs == set(MONITORS) <= set(REFUSED_KEYS)


@pytest.mark.parametrize("monitor", MONITORS)
def test_a_monitor_is_refused_only_if_it_is_enabled(
    monitor: str,
) -> None:
    enabled: dict[str, Any] = {monitor: {"enabled": True, "project": "x"}}
    message = only_problem(**enabled)
    assert message.startswith(f"{monitor} cannot be used here: ") and "metrics.jsonl" in message
    assert only_problem(f"{monitor}.enabled=true") == message
    for off in ({"enabled": False, "project": "x"}, {"project": "x"}, {}, None):
        assert parse_config(small(**{monitor: off})) == parse_config(small())


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, "train_micro_batch_size_per_gpu"),
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"optimizer": {"params": {"lr": "auto"}}}, "optimizer.params.lr"),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            "zero_optimization.reduce_bucket_size",
        ),
    ],
)
def test_auto_is_explained_if_nothing_replaces_it(patch: Any, path: str) -> None:
    message = only_problem(**patch)
    assert message.startswith(f'{path}: given "auto" (a string), wanted ')
    assert "only Hugging Face's Trainer replaces" in message


def test_our_own_autos_are_no_problem() -> None:
    assert problems(parallel={"data": "auto", "gradient_reduction": "auto"}, world_size=2) == []
