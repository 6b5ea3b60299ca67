"""A wheel of the project works outside the checkout: presets, schema, page and command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed package, and with no file of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    source = folder / "source"
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "megaspeed", "setup.py", "setup.cfg", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", *options, "-w", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", *options, "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run(installed: Path, folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    environment["MEGASPEED_CACHE"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package_checks_plans_and_trains(installed: Path, tmp_path: Path) -> None:
    config = {
        "model": {"preset": "gpt2-nano"},
        "data": {"sequence_length": 32, "train": [str(ROOT / "LICENSE")]},
        "training": {"steps": 2},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    where = run(installed, tmp_path, "-c", "import megaspeed; print(megaspeed.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    megaspeed = ("-m", "megaspeed.cli")
    run(installed, tmp_path, *megaspeed, "check", "--config", "run.json")
    run(installed, tmp_path, *megaspeed, "plan", "--config", "run.json", "--world-size", "8")
    run(installed, tmp_path, *megaspeed, "train", "--config", "run.json")
    assert len((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()) >= 2
    run(installed, tmp_path, *megaspeed, "report", "runs/run")
    assert "<figure>" in (tmp_path / "report.html").read_text()
    run(installed, tmp_path, "-m", "megaspeed.config.json_schema", "schema.json")
    schema = json.loads((tmp_path / "schema.json").read_text())
    assert schema == json.loads((ROOT / "ds_configs/megaspeed.schema.json").read_text())
