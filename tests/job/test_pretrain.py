"""The main job ends with a message and an exit code. (See also ``tests/test_launchers.py``.)"""

import json
import os
import resource
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock

from megaspeed.job import pretrain, run_folder
from megaspeed.job.resume import Restarts
from megaspeed.job.run_folder import LOCK
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2

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
    """Return the exit code of the main job on this rank. Each rank has its own changes."""
    os.environ["MEGASPEED_CACHE"] = str(config.with_name("cache"))
    return pretrain.main(["--config", str(config), "--set", *changes[launch.rank]])


def test_a_run_that_diverges_ends_with_1_and_leaves_its_metrics(
    pool: RankPool, config: Path
) -> None:
    changes = ["optimizer.params.lr=1e20", "parallel.tensor=2"]
    assert pool.run(2, exit_code, config, [changes, changes]) == [1, 1]
    lines = (config.with_name("run") / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["skipped"] for record in records[-3:]] == [False, True, True]
    assert records[-1]["grad_norm"] is None
    assert not (config.with_name("run") / "loss.png").exists()


def test_ranks_that_were_given_different_runs_end_with_2_before_they_train(
    pool: RankPool, config: Path
) -> None:
    changes = [["training.seed=1"], ["training.seed=2"]]
    assert pool.run(2, exit_code, config, changes) == [2, 2]
    assert not (config.with_name("run") / "metrics.jsonl").exists()


Ending = tuple[int, str, str]


def ending(config: Path, *changes: str) -> Ending:
    """Run the main job in this process. Return its exit code, stdout and stderr."""
    os.environ["MEGASPEED_CACHE"] = str(config.with_name("cache"))
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = pretrain.main(["--config", str(config), "--set", "training.steps=1", *changes])
    return code, out.getvalue(), err.getvalue()


def ending_alone(launch: LaunchEnvironment, config: Path) -> Ending:
    return ending(config)


def ending_without_the_other(launch: LaunchEnvironment, config: Path, *changes: str) -> Ending:
    """Run rank 0 of two without the other rank. With process groups, it would wait."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # The pool uses the address where ranks meet, so this rank fails to open it for itself.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return ending(config, *changes)


def ending_beside_another_context(launch: LaunchEnvironment, config: Path) -> Ending:
    with ParallelContext.create(Grid(pp=1, dp=1, tp=1), launch, timeout_seconds=limit(30)):
        return ending(config)


def test_a_run_folder_that_is_a_file_is_reported_before_ranks_meet(
    pool: RankPool, config: Path
) -> None:
    config.with_name("run").write_text("")
    ((code, _, err),) = pool.run(1, ending_without_the_other, config)
    assert code == 2
    assert "training.run_dir" in err and "is a file" in err and "Traceback" not in err


def test_ranks_that_cannot_meet_end_with_1_and_the_address(pool: RankPool, config: Path) -> None:
    ((code, _, err),) = pool.run(1, ending_without_the_other, config)
    assert code == 1
    assert err.startswith("rank 0 could not listen at 127.0.0.1:")
    assert "Traceback" not in err


def test_a_layout_that_these_processes_cannot_take_ends_with_2(
    pool: RankPool, config: Path
) -> None:
    ((code, _, err),) = pool.run(1, ending_beside_another_context, config)
    assert code == 2
    assert err.startswith("torch.distributed is in use in this process")


def endings(launch: LaunchEnvironment, config: Path, commands: list[list[str]]) -> list[Ending]:
    """Run the main job once for each command, one after the other."""
    return [ending(config, *command) for command in commands]


def endings_without_onednn(
    launch: LaunchEnvironment, config: Path, commands: list[list[str]]
) -> list[Ending]:
    torch.backends.mkldnn.set_flags(_enabled=False)
    return endings(launch, config, commands)


def test_bf16_on_a_cpu_without_its_instructions_is_warned_of(
    pool: RankPool, config: Path, tmp_path: Path
) -> None:
    commands = [["bf16.enabled=true"], [f"training.run_dir={tmp_path / 'fp32'}"]]
    (bf16, fp32), of_rank_1 = pool.run(2, endings_without_onednn, config, commands)
    assert [bf16[0], fp32[0]] == [0, 0]
    assert bf16[1].startswith("warning: bf16.enabled is true, but matrix products in bf16 take")
    assert "warning" not in fp32[1]
    assert [out for _, out, _ in of_rank_1] == ["", ""]


def endings_without_a_decision(
    launch: LaunchEnvironment, config: Path, error: Exception
) -> list[Ending]:
    """Run the main job on this rank. Rank 0 cannot decide where a restart continues."""
    with mock.patch.object(Restarts, "opened", new_callable=mock.PropertyMock, side_effect=error):
        return endings(launch, config, [[]])


def test_a_failed_decision_about_a_restart_is_no_wrong_input(pool: RankPool, config: Path) -> None:
    """Exit code 2 would end the job permanently."""
    error = KeyError("a mistake in the code")
    ((first,), (second,)) = pool.run(2, endings_without_a_decision, config, error)
    assert (first[0], second[0]) == (1, 1)
    assert "a mistake in the code" in first[2] and second[2] == ""
    assert not (run_dir_of(config) / "config.json").exists()


def run_dir_of(config: Path) -> Path:
    return config.with_name("run")


def records(config: Path) -> list[dict[str, Any]]:
    lines = (run_dir_of(config) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def files_in(folder: Path) -> dict[str, bytes]:
    """Return name -> content of all files in the folder and below."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def steps(number: int) -> str:
    return f"training.steps={number}"


