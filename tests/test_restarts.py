"""Runs whose ranks die restart automatically, and end with the result of an undisturbed run."""

import json
import math
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from megaspeed.supervision import watchdog
from tests.support.forked import Forked
from tests.support.jobs import CONFIG, HOST, SCRIPT, Job, Launcher, rank_alone
from tests.support.launched import free_port
from tests.support.machine import limit

# To run more: KILLS=50 python -m pytest tests/test_restarts.py -k random --timeout 4000
KILLS = int(os.environ.get("KILLS", "2"))
STEPS = 20 + 20 * KILLS
SECONDS = 120 + 10 * KILLS
SAVES = ("training.save_interval=5", f"training.hang_timeout_seconds={limit(60)}")

HANG_SECONDS = limit(5)
"""The hang timeout of ranks that do not train."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def losses(run_dir: Path) -> dict[int, float]:
    """Return the losses by step. The file must have every step once and in order."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    return {record["step"]: record["loss"] for record in records}


def last_step(run_dir: Path) -> int:
    """Return the step of the last complete record, or 0 if there is none."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def ranks_of(job: Job) -> list[psutil.Process]:
    """Return the ranks of the current attempt, without supervisors and watchdogs."""
    return [
        one
        for one in job.processes()
        if "TORCHELASTIC_RESTART_COUNT" in one.environ() and watchdog.__file__ not in one.cmdline()
    ]


def wait_for_step(job: Job, step: int, within: float = 120) -> None:
    deadline = time.monotonic() + limit(within)
    while last_step(job.run_dir) < step:
        assert job.launcher.poll() is None and time.monotonic() < deadline, job.console()
        time.sleep(0.02)


def step_after_restart(job: Job, number: int, kills: int) -> int:
    """Return the step after which this restart resumes, as soon as it is printed."""
    said = f"restart {number} of {kills}: the run continues after step "
    job.wait_until_said(said, 120)
    time.sleep(0.1)  # wait until the line is complete
    return int(job.console().split(said)[1].split()[0])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of one process, by step. Any layout trains the same model."""
    job = Job(tmp_path_factory.mktemp("run"), "forked", f"training.steps={STEPS}", ranks=1)
    assert job.ended(SECONDS).code == 0
    return losses(job.run_dir)


@pytest.mark.timeout(400 + 60 * KILLS)
@pytest.mark.parametrize(("launcher", "kills"), [("torchrun", KILLS - 1), ("forked", KILLS)])
def test_random_kills_of_random_ranks_leave_no_trace_in_the_losses(
    tmp_path: Path, launcher: Launcher, kills: int, undisturbed: dict[int, float]
) -> None:
    """torchrun's agent or a supervisor restarts the ranks. The other rank names the killed one.

    --fresh and --resume DIR apply to the start of a launch, but not to a restart.
    """
    steps = 20 + 20 * kills
    earlier = Job(tmp_path / "killed", "forked", "training.steps=10", *SAVES).ended()
    assert earlier.code == 0
    arguments, options = ["--fresh"], ["--max-restarts", str(kills)]
    changes = [*SAVES, "training.save_interval=20"]
    if launcher == "forked":
        arguments, options = ["--resume", str(earlier.run_dir)], []
        changes += [f"training.restart={kills}", f"training.run_dir={tmp_path / 'other'}"]
    job = Job(
        tmp_path / "killed",
        launcher,
        f"training.steps={steps}",
        *changes,
        arguments=arguments,
        launcher_options=options,
    )
    first = 1
    if launcher == "forked":
        job.run_dir, first = tmp_path / "other", 11
    else:
        job.wait_until_said("earlier run's files are now in")
    chance, reached, victims = random.Random(KILLS), first - 1, []
    for kill in range(kills):
        begin = step_after_restart(job, kill, kills) if kill else reached
        # Kill again before the step that the run had already reached.
        if kill % 2 and reached - begin >= 6:
            victim = chance.choice(ranks_of(job))
            # Until the restart has cut the records after ``begin``.
            while last_step(job.run_dir) >= reached:
                time.sleep(0.02)
            wait_for_step(job, begin + 1)
        else:
            wait_for_step(job, reached + chance.randint(8, 14))
            time.sleep(chance.uniform(0, 0.2))
            victim = chance.choice(ranks_of(job))
        reached = max(reached, last_step(job.run_dir))
        victims.append((victim.environ()["RANK"], victim.pid))
        victim.kill()
        victim.wait()
    ended = job.ended(SECONDS)
    assert ended.code == 0, ended.err
    assert ended.out.count(f" of {kills}: the run continues after step ") == kills
    for rank, process in victims:
        assert re.search(
            rf"^\[{HOST}, rank {rank} .* was killed: its process {process} .*; meanwhile rank ",
            ended.err,
            re.MULTILINE,
        ), ended.err
    found = losses(job.run_dir)
    assert list(found) == list(range(first, steps + 1))
    assert all(abs(loss - undisturbed[step]) <= 1e-6 for step, loss in found.items())


