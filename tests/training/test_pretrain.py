"""The main job ends with exit code 1 where a run fails (the rest: `tests/test_launchers.py`)."""

import json
import os
from pathlib import Path

import pytest

from megaspeed.topology import LaunchEnvironment
from megaspeed.training import pretrain
from tests.parallel.tiny import GPT2
from tests.rank_pool import RankPool

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.json"
    values = {
        "model": GPT2,
        "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
        "training": {"steps": 50, "run_dir": str(tmp_path / "run"), "max_skipped_steps": 2},
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
    }
    file.write_text(json.dumps(values))
    return file


def exit_code(launch: LaunchEnvironment, config: Path, changes: list[list[str]]) -> int:
    """Of the main job on this rank, whose command line has changes of its own."""
    os.environ["MEGASPEED_CACHE"] = str(config.with_name("cache"))
    return pretrain.main(["--config", str(config), "--set", *changes[launch.rank]])


def test_a_run_that_diverges_ends_with_1_and_leaves_its_metrics(
    pool: RankPool, config: Path
) -> None:
    changes = ["optimizer.params.lr=1e25", "parallel.tensor=2"]
    assert pool.run(2, exit_code, config, [changes, changes]) == [1, 1]
    lines = (config.with_name("run") / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["skipped"] for record in records[-3:]] == [False, True, True]
    assert records[-1]["grad_norm"] is None
    assert not (config.with_name("run") / "loss.png").exists()


def test_ranks_that_were_given_different_runs_end_with_1_before_they_train(
    pool: RankPool, config: Path
) -> None:
    changes = [["training.seed=1"], ["training.seed=2"]]
    assert pool.run(2, exit_code, config, changes) == [1, 1]
    assert not (config.with_name("run") / "metrics.jsonl").exists()


def test_a_command_line_without_a_config_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        pretrain.main([])
    assert stop.value.code == 2
    assert "--config" in capsys.readouterr().err