EACH_STEP = ["training.save_interval=1", "training.log_interval=1"]


def test_a_run_that_is_started_again_continues_as_if_it_had_not_ended(
    pool: RankPool, config: Path, tmp_path: Path
) -> None:
    through = tmp_path / "through"
    commands = [
        [steps(2), *EACH_STEP],
        [steps(4), *EACH_STEP],
        [steps(4), *EACH_STEP, f"training.run_dir={through}"],
    ]
    ((first, second, whole),) = pool.run(1, endings, config, commands)
    assert first[0] == second[0] == whole[0] == 0
    lines = (through / "metrics.jsonl").read_text().splitlines()
    for record, uninterrupted in zip(records(config), map(json.loads, lines), strict=True):
        for key in ("step", "loss", "grad_norm", "learning_rate", "tokens"):
            assert record[key] == uninterrupted[key], "to the last bit"
    loss, saved_loss = records(config)[2]["loss"], records(config)[1]["loss"]
    newest = run_dir_of(config) / "checkpoints" / "step-00000002"
    assert f"resuming from {newest}" in second[1].splitlines()
    assert f"resumed at step 3: loss {loss:.4f}; {saved_loss:.4f} when saved (step 2)" in second[1]
    assert "resum" not in first[1] and "earlier" not in first[1] + second[1]
    kept = sorted(path.name for path in newest.parent.iterdir())
    assert kept == ["step-00000002", "step-00000003", "step-00000004"], "keep_last is 3"


def test_a_sweep_into_the_folder_of_a_finished_run_is_refused(pool: RankPool, config: Path) -> None:
    layout = ["train_micro_batch_size_per_gpu=6", "zero_optimization.stage=1"]
    commands = [[], ["optimizer.params.lr=0.002"], ["bf16.enabled=true"], layout]
    ((first, rate, precision, other_layout),) = pool.run(1, endings, config, commands)
    assert [first[0], rate[0], precision[0], other_layout[0]] == [0, 2, 2, 0]
    assert "  optimizer.params.lr: 0.001 -> 0.002\n" in rate[2]
    assert "another training.run_dir" in rate[2] and "--fresh" in rate[2]
    assert "larger training.steps" in rate[2] and "nothing is left" not in rate[1]
    assert "  bf16.enabled: false -> true\n" in precision[2]
    assert "nothing is left to train" in other_layout[1]


def test_more_steps_that_move_the_rate_are_warned_of(pool: RankPool, config: Path) -> None:
    scheduler = [
        "scheduler.type=cosine",
        "scheduler.params.warmup_num_steps=1",
    ]
    commands = [[steps(5), *scheduler], [steps(9), *scheduler]]
    ((first, second),) = pool.run(1, endings, config, commands)
    assert (first[0], second[0]) == (0, 0)
    assert "warning: the learning rate of step 6 is " in second[1]
    assert "pass --set optimizer.params.lr=0.001 scheduler=null 'scheduler={" in second[1]
    assert '"total_num_steps": 5' in second[1]
    assert "learning rate of step" not in first[1]


def files_of(run_dir: Path, step: int) -> dict[str, bytes]:
    """Return the tensors of a checkpoint: weights and moments."""
    checkpoint = run_dir / "checkpoints" / f"step-{step:08d}"
    return {file.name: file.read_bytes() for file in checkpoint.glob("*.distcp")}