def test_a_single_process_is_restarted_and_stopped(tmp_path: Path) -> None:
    job = Job(tmp_path, "forked", *SAVES, "training.restart=1", ranks=1)
    wait_for_step(job, 7)
    (rank,) = ranks_of(job)
    rank.kill()
    job.wait_until_said("restart 1 of 1: the run continues after step ")
    job.wait_until_said("resumed at step")
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == 0 and "stopped by SIGTERM" in ended.out and ended.saved
    assert "rank 0 was ended by SIGKILL: restart 1 of 1 of all ranks" in ended.err


@pytest.mark.parametrize("launcher", ["forked", "megaspeed"])
def test_wrong_input_is_not_tried_again(tmp_path: Path, launcher: Launcher) -> None:
    missing = f'data.train=["{tmp_path / "missing.txt"}"]'
    ended = Job(tmp_path, launcher, "training.restart=1", missing).ended()
    assert ended.code == 2 and ended.err.count("missing.txt") == 1
    assert "restart 1" not in ended.err + ended.out


AUTO = "train_micro_batch_size_per_gpu=auto"


@pytest.mark.parametrize("launcher", ["deepspeed", "megaspeed"])
def test_a_first_step_without_memory_is_repeated_with_smaller_micro_batches(
    tmp_path: Path, launcher: Launcher, undisturbed: dict[int, float]
) -> None:
    """training.restart is 0. The other rank waits in a collective."""
    fault = "memory rank=1 step=1 work=Backward attempt=0"
    ended = Job(tmp_path, launcher, AUTO, "training.steps=5", fault=fault).ended()
    assert ended.code == 0, ended.err
    assert "micro-batch auto: 6, the largest size that fits; " in ended.out
    assert "\nall ranks start again, with micro-batches of 3\n" in ended.err
    assert "micro-batch auto: 3, the largest size that fits, after a larger" in ended.out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [config[key] for key in (AUTO.split("=")[0], "gradient_accumulation_steps")] == [3, 2]
    found = losses(tmp_path / "run")
    assert found == pytest.approx({step: undisturbed[step] for step in range(1, 6)}, rel=1e-6)


@pytest.mark.parametrize(
    ("launcher", "fault", "attempts"),
    [
        ("forked", "memory rank=0 step=1 work=Backward", 2),
        ("megaspeed", "memory rank=1 step=2 work=Backward", 1),
        ("forked", "raise rank=0 step=1 work=Backward", 1),
        ("torchrun", "memory rank=0 step=1 work=Backward", 1),
    ],
    ids=["the second time", "a later step", "another failure", "nobody restarts"],
)
def test_only_the_first_step_without_memory_is_repeated_and_once(
    tmp_path: Path, launcher: Launcher, fault: str, attempts: int
) -> None:
    ended = Job(tmp_path, launcher, AUTO, "training.steps=5", fault=fault).ended()
    assert ended.code == 1
    assert ended.out.count("micro-batch auto: ") == attempts
    assert ended.err.count("all ranks start again") == attempts - 1
    is_first = "memory" in fault and "step=1" in fault
    mend = f"to try the next smaller size, set {AUTO.split('=')[0]} to {2 if attempts == 2 else 3}"
    assert (mend in ended.err) is is_first


@pytest.mark.waits
@pytest.mark.parametrize("victim", [0, 1])
def test_a_supervisor_that_dies_takes_all_with_it(tmp_path: Path, victim: int) -> None:
    """No launcher would end the other ranks."""
    port = str(free_port())
    patience = f"training.hang_timeout_seconds={limit(15)}"
    same = (*SAVES, "training.restart=2", f"training.run_dir={tmp_path / 'run'}", patience)
    jobs = [
        rank_alone(
            tmp_path / str(rank), *same, MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank)
        )
        for rank in range(2)
    ]
    for job in jobs:
        job.run_dir = tmp_path / "run"
    wait_for_step(jobs[0], 3)
    jobs[victim].launcher.kill()
    ended = [job.ended() for job in jobs]
    assert ended[1 - victim].code == 1
    assert "restart 1 of 2" not in ended[0].err + ended[1].err


