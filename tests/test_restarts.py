"""Runs whose ranks die restart automatically, and end with the result of an undisturbed run."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.launched import free_port
from tests.test_faults import Job, alone

# More by hand: KILLS=50 python -m pytest tests/test_restarts.py -k random --timeout 4000
KILLS = int(os.environ.get("KILLS", "3"))
STEPS = 20 + 20 * KILLS
SECONDS = 120 + 10 * KILLS
SAVES = ("training.save_interval=5", "training.hang_timeout_seconds=60")

pytestmark = pytest.mark.timeout(300)


def losses(run_dir: Path) -> dict[int, float]:
    """By step, of a file that has every step once and in order."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    return {record["step"]: record["loss"] for record in records}


def last_step(run_dir: Path) -> int:
    """The last complete record's; 0 before there is one."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def ranks_of(job: Job) -> list[psutil.Process]:
    """Of the attempt that is under way; no supervisor."""
    return [one for one in job.processes() if "TORCHELASTIC_RESTART_COUNT" in one.environ()]


def wait_for_step(job: Job, step: int, within: float = 120) -> None:
    deadline = time.monotonic() + within
    while last_step(job.run_dir) < step:
        assert job.launcher.poll() is None and time.monotonic() < deadline, job.console()
        time.sleep(0.02)


def undisturbed(folder: Path, steps: int, *changes: str) -> dict[int, float]:
    job = Job(folder, "torchrun", f"training.steps={steps}", *SAVES, *changes)
    assert job.ended(SECONDS).code == 0
    return losses(job.run_dir)


@pytest.mark.timeout(400 + 60 * KILLS)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_random_kills_of_random_ranks_leave_no_trace_in_the_losses(
    tmp_path: Path, launcher: str
) -> None:
    """--fresh and --resume DIR say where a launch starts, not where a restart does."""
    expected = undisturbed(tmp_path / "undisturbed", STEPS)
    earlier = Job(tmp_path / "killed", "torchrun", "training.steps=10", *SAVES).ended()
    assert earlier.code == 0
    arguments, options, changes = ["--fresh"], ["--max-restarts", str(KILLS)], list(SAVES)
    if launcher == "deepspeed":
        arguments, options = ["--resume", str(earlier.run_dir)], []
        changes += [f"training.restart={KILLS}", f"training.run_dir={tmp_path / 'other'}"]
    job = Job(
        tmp_path / "killed",
        launcher,
        f"training.steps={STEPS}",
        *changes,
        arguments=arguments,
        launcher_options=options,
    )
    first = 1
    if launcher == "deepspeed":
        job.run_dir, first = tmp_path / "other", 11
    else:
        job.wait_until_said("earlier run's files are now in")
    chance, reached = random.Random(KILLS), first - 1
    for _ in range(KILLS):
        wait_for_step(job, reached + chance.randint(1, 6))
        time.sleep(chance.uniform(0, 0.2))
        reached = last_step(job.run_dir)
        victim = chance.choice(ranks_of(job))
        victim.kill()
        victim.wait()
    ended = job.ended(SECONDS)
    assert ended.code == 0, ended.err
    assert ended.out.count(f" of {KILLS}: the run continues after step ") == KILLS
    found = losses(job.run_dir)
    assert list(found) == list(range(first, STEPS + 1))
    assert all(abs(loss - expected[step]) <= 1e-6 for step, loss in found.items())


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_run_that_always_fails_at_one_step_ends(tmp_path: Path, launcher: str) -> None:
    supervised = launcher == "deepspeed"
    job = Job(
        tmp_path,
        launcher,
        *SAVES,
        *(["training.restart=9"] if supervised else []),
        fault="raise rank=1 step=8",
        launcher_options=[] if supervised else ["--max-restarts", "3"],
    )
    ended = job.ended()
    assert ended.code == 1
    assert ended.out.count("two attempts in a row have failed after step 7, so another rest") == 1
    assert ended.out.count("the run continues after step 5") == 1, "after the first failure"


def test_a_single_process_is_started_again_and_told_to_stop(tmp_path: Path) -> None:
    job = Job(tmp_path, "python", *SAVES, "training.restart=1", ranks=1)
    wait_for_step(job, 7)
    (rank,) = ranks_of(job)
    rank.kill()
    job.wait_until_said("restart 1 of 1: the run continues after step ")
    job.wait_until_said("resumed at step")
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == 0 and "stopped by SIGTERM" in ended.out and ended.saved
    assert "rank 0 was ended by SIGKILL: restart 1 of 1 of all ranks" in ended.err


def test_wrong_input_is_not_tried_again(tmp_path: Path) -> None:
    missing = f'data.train=["{tmp_path / "missing.txt"}"]'
    ended = Job(tmp_path, "deepspeed", "training.restart=3", missing).ended()
    assert ended.code != 0 and ended.err.count("missing.txt") == 1
    assert "restart 1" not in ended.err + ended.out


@pytest.mark.parametrize("victim", [0, 1])
def test_a_supervisor_that_dies_takes_all_with_it(tmp_path: Path, victim: int) -> None:
    """No launcher is there that would end the others."""
    port = str(free_port())
    same = (*SAVES, "training.restart=2", f"training.run_dir={tmp_path / 'run'}")
    jobs = [
        alone(tmp_path / str(rank), *same, MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]
    for job in jobs:
        job.run_dir = tmp_path / "run"
    wait_for_step(jobs[0], 3)
    jobs[victim].launcher.kill()
    ended = [job.ended() for job in jobs]
    assert ended[1 - victim].code == 1
    assert "restart 1 of 2" not in ended[0].err + ended[1].err


def elastic(folder: Path, port: int, ranks: int, *changes: str, fault: str) -> Job:
    """One "node" of one or two."""
    return Job(
        folder,
        "torchrun",
        *SAVES,
        *changes,
        fault=fault,
        ranks=ranks,
        launcher_options=[
            *("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"),
            *("--rdzv-conf", "last_call_timeout=5"),
        ],
    )


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def test_a_run_goes_on_with_half_of_its_nodes_and_a_spare_rank(tmp_path: Path) -> None:
    """6 ranks, of which 4 train, become 3, of which 2 train."""
    steps = 12
    expected = undisturbed(tmp_path / "undisturbed", steps)
    changes = (
        f"training.steps={steps}",
        "parallel.spare_ranks=true",
        f"training.run_dir={tmp_path / 'run'}",
    )
    port, fault = free_port(), "slow rank=0 step=8 seconds=6"
    first = elastic(tmp_path / "0", port, 3, *changes, fault=fault)
    time.sleep(2)  # it keeps the place where nodes meet
    second = elastic(tmp_path / "1", port, 3, *changes, fault=fault)
    first.run_dir = second.run_dir = tmp_path / "run"
    wait_for_step(first, 7)
    kill(second.processes())
    second.launcher.wait()
    ended = first.ended(200)
    assert ended.code == 0, ended.err
    said = ended.out + (tmp_path / "1" / "out").read_text()
    assert "ranks 4, 5 are spare: with train_batch_size 12, pp 1 x dp 4 x tp 1 = 4 is the " in said
    assert "rank 2 is spare: with train_batch_size 12, pp 1 x dp 2 x tp 1 = 2 is the " in said
    found = losses(tmp_path / "run")
    assert list(found) == list(range(1, steps + 1))
    assert all(abs(loss - expected[step]) <= 1e-6 for step, loss in found.items())


def test_spare_ranks_wait_for_a_run_that_is_told_to_stop(tmp_path: Path) -> None:
    job = Job(tmp_path, "torchrun", *SAVES, "parallel.spare_ranks=true", ranks=3)
    job.wait_until_training()
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert "rank 2 is spare: " in ended.out and ended.saved
    assert "stopped by SIGTERM" in ended.out and "before training" not in ended.err


def test_copies_that_differ_end_the_run_and_name_rank_and_parameter(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        "torchrun",
        *SAVES,
        "training.check_replicas_interval=4",
        "train_micro_batch_size_per_gpu=2",
        ranks=3,
        fault="corrupt rank=2 step=7 parameter=mlp.up.weight",
    )
    ended = job.ended()
    assert ended.code == 1
    said = " ".join(ended.out.split())
    assert "after step 8, copies that must be equal differ: the " in said
    assert "master weight blocks.0.mlp.up.weight on rank 2, unlike 2 other ranks" in said
    assert "They were last equal after step 5" in said, "as before the checkpoint of that step"