def test_a_decay_starts_at_a_milestone_as_if_it_had_been_planned(
    pool: RankPool, config: Path, tmp_path: Path
) -> None:
    scheduler = ["scheduler.type=wsd", "scheduler.params.decay_num_steps=2"]
    saves = ["training.save_interval=1", "training.keep_every=2", "training.keep_last=1"]
    long, branch, planned, inside = (tmp_path / n for n in ("run", "branch", "planned", "inside"))
    checkpoints = long / "checkpoints"
    commands = [
        ["training.tokens=1344", *saves],  # 7 steps
        [steps(4), f"training.run_dir={branch}", "--resume", str(checkpoints / "step-00000002")],
        [steps(4), f"training.run_dir={planned}"],
        [steps(8), f"training.run_dir={inside}", "--resume", str(checkpoints / "step-00000006")],
    ]
    commands = [[*scheduler, *command] for command in commands]
    ((first, decayed, whole, jumping),) = pool.run(1, endings, config, commands)
    assert [first[0], decayed[0], whole[0], jumping[0]] == [0, 0, 0, 0]
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == [f"step-0000000{step}" for step in (2, 4, 6, 7)], "7 is the newest"
    assert "resumed at step 3" in decayed[1] and "warning" not in decayed[1]
    assert files_of(branch, 4) == files_of(planned, 4) != {}, "to the last bit"
    lines = (branch / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-3 * (1 - 0.9 * 0.5**0.5), 1e-4])
    assert "warning: the learning rate of step 7 is " in jumping[1]


def test_a_run_with_tokens_ends_when_they_are_trained_although_the_batch_has_changed(
    pool: RankPool, config: Path
) -> None:
    """The first steps have 192 tokens, and the others 384."""
    large = ["training.tokens=1K", "train_batch_size=24", "scheduler.type=linear"]
    commands = [["training.tokens=400"], large, large]
    ((first, second, third),) = pool.run(1, endings, config, commands)
    assert [first[0], second[0], third[0]] == [0, 0, 0]
    tokens = [record["tokens"] for record in records(config)]
    assert tokens == [192, 384, 576, 960, 1344]
    assert "length: 1,000 tokens, trained after step 5" in second[1]
    assert "training.steps" not in second[1], "it follows from the tokens"
    assert records(config)[-1]["learning_rate"] == pytest.approx(1e-4), "the schedule ends there"
    assert "nothing is left to train" in third[1] and "1,000 (5 steps)" in third[1]
    written = json.loads((run_dir_of(config) / "config.json").read_text())["training"]
    assert (written["steps"], written["tokens"]) == (3, 1000)


def test_a_run_that_is_complete_says_so_and_changes_nothing(pool: RankPool, config: Path) -> None:
    ((first,),) = pool.run(1, endings, config, [[]])
    before = files_in(run_dir_of(config))
    ((second,),) = pool.run(1, endings, config, [[]])
    assert first[0] == second[0] == 0
    assert "nothing is left to train" in second[1]
    assert "training.steps is 1" in second[1] and "--fresh" in second[1]
    assert files_in(run_dir_of(config)) == before


def test_a_fresh_run_says_where_the_first_ones_files_are(pool: RankPool, config: Path) -> None:
    ((first, second),) = pool.run(1, endings, config, [[], ["--fresh"]])
    assert first[0] == second[0] == 0
    kept = run_dir_of(config) / "earlier-1"
    assert f"an earlier run's files are now in {kept}" in second[1].splitlines()
    assert {file.name for file in kept.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "starts.jsonl",
        "parts.jsonl",
        "loss.png",
        "checkpoints",
    }
    assert (kept / "checkpoints" / "step-00000001").is_dir()
    assert [record["loss"] for record in records(config)] == [
        json.loads(line)["loss"] for line in (kept / "metrics.jsonl").read_text().splitlines()
    ], "the same seed from step 0"


def test_never_is_refused_before_ranks_meet(pool: RankPool, config: Path) -> None:
    """The second launch is rank 0 of two. Without the refusal, it would wait for the other."""
    ((code, _, _),) = pool.run(1, ending_alone, config)
    assert code == 0
    before = files_in(run_dir_of(config))
    ((code, _, err),) = pool.run(1, ending_without_the_other, config, "--resume", "never")
    assert code == 2 and "Traceback" not in err
    assert "--resume never would start over a run" in err and "--fresh" in err
    assert files_in(run_dir_of(config)) == before