CHEAP = """
import os, signal, sys, time
from pathlib import Path

from megaspeed.supervision.process_end import end_process
from megaspeed.job import supervisor

supervisor._SECONDS_TO_END = {seconds_to_end}
rank, folder = int(os.environ["RANK"]), Path(__file__).parent


def train():
    (folder / f"started-{rank}").touch()
    print(f"rank {rank} in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.05)
    {body}
    return 0


end_process(supervisor.run_supervised(train, sys.argv[1:]))
"""


class CheapRanks:
    """Two supervisors, started without a launcher, whose children do not train."""

    def __init__(
        self,
        folder: Path,
        body: str,
        seconds_to_end: float = 1,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self.folder = folder
        text = CHEAP.replace("{body}", body).replace("{seconds_to_end}", str(seconds_to_end))
        (folder / "ranks.py").write_text(text)
        training = {"steps": 1, "restart": 3, "hang_timeout_seconds": hang_seconds}
        (folder / "tiny.json").write_text(json.dumps({**CONFIG, "training": training}))
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._environment = {**os.environ, **place, "PYTHONPATH": str(SCRIPT.parents[1])}
        self.of: dict[int, Forked] = {}

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            variables = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command, out = ["ranks.py", "--config", "tiny.json"], self.folder / f"out-{rank}"
            self.of[rank] = Forked(command, self.folder, variables, out, out)

    def go(self) -> None:
        """Let the children write their first line, after both have started."""
        while len(list(self.folder.glob("started-*"))) < 2:
            assert all(one.poll() is None for one in self.of.values())
            time.sleep(0.05)
        (self.folder / "go").touch()

    def ended(self, *ranks: int) -> list[tuple[int, str]]:
        """Return the exit code and the output, by rank."""
        try:
            return [
                (self.of[rank].wait(120), (self.folder / f"out-{rank}").read_text())
                for rank in ranks
            ]
        finally:
            for one in self.of.values():
                one.kill()


@pytest.mark.waits
def test_a_late_start_and_a_late_end_of_rank_0_are_no_failures(tmp_path: Path) -> None:
    """A node may start later, and rank 0 may draw the loss curve at the end."""
    ranks = CheapRanks(tmp_path, f"time.sleep({2 * HANG_SECONDS} * (rank == 0))")
    ranks.start(1)
    waiting = tmp_path / "out-1"
    while not (waiting.exists() and waiting.read_text()):  # it reports after 10 s that it waits
        assert ranks.of[1].poll() is None
        time.sleep(0.1)
    ranks.start(0)
    ranks.go()
    ended = ranks.ended(0, 1)
    assert [code for code, _ in ended] == [0, 0]
    assert ended[0][1] == "rank 0 in attempt 0\n"
    assert ended[1][1].startswith("rank 1 has not reached the store of rank 0 ")
    assert ended[1][1].endswith("\nrank 1 in attempt 0\n")


@pytest.mark.waits
def test_a_supervisor_without_rank_0_says_which_address_does_not_answer(tmp_path: Path) -> None:
    ranks = CheapRanks(tmp_path, "", hang_seconds=5)
    ranks.start(1)
    ((code, said),) = ranks.ended(1)
    assert code == 1 and said.startswith("rank 1 has not reached the store of rank 0 at 127.0.0.1:")
    assert "lost the store" not in said


@pytest.mark.waits
def test_a_supervisor_of_rank_0_that_is_frozen_ends_the_job(tmp_path: Path) -> None:
    """The ranks detect it and end. In an earlier version, their supervisors waited forever."""
    ranks = CheapRanks(tmp_path, f"time.sleep({2 * HANG_SECONDS}); return 3")
    ranks.start(0, 1)
    ranks.go()
    ranks.of[0].send_signal(signal.SIGSTOP)
    ((code, said),) = ranks.ended(1)
    assert code == 1
    lost = "lost the store of all ranks, which rank 0's supervisor keeps: no answer for "
    assert f"{lost}{HANG_SECONDS:.0f} s" in said


@pytest.mark.waits
@pytest.mark.parametrize("victim", [0, 1])
def test_the_rank_of_another_supervisor_may_save_after_one_has_died(
    tmp_path: Path, victim: int
) -> None:
    """All ranks save together, which takes longer than the time to end after a failure."""
    body = f"time.sleep({2 * HANG_SECONDS}); (folder / f'saved-{{rank}}').touch()"
    ranks = CheapRanks(tmp_path, body)
    ranks.start(0, 1)
    ranks.go()
    ranks.of[victim].kill()
    ((code, said),) = ranks.ended(1 - victim)
    assert code == 1 and (tmp_path / f"saved-{1 - victim}").exists()
    assert f"supervisor of rank {victim}" in said or "rank 0's supervisor keeps" in said


def test_a_stop_signal_to_one_rank_before_training_ends_all(tmp_path: Path) -> None:
    """The rank ends with 128 + SIGTERM. Only this rank got the signal."""
    ranks = CheapRanks(tmp_path, "time.sleep(10**6 * (rank == 0)); return 128 + signal.SIGTERM")
    ranks.start(0, 1)
    ranks.go()
    ended = ranks.ended(0, 1)
    assert [code for code, _ in ended] == [143, 143]
    assert all("attempt 1" not in said and "restart 1" not in said for _, said in ended)


MEETING = f"""
    from megaspeed.topology.launch import read_launch_environment
    from megaspeed.supervision.meeting import check_in
    from megaspeed.topology.store import wait_for_keys

    number = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == 1 and number == "0":
        return 3
    store = check_in(read_launch_environment(os.environ), {{}}, {limit(60)}).store
    store.set(f"number of {{rank}}", number)
    wait_for_keys(store, ["number of 0", "number of 1"], {limit(60)})
    print(*(store.get(f"number of {{other}}").decode() for other in range(2)), flush=True)
"""


@pytest.mark.waits
def test_a_rank_does_not_meet_one_of_an_earlier_attempt(tmp_path: Path) -> None:
    """Rank 0 of attempt 0 waits for rank 1, which has failed. Its supervisor lets it live for some
    seconds. In an earlier version, the new rank 1 met it in that time, and they trained until the
    supervisor killed rank 0.
    """
    ranks = CheapRanks(tmp_path, MEETING, seconds_to_end=limit(8))
    ranks.start(0, 1)
    ranks.go()
    ended = ranks.ended(0, 1)
    assert [code for code, _ in ended] == [0, 0]
    assert all(said.endswith("\n1 1\n") for _, said in ended), ended


def elastic(folder: Path, port: int, ranks: int, *changes: str, fault: str) -> Job:
    """Start one "node" of one or two."""
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
            *("--rdzv-conf", f"last_call_timeout={math.ceil(limit(5))}"),
        ],
    )


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def test_a_run_continues_without_one_of_its_nodes_and_with_a_spare_rank(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """The run has 3 ranks, which all train. Then it has 2, of which one trains."""
    steps = 12
    changes = (
        f"training.steps={steps}",
        "parallel.spare_ranks=true",
        "train_micro_batch_size_per_gpu=4",
        f"training.run_dir={tmp_path / 'run'}",
    )
    port, fault = free_port(), "slow rank=0 step=8 seconds=6"
    first = elastic(tmp_path / "0", port, 2, *changes, fault=fault)
    while not any(each.laddr.port == port for each in psutil.net_connections("tcp")):
        assert first.launcher.poll() is None
        time.sleep(0.1)  # until this node keeps the store where nodes meet
    second = elastic(tmp_path / "1", port, 1, *changes, fault=fault)
    first.run_dir = second.run_dir = tmp_path / "run"
    wait_for_step(first, 7)
    kill(second.processes())
    second.launcher.wait()
    ended = first.ended(200)
    assert ended.code == 0, ended.err
    said = ended.out + (tmp_path / "1" / "out").read_text()
    assert "pp 1 x dp 3 x tp 1" in said
    assert "rank 1 is spare: with train_batch_size 12, pp 1 x dp 1 x tp 1 = 1 is the " in said
    found = losses(tmp_path / "run")
    assert list(found) == list(range(1, steps + 1))
    # Sums are rounded differently, because the micro-batches have another size.
    assert found == pytest.approx({step: undisturbed[step] for step in found}, rel=1e-6)


def test_spare_ranks_wait_for_a_run_that_is_stopped(tmp_path: Path) -> None:
    job = Job(tmp_path, "agent", *SAVES, "parallel.spare_ranks=true", ranks=3)
    job.wait_until_training()
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert "rank 2 is spare: " in ended.out and ended.saved
    assert "stopped by SIGTERM" in ended.out and "before training" not in ended.err


def test_copies_that_differ_end_the_run_and_name_rank_and_parameter(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        "agent",
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
    assert "To continue, start all ranks again. This one was started with: " in said
