"""The Python API: the same runs and figures as the commands, and an import that stays light."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megaspeed
from megaspeed.cli import main
from megaspeed.config.errors import ConfigError
from tests.support.forked import run_forked
from tests.support.tiny import GPT2

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.json"
    values = {
        "model": GPT2,
        "data": {"train": [str(ROOT / "LICENSE")], "sequence_length": 16},
        "training": {"steps": 4, "run_dir": str(tmp_path / "run")},
        "train_batch_size": 12,
    }
    file.write_text(json.dumps(values))
    return file


def python(*arguments: str, folder: Path) -> str:
    """Run a Python process, which must succeed. Return its output."""
    environment = {**os.environ, "MEGASPEED_CACHE": str(folder / "cache")}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_import_loads_no_other_package(tmp_path: Path) -> None:
    code = "import sys, megaspeed; print(*(m for m in sys.modules if m.startswith('megaspeed')))"
    assert set(python("-c", code, folder=tmp_path).split()) == {"megaspeed", "megaspeed.version"}


def test_dir_lists_the_api() -> None:
    assert {"__version__", "load_config", "plan", "train"} <= set(dir(megaspeed))


def test_a_dict_is_refused_with_what_is_wanted() -> None:
    values: Any = {"data": {"sequence_length": 16}}
    for call in (
        lambda: megaspeed.load_config(values),
        lambda: megaspeed.plan(values, world_size=1),
        lambda: megaspeed.train(values),
    ):
        with pytest.raises(TypeError, match="name the path of a JSON file, not a dict"):
            call()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"megaspeed {megaspeed.__version__}\n"


@pytest.mark.parametrize(
    "overrides",
    [
        {"training.steps": 7, "optimizer": {"params": {"betas": [0.8, 0.9]}}},
        ["training.steps=7", "optimizer.params.betas=[0.8, 0.9]"],
    ],
    ids=["mapping", "settings"],
)
def test_a_configuration_is_read_and_changed(config: Path, overrides: Any) -> None:
    loaded = megaspeed.load_config(config, overrides=overrides)
    assert loaded.training.steps == 7 and loaded.optimizer.params.betas == (0.8, 0.9)
    assert loaded.optimizer.params.lr == megaspeed.load_config(config).optimizer.params.lr


def test_all_mistakes_are_raised_at_once(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        megaspeed.load_config(config, overrides={"training.step": 7, "model.hidden_size": -1})
    assert len(caught.value.problems) >= 2
    with pytest.raises(ConfigError, match=r"parallel\.tensor"):
        megaspeed.plan(config, world_size=2, overrides={"parallel.tensor": 3})


def test_a_plan_has_the_figures_of_the_command(config: Path, tmp_path: Path) -> None:
    change = "zero_optimization.stage=2"
    options = ["--config", str(config), "--world-size", "4", "--set", change]
    assert main(["plan", *options, "--device", "a100-80gb", "--json", str(tmp_path / "plan")]) == 0
    figures = megaspeed.plan(config, world_size=4, overrides=[change], device="a100-80gb")
    assert json.loads(json.dumps(figures)) == json.loads((tmp_path / "plan").read_text())
    named = megaspeed.plan(
        config, world_size=4, overrides=[change], cluster={"device": "a100-80gb"}
    )
    assert named == figures


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"device": "cpu"}, "name an accelerator"),
        ({"nodes": 1, "gpus_per_node": 2}, "4 ranks need more than the 2 devices"),
        ({"nics": 1}, "nics is an unknown key"),
    ],
)
def test_a_cluster_that_cannot_be_planned_for_is_refused(
    config: Path, cluster: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        megaspeed.plan(config, world_size=4, cluster=cluster)


def test_a_training_that_fails_raises_an_exception(config: Path, tmp_path: Path) -> None:
    """The run has its own process, because it changes signal handlers and settings of torch."""
    code = (
        "import megaspeed\n"
        "try:\n"
        f"    megaspeed.train({str(config)!r}, ['data.train=[\"/no/such/file\"]'])\n"
        "except RuntimeError as error:\n"
        "    print('raised:', error)\n"
    )
    (tmp_path / "program.py").write_text(code)
    ended = run_forked([tmp_path / "program.py"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"raised: the training of {config} ended with exit code 2" in ended.stdout


@pytest.mark.timeout(400)
def test_the_example_plans_and_trains_alone_and_with_two_processes(tmp_path: Path) -> None:
    ended = run_forked([ROOT / "examples" / "api.py"], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = ended.stdout
    steps = [line.split()[1] for line in said.splitlines() if "grad norm" in line]
    assert steps == ["1", "5", "10", "15", "20", "21", "25", "30"]
    assert "pp 1 x dp 2 x tp 1 = 2 ranks" in said and "resuming from" in said