def test_a_run_in_the_folder_of_one_that_still_writes_is_refused_and_changes_nothing(
    pool: RankPool, config: Path
) -> None:
    """Not even the save in progress changes, although it looks like the save of a dead run."""
    pool.run(1, ending_alone, config)
    folder = run_dir_of(config)
    writing = folder / "checkpoints" / "step-00000002.writing"
    writing.mkdir()
    (writing / "__0_0.distcp").write_bytes(b"half")
    with FileLock(folder / LOCK):
        before = files_in(folder)
        (((code, _, err),),) = pool.run(1, endings, config, [[steps(2)]])
        assert files_in(folder) == before
    assert code == 2 and "Traceback" not in err
    assert f"another run is writing to {folder}" in err and "training.run_dir" in err


def ending_on_a_disk_of_its_own(
    launch: LaunchEnvironment, config: Path, disks: list[Path], changes: list[str]
) -> Ending:
    os.chdir(disks[launch.rank])
    run_folder._SECONDS_TO_BE_SEEN = 0.3
    return ending(config, *changes)


def test_ranks_that_do_not_share_the_run_folder_end_with_2_before_they_train(
    pool: RankPool, config: Path, tmp_path: Path
) -> None:
    disks = [tmp_path / "node0", tmp_path / "node1"]
    for disk in disks:
        (disk / "runs" / "tiny").mkdir(parents=True)
    changes = ["parallel.tensor=2", "training.run_dir=runs/tiny"]
    first, second = pool.run(2, ending_on_a_disk_of_its_own, config, disks, changes)
    assert first[0] == second[0] == 2
    assert "ranks [1] do not see what rank 0 writes to runs/tiny" in first[1]
    assert all("Traceback" not in err for _, _, err in (first, second))
    assert [files_in(disk) for disk in disks] == [{}, {}]


