"""The main job ends with a message and an exit code (the rest: `tests/test_launchers.py`)."""

import json
import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from megaspeed.topology import Grid, LaunchEnvironment, ParallelContext
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


Ending = tuple[int, str, str]


def ending(config: Path, *changes: str) -> Ending:
    """Exit code, stdout and stderr of the main job in this process."""
    os.environ["MEGASPEED_CACHE"] = str(config.with_name("cache"))
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = pretrain.main(["--config", str(config), "--set", "training.steps=1", *changes])
    return code, out.getvalue(), err.getvalue()


def ending_alone(launch: LaunchEnvironment, config: Path) -> Ending:
    return ending(config)


def ending_without_the_other(launch: LaunchEnvironment, config: Path) -> Ending:
    """As rank 0 of two, of which the other is not there: process groups would wait for it."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # The meeting point of the pool is in use, so that this rank fails to open it as its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return ending(config)


def ending_beside_another_context(launch: LaunchEnvironment, config: Path) -> Ending:
    with ParallelContext.create(Grid(pp=1, dp=1, tp=1), launch, timeout_seconds=30):
        return ending(config)


def test_a_run_folder_that_is_a_file_is_told_before_ranks_meet(
    pool: RankPool, config: Path
) -> None:
    config.with_name("run").write_text("")
    ((code, _, err),) = pool.run(1, ending_without_the_other, config)
    assert code == 2
    assert "training.run_dir" in err and "is a file" in err and "Traceback" not in err


def test_ranks_that_do_not_meet_end_with_1_and_the_name_of_the_group(
    pool: RankPool, config: Path
) -> None:
    ((code, _, err),) = pool.run(1, ending_without_the_other, config)
    assert code == 1
    assert err.startswith("rank 0 could not join the world group (ranks 0, 1)")
    assert "Traceback" not in err


def test_a_layout_that_these_processes_cannot_take_ends_with_2(
    pool: RankPool, config: Path
) -> None:
    ((code, _, err),) = pool.run(1, ending_beside_another_context, config)
    assert code == 2
    assert err.startswith("torch.distributed is in use in this process")


def test_a_second_run_says_where_the_first_ones_files_are(pool: RankPool, config: Path) -> None:
    (first,) = pool.run(1, ending_alone, config)
    (second,) = pool.run(1, ending_alone, config)
    assert first[0] == second[0] == 0
    kept = config.with_name("run") / "earlier-1"
    assert f"an earlier run's files are now in {kept}" in second[1].splitlines()
    assert "earlier" not in first[1]
    assert {file.name for file in kept.iterdir()} == {"config.json", "metrics.jsonl", "loss.png"}


def test_a_command_line_without_a_config_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        pretrain.main([])
    assert stop.value.code == 2
    assert "--config" in capsys.readouterr().err