def test_going_back_to_an_older_checkpoint_leaves_no_trace_of_the_abandoned_branch(
    pool: RankPool, config: Path
) -> None:
    """Two of four steps are abandoned. Then ``auto`` finds the new step 3, not the old step 4."""
    checkpoints = run_dir_of(config) / "checkpoints"
    older = str(checkpoints / "step-00000002")
    commands = [
        [steps(4), *EACH_STEP],
        [steps(3), *EACH_STEP, "training.seed=1", "--resume", older],
        [steps(5), *EACH_STEP],
    ]
    ((_, back, on),) = pool.run(1, endings, config, commands)
    assert back[0] == on[0] == 0
    earlier = run_dir_of(config) / "earlier-1"
    assert f"the records after step 2 are now in {earlier}" in back[1].splitlines()
    assert sorted(path.name for path in (earlier / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    abandoned = (earlier / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in abandoned] == [1, 2, 3, 4]
    assert f"resuming from {checkpoints / 'step-00000003'}" in on[1]
    assert [record["step"] for record in records(config)] == [1, 2, 3, 4, 5]


def test_a_broken_checkpoint_is_skipped_and_moved_away(pool: RankPool, config: Path) -> None:
    pool.run(1, endings, config, [[steps(2), *EACH_STEP]])
    broken = run_dir_of(config) / "checkpoints" / "step-00000002"
    (broken / "run_state.json").write_bytes(b"")
    ((ending,),) = pool.run(1, endings, config, [[steps(2), *EACH_STEP]])
    assert ending[0] == 0
    assert f"skipped {broken}: run_state.json has " in ending[1]
    assert "resumed at step 2" in ending[1]
    assert (run_dir_of(config) / "earlier-1" / "checkpoints" / "step-00000002").is_dir()
    assert (broken / "run_state.json").stat().st_size > 0, "step 2 was trained and saved again"


def test_a_run_without_a_whole_checkpoint_is_refused_and_left_as_it_is(
    pool: RankPool, config: Path
) -> None:
    pool.run(1, ending_alone, config)
    broken = run_dir_of(config) / "checkpoints" / "step-00000001"
    (broken / "manifest.json").unlink()
    before = files_in(run_dir_of(config))
    ((code, _, err),) = pool.run(1, ending_alone, config)
    assert code == 2 and "Traceback" not in err
    assert f"{broken}: manifest.json is missing" in err and "--fresh" in err
    assert files_in(run_dir_of(config)) == before


def test_other_data_is_refused_by_name_unless_allowed(pool: RankPool, config: Path) -> None:
    pool.run(1, ending_alone, config)
    before = files_in(run_dir_of(config))
    changed = [steps(2), "data.seed=77"]
    (((code, _, err),),) = pool.run(1, endings, config, [changed])
    assert code == 2 and "Traceback" not in err
    assert "data.seed was" in err and "--allow-data-change" in err
    assert files_in(run_dir_of(config)) == before
    allowed = [*changed, "--allow-data-change"]
    (((code, out, _),),) = pool.run(1, endings, config, [allowed])
    assert code == 0 and "resumed at step 2" in out


def test_another_optimizer_is_refused_unless_allowed(pool: RankPool, config: Path) -> None:
    pool.run(1, ending_alone, config)
    changed = [steps(2), 'optimizer={"type":"Muon"}']
    allowed = [*changed, "--allow-optimizer-change"]
    again = [steps(3), *changed[1:]]
    ((refused, first, second),) = pool.run(1, endings, config, [changed, allowed, again])
    assert refused[0] == 2 and "Traceback" not in refused[2]
    assert "optimizer.type was AdamW and is Muon" in refused[2]
    assert "--allow-optimizer-change" in refused[2] and "dropped" not in refused[1]
    assert first[0] == 0 and "resumed at step 2" in first[1]
    dropped = "dropped: exp_avg and exp_avg_sq of 12 matrices. Their momentum starts at zero."
    assert dropped in first[1]
    assert second[0] == 0 and "resumed at step 3" in second[1] and "dropped" not in second[1]


def test_a_run_continues_in_a_folder_of_its_own_from_anothers_checkpoint(
    pool: RankPool, config: Path, tmp_path: Path
) -> None:
    pool.run(1, ending_alone, config)
    before = files_in(run_dir_of(config))
    branch = tmp_path / "branch"
    command = [steps(2), f"training.run_dir={branch}", "--resume", str(run_dir_of(config))]
    ((ending,),) = pool.run(1, endings, config, [command])
    assert ending[0] == 0 and "resumed at step 2" in ending[1]
    copy, second = ending[1].index("step      1  checkpoint"), ending[1].index("step      2  loss")
    assert copy < second, "its first checkpoint is written before its first step"
    lines = (branch / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]
    assert files_in(run_dir_of(config)) == before


def test_fresh_takes_along_the_state_of_a_checkpoint_that_it_moves_away(
    pool: RankPool, config: Path
) -> None:
    folder = run_dir_of(config)
    commands = [[steps(1)], [steps(2), "--fresh", "--resume", str(folder)]]
    ((_, second),) = pool.run(1, endings, config, commands)
    assert second[0] == 0 and "resumed at step 2" in second[1]
    assert [record["step"] for record in records(config)] == [2]
    assert (folder / "earlier-1" / "checkpoints" / "step-00000001").is_dir()
    anew = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert anew == ["step-00000001", "step-00000002"], "the loaded state is saved again"


def ending_without_room(launch: LaunchEnvironment, config: Path) -> Ending:
    """Run the main job where no file may become as large as the tensors of a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return ending(config)


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_1(
    pool: RankPool, config: Path
) -> None:
    ((code, out, err),) = pool.run(1, ending_without_room, config)
    assert code == 1 and "Traceback" not in err
    assert "step      1  no checkpoint: " in out
    assert (run_dir_of(config) / "loss.png").exists(), "everything else was done"
    assert list((run_dir_of(config) / "checkpoints").iterdir()) == []


def test_no_name_and_no_picture_makes_a_run_that_has_succeeded_fail(
    pool: RankPool, config: Path
) -> None:
    config = config.rename(config.with_name("[red] cost_$5_vs_$10.json"))
    picture = config.with_name("run") / "loss.png"
    ((code, out, err),) = pool.run(1, ending_alone, config)
    assert (code, err) == (0, "") and "[red] cost_$5_vs_$10: 1 steps" in out
    assert f"loss curve: {picture}" in out and picture.is_file()
    picture.unlink()
    picture.mkdir()
    (((code, out, err),),) = pool.run(1, endings, config, [[steps(2)]])
    assert (code, err) == (0, "") and "[red] cost_$5_vs_$10: 2 steps" in out
    assert out.count("warning: the loss curve could not be drawn: IsADirectoryError") == 1
    assert "loss curve: " not in out


def test_a_command_line_without_a_config_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        pretrain.main([])
    assert stop.value.code == 2
    assert "--config" in capsys.readouterr().err
