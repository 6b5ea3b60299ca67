"""How a run reacts to faults: it ends in time and reports the reason.

The tests use a real launcher only if its own reaction matters, because it costs time.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from threading import Thread

import pytest
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.supervision.hang import pending_collectives
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import muon
from tests.support.jobs import HANG_SECONDS, HOST, Job, Launcher, rank_alone
from tests.support.launched import free_port
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, MOE, tiny_corpus
from tests.zero.one_rank import one_rank, small_run

TEXT = Path(__file__).parents[1] / "LICENSE"
SECONDS_TO_END = limit(30)
"""README.md promises 30 s. They are those of a machine with factor 1 (tests/support/machine.py)."""

pytestmark = [pytest.mark.ranks, pytest.mark.waits, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("launcher", "rank"), [("torchrun", 0), ("megaspeed", 1)])
def test_a_rank_that_raises_has_the_last_word(
    tmp_path: Path, launcher: Launcher, rank: int
) -> None:
    """In an earlier version, sixty lines of its peers' tracebacks followed its own."""
    fault = f"raise rank={rank} step=3 work=Backward"
    ended = Job(tmp_path, launcher, "parallel.pipeline=2", fault=fault).ended()
    assert ended.code == 1
    place = f"[{HOST}, rank {rank} (pp {rank}, dp 0, tp 0), step 3, Backward(micro_batch=0)]"
    report = f"{place} RuntimeError: an injected fault (MEGASPEED_FAULT)\nTraceback "
    assert ended.err.count(report) == 1
    assert "Connection closed" not in ended.err
    assert report in ended.log(rank)
    if launcher == "torchrun":  # its summary of the failure shows the report once more
        assert ended.err.count(place) == 2
    if launcher == "megaspeed":
        assert ended.err.startswith(report)
        assert ended.err.endswith("during Backward(micro_batch=0)\nduring step 3\n"), ended.err


def test_a_rank_without_memory_has_the_last_word_and_shows_where_it_goes_and_what_would_help(
    tmp_path: Path,
) -> None:
    """This is under deepspeed. In an earlier version, sixty lines of its peers' tracebacks
    followed.
    """
    fault = "memory rank=1 step=3 work=Backward"
    ended = Job(tmp_path, "deepspeed", "zero_optimization.stage=0", fault=fault).ended()
    # Once in the header, once in the traceback.
    assert ended.code == 1 and ended.err.count("can't allocate memory") == 2
    place = f"[{HOST}, rank 1 (pp 0, dp 1, tp 0), step 3, Backward(micro_batch=0)]"
    assert ended.err.count(place) == 1 and place in ended.log(1)
    assert ended.err.count("\nTraceback ") == 1 and "Connection closed" not in ended.err
    lines = ended.err.splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith("Memory of rank 1 (pipeline ")]
    name, predicted, measured = (cell.strip() for cell in lines[start + 3].split("|")[1:-1])
    assert name == "parameters"
    assert float(measured) == pytest.approx(float(predicted), rel=0.02)
    changes = [line.split(": --set ") for line in lines if ": --set " in line]
    assert 1 <= len(changes) <= 3
    freed = [float(change[0].split()[0]) for change in changes]
    assert freed == sorted(freed, reverse=True) and freed[-1] > 0
    assert any("zero_optimization.stage=" in what for _, what in changes)


def test_a_rank_that_is_killed_is_named_by_another(tmp_path: Path) -> None:
    """An earlier version named the rank that was started last. Rank 0 ends deepspeed's store.

    The random kills of tests/test_restarts.py test the same under torchrun.
    """
    job = Job(tmp_path, "deepspeed", fault="kill rank=0 step=4 work=Forward")
    job.wait_until_training()
    ended = job.ended()
    assert ended.code != 0 and ended.seconds < SECONDS_TO_END
    (line,) = [line for line in ended.err.splitlines() if line.startswith(f"[{HOST}, rank 0 ")]
    assert "was killed: its process " in line
    assert "meanwhile rank 1 is in step 4" in line
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("launcher", "kind"), [("deepspeed", "stop"), ("agent", "hang"), ("agent", "lock")]
)
def test_a_run_that_hangs_names_who_is_missing(
    tmp_path: Path, launcher: Launcher, kind: str
) -> None:
    """An earlier version found a stopped process only after 30 minutes, and named its peers."""
    job = Job(tmp_path, launcher, "parallel.tensor=2", fault=f"{kind} rank=1 step=4 work=Backward")
    job.wait_until_training()
    ended = job.ended()
    assert ended.code != 0 and ended.seconds < HANG_SECONDS + SECONDS_TO_END
    missing = "did not arrive where the others wait" if kind == "hang" else "did not answer"
    assert re.search(rf"no progress for \d+ s: rank 1 {missing}", ended.err), ended.err
    assert "rank 0: step 4, Backward(micro_batch=0), waiting in gloo:all_reduce of (48, " in (
        ended.err
    )
    assert "in the world group of ranks 0, 1" in ended.err
    assert "File " in ended.log(0) and "collectives.py" in ended.log(0), "stacks"
    if kind == "lock":
        assert ended.code == 3 and "faults.py" in ended.log(1), "stacks of the rank, too"
    # Its last heartbeat was before step 1; an earlier version reported nothing newer.
    if kind == "stop":
        assert re.search(r"rank 1 .*, last known phase: step [34]\b", ended.err), ended.err


def test_a_rank_that_cannot_run_a_thread_is_ended_by_its_watchdog(tmp_path: Path) -> None:
    """A kernel launch blocks like this if CUDA's queue is full. It then blocks all Python threads.

    No other rank can notice it here, as if every rank of the run were in the same state.
    """
    # A later step, because the patience of start-up counts until the next report, a second later.
    job = Job(tmp_path, "forked", fault="lock rank=0 step=400 work=Backward", ranks=1)
    job.wait_until_training()
    ended = job.ended()
    # The watchdog's own count, because the seconds until step 400 depend on the machine.
    place = re.escape(f"[{HOST}, rank 0 (pp 0, dp 0, tp 0), last known phase: ")
    said = re.search(place + r".*no thread could run for (\d+) s: a call holds", ended.err)
    assert ended.code == 3 and said, ended.err
    assert HANG_SECONDS + 30 - 1 < int(said[1]) < HANG_SECONDS + 30 + 2
    assert "faults.py" in ended.log(0) and "watch.py" in ended.log(0), "stacks of all threads"


def test_a_pipeline_stage_that_hangs_is_named_by_the_message_that_does_not_come(
    tmp_path: Path,
) -> None:
    """Rank 0 has sent micro-batch 0. An earlier version reported that rank 0 waits for that
    message.
    """
    fault = "hang rank=0 step=4 work='Forward(micro_batch=1'"
    job = Job(tmp_path, "agent", "parallel.pipeline=2", fault=fault)
    ended = job.ended()
    assert ended.code == 1 or ended.code == 3
    assert (
        "rank 0 did not arrive where the others wait (step 4, Forward(micro_batch=1))" in ended.err
    )
    assert "waiting in receive of float32 of shape (3, 16, " in ended.err


def _calls_in_the_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, seen: Path
) -> list[str]:
    """Return what rank 0 waits for while it has called Muon's exchange. Rank 1 hangs meanwhile."""
    calls: list[str] = []

    def look() -> None:
        while not any("all_to_all" in call for call in calls):
            time.sleep(0.01)
            calls[:] = pending_collectives()
        seen.touch()

    def hangs(matrices: Tensor, *_: object) -> Tensor:
        while not seen.exists():
            time.sleep(0.01)
        return matrices

    with one_rank(launch, run, corpus) as rank, pytest.MonkeyPatch.context() as patch:
        if launch.rank == 1:
            patch.setattr(muon, "orthogonalized", hangs)
            rank.train_step(0)
            return []
        thread = Thread(target=look)
        thread.start()
        rank.train_step(0)
        thread.join()
    return calls


def test_a_rank_that_hangs_in_muons_step_is_missed_in_a_named_call(
    pool: RankPool, tmp_path: Path
) -> None:
    run = small_run(TEXT, model=LLAMA, optimizer={"type": "Muon"}, tp=2)
    corpus = tiny_corpus(run, tmp_path / "cache")
    calls, _ = pool.run(2, _calls_in_the_step, run, corpus, tmp_path / "seen")
    (call, *_) = [call for call in calls if "all_to_all" in call]
    assert re.fullmatch(
        r"gloo:all_to_all of \(\d+,\), number \d+ in the world group of ranks 0, 1", call
    )


def test_a_rank_that_hangs_before_it_exchanges_tokens_is_missed_in_the_group_of_experts(
    tmp_path: Path,
) -> None:
    changes = [f"model.{key}={json.dumps(value)}" for key, value in MOE.items()]
    changes.append("parallel.expert_exchange=all_to_all")
    fault = "hang rank=1 step=4 work=Forward"
    job = Job(tmp_path, "agent", "parallel.expert=2", *changes, fault=fault)
    ended = job.ended()
    assert ended.code in (1, 3)
    assert (
        "rank 1 did not arrive where the others wait (step 4, Forward(micro_batch=0))" in ended.err
    )
    waits = r"rank 0: step 4, Forward\(micro_batch=0\), waiting in gloo:all_to_all of \(8,\), "
    assert re.search(waits + r"number \d+ in the ep group of ranks 0, 1", ended.err), ended.err


@pytest.mark.parametrize(
    ("launcher", "report"),
    [("agent", "ranks 0, 1 did not answer"), ("forked", "rank 0 did not answer")],
    ids=["the agent keeps the store", "rank 0 keeps the store"],
)
def test_ranks_0_and_1_that_stop_together_are_missed_by_the_others(
    tmp_path: Path, launcher: Launcher, report: str
) -> None:
    """Both stop as if their host lost power. In an earlier version, only rank 1 watched rank 0, so
    nobody reported it.

    If rank 0 kept the store, only rank 1 could report for its host.
    """
    job = Job(tmp_path, launcher, "parallel.pipeline=3", ranks=3)
    job.wait_until_training()
    first, second, _ = job.launcher.ranks()
    first.suspend()
    second.suspend()
    ended = job.ended()
    assert ended.code != 0 and ended.seconds < HANG_SECONDS + SECONDS_TO_END
    assert report in ended.err


def test_log_files_on_a_disk_that_hangs_do_not_silence_a_report(tmp_path: Path) -> None:
    """An earlier version wrote the stacks before the report, and the timer that ends a process
    wrote, too. The logs here are pipes that nobody reads.
    """
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    pipes = []
    for rank in range(2):
        os.mkfifo(logs / f"rank-{rank:05d}.log")
        pipes.append(os.open(logs / f"rank-{rank:05d}.log", os.O_RDWR | os.O_NONBLOCK))
    job = Job(tmp_path, "agent", fault="hang rank=1 step=9 work=Forward")
    job.wait_until_training()
    for pipe in pipes:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, bytes(4096))
    ended = job.ended()
    assert ended.code != 0 and ended.seconds < HANG_SECONDS + SECONDS_TO_END
    assert "rank 1 did not arrive where the others wait" in ended.err


def test_a_spare_rank_ends_as_the_run_does(tmp_path: Path) -> None:
    """An earlier version ended with 0, so torchrun's agent took this node for finished after
    another one had failed.
    """
    port = str(free_port())
    fault = "raise rank=1 step=4 work=Forward"
    run_dir = f"training.run_dir={tmp_path / 'run'}"
    ranks = []
    for rank in "012":
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        changes = (run_dir, "parallel.spare_ranks=true", "parallel.tensor=2")
        ranks.append(
            rank_alone(tmp_path / rank, *changes, MASTER_PORT=port, fault=fault, **variables)
        )
    ended = [rank.ended() for rank in ranks]
    assert [one.code for one in ended] == [1, 1, 1]
    assert "step 4, Forward(micro_batch=0)] RuntimeError: an injected fault" in ended[1].err


@pytest.mark.parametrize("launcher", ["agent", "forked"])
def test_a_spare_rank_that_is_stopped_does_not_keep_a_run_that_ends(
    tmp_path: Path, launcher: Launcher
) -> None:
    """In an earlier version, its launcher waited for it forever. If rank 0 kept the store, rank 0
    waited 45 s, too.
    """
    fault = f"slow rank=0 step=4 work=Forward(micro_batch=0 seconds={limit(2)}"
    changes = ("parallel.spare_ranks=true", "training.steps=4")
    job = Job(tmp_path, launcher, *changes, fault=fault, ranks=3)
    job.wait_until_training()
    job.launcher.ranks()[2].suspend()
    ended = job.ended()
    assert (ended.code, ended.err) == (0, "") and ended.saved


def test_a_spare_rank_that_is_stopped_is_missed_during_the_run(tmp_path: Path) -> None:
    fault = "slow rank=0 step=* work=Forward seconds=0.25"  # so that the ranks mostly sleep
    job = Job(tmp_path, "agent", "parallel.spare_ranks=true", fault=fault, ranks=3)
    job.wait_until_training()
    job.launcher.ranks()[2].suspend()
    ended = job.ended()
    assert ended.code != 0 and ended.seconds < HANG_SECONDS + SECONDS_TO_END
    assert re.search(r"^no progress for \d+ s: rank 2 did not answer", ended.err), ended.err
    assert f"[{HOST}, rank 2 (spare), last known phase: " in ended.err
    records = (ended.run_dir / "metrics.jsonl").read_text().splitlines()
    assert min(json.loads(record)["step_time_seconds"] for record in records) >= 0.5


def test_a_run_whose_folder_was_renamed_ends_before_it_writes_to_another(tmp_path: Path) -> None:
    """In an earlier version, two runs wrote to one folder, deleted each other's checkpoints, and
    ended with 0.
    """
    job = Job(tmp_path, "agent", "training.save_interval=2", fault="slow rank=0 step=4 seconds=2")
    job.wait_until_training()
    job.run_dir.rename(tmp_path / "renamed")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    ended = job.ended()
    assert ended.code == 1 and ended.seconds < SECONDS_TO_END
    assert f"the run folder {job.run_dir} was removed or renamed" in ended.err
    assert "Traceback" not in ended.err and not ended.saved


@pytest.mark.parametrize(
    ("launcher", "number"), [("deepspeed", signal.SIGTERM), ("megaspeed", signal.SIGKILL)]
)
def test_without_their_launcher_the_ranks_save_and_end(
    tmp_path: Path, launcher: Launcher, number: signal.Signals
) -> None:
    """In an earlier version, they trained on forever under deepspeed, and a restart was refused."""
    job = Job(tmp_path, launcher)
    job.wait_until_training()
    job.launcher.send_signal(number)
    ended = job.ended()
    assert ended.seconds < SECONDS_TO_END and ended.saved
    assert "Traceback" not in ended.out


def test_a_run_whose_output_nobody_reads_any_more_still_saves(tmp_path: Path) -> None:
    """In ``... | tee log``, Ctrl-C ends tee first. After that, every printed line
    raises an error.
    """
    pipe = tmp_path / "out"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    job = Job(tmp_path, "forked", "training.log_interval=1", ranks=1)
    job.wait_until_training()
    os.close(reader)
    pipe.unlink()
    pipe.touch()
    time.sleep(limit(0.5))
    job.launcher.send_signal(signal.SIGINT)
    ended = job.ended()
    assert ended.code == 0 and ended.saved and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("launcher", "number"), [("megaspeed", signal.SIGINT), ("forked", signal.SIGHUP)]
)
def test_ctrl_c_and_a_closed_terminal_save(
    tmp_path: Path, launcher: Launcher, number: signal.Signals
) -> None:
    """A terminal signals every process of the foreground job."""
    job = Job(tmp_path, launcher, arguments=["--fresh"])
    job.wait_until_training()
    os.killpg(job.launcher.pid, number)
    ended = job.ended()
    assert ended.seconds < SECONDS_TO_END and ended.saved, ended.err
    assert "stopped by SIG" in ended.out and "Traceback" not in ended.out
    assert (ended.code, ended.err) == (0, "")
    if launcher == "megaspeed":
        check_that_the_last_line_continues(ended.out, tmp_path)


def check_that_the_last_line_continues(out: str, folder: Path) -> None:
    """Run the command in the last line of a run, until it has resumed and is stopped."""
    said, command = out.splitlines()[-1].split(": ", 1)
    command = command.rstrip(" '")  # a forked process has empty words at the end of its command
    assert said == "To continue" and "--fresh" not in command
    again, variables = folder / "again", {"MEGASPEED_CACHE": str(folder / "cache")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with again.open("w") as file:
        shell = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], stdout=file, env={**os.environ, **variables}
        )
    try:
        deadline = time.monotonic() + limit(60)
        while "resumed at step" not in again.read_text():
            assert shell.poll() is None and time.monotonic() < deadline, again.read_text()
            time.sleep(0.1)
        shell.terminate()
        assert shell.wait(limit(60)) == 0
    finally:
        shell.kill()
    assert again.read_text().splitlines()[-1] == f"To continue: {command}"


def test_ctrl_c_in_a_long_step_saves_although_the_launcher_has_gone(tmp_path: Path) -> None:
    """DeepSpeed's runner ends at once. An earlier version took its end for a second Ctrl-C."""
    fault = "slow rank=0 step=4 work=Backward(micro_batch=0 seconds=5"
    job = Job(tmp_path, "deepspeed", fault=fault, ranks=1)
    job.wait_until_training()
    os.killpg(job.launcher.pid, signal.SIGINT)
    ended = job.ended()
    assert ended.seconds < SECONDS_TO_END and ended.saved, ended.err
    assert "stopped by SIG" in ended.out and "Traceback" not in ended.out


def test_the_second_ctrl_c_leaves_at_once_even_from_a_blocked_main_thread(tmp_path: Path) -> None:
    job = Job(tmp_path, "forked", fault="hang rank=0 step=6", ranks=1)
    job.wait_until_training()
    time.sleep(limit(1))
    job.launcher.send_signal(signal.SIGINT)
    time.sleep(limit(1.5))
    job.launcher.send_signal(signal.SIGINT)
    ended = job.ended()
    assert ended.code == 130 and ended.seconds < HANG_SECONDS


def test_a_signal_before_the_training_ends_the_run_at_once(tmp_path: Path) -> None:
    """There is nothing to save, and a start may take longer than the launcher waits."""
    job = Job(tmp_path, "forked", fault="hang rank=0 phase='building the model'", ranks=1)
    job.wait_until_said("attention: ")
    time.sleep(1)
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == 128 + signal.SIGTERM and ended.seconds < HANG_SECONDS
    assert "SIGTERM before training began: there is nothing to save" in ended.err


def test_ranks_that_were_stopped_before_training_are_not_restarted(tmp_path: Path) -> None:
    """torch's launcher restarts ranks whatever their exit code is."""
    fault = "hang rank=0 phase='building the model'"
    job = Job(tmp_path, "megaspeed", "training.restart=2", fault=fault)
    job.wait_until_said("attention: ", 120)
    time.sleep(1)
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == 128 + signal.SIGTERM and ended.seconds < SECONDS_TO_END
    assert ended.out.count("attention: ") == 1
    assert ended.err == "SIGTERM before training began: there is nothing to save\n"


def test_a_slow_run_that_makes_progress_continues(tmp_path: Path) -> None:
    """Rank 0 waits longer than the timeout in one collective, while rank 1 makes progress."""
    seconds = HANG_SECONDS * 0.7
    fault = f"slow rank=1 step=4 work=Forward seconds={seconds}"
    job = Job(tmp_path, "agent", "training.steps=5", fault=fault)
    ended = job.ended()
    assert ended.code == 0 and ended.saved, ended.err


def test_a_run_that_was_suspended_continues_until_its_launcher_is_ended(tmp_path: Path) -> None:
    """Slurm's suspend, Ctrl-Z and fg, or a machine that sleeps suspend a run in this way.

    Rank 0 sleeps in each micro-batch, so the run needs little processor time.
    """
    fault = "slow rank=0 step=* work=Forward seconds=0.2"
    job = Job(tmp_path, "megaspeed", "train_micro_batch_size_per_gpu=1", fault=fault)
    job.wait_until_training()
    processes = job.processes()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            process.send_signal(number)
        time.sleep(HANG_SECONDS + 3)
    assert job.launcher.poll() is None and len(job.processes()) == len(processes)
    job.launcher.send_signal(signal.SIGTERM)
    since = time.monotonic()
    ended = job.ended()
    assert time.monotonic() - since < SECONDS_TO_END and ended.saved
    assert "Traceback" not in ended.out


def test_nohup_keeps_a_run_alive_without_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = Job(tmp_path, "forked", ranks=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.wait_until_training()
    job.launcher.send_signal(signal.SIGHUP)
    time.sleep(2)
    assert job.launcher.poll() is None
    job.launcher.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == 0 and "stopped by SIGTERM" in ended.out


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        ("0", r"rank 0 has waited 1\d s for rank 1 of 2 \(world size from RANK/WORLD_SIZE\)"),
        ("1", r"rank 1 has not reached the store of rank 0 at 127.0.0.1:\d+ .* for 1\d s: "),
    ],
)
def test_a_rank_that_never_comes_is_named(tmp_path: Path, rank: str, said: str) -> None:
    job = rank_alone(tmp_path, "training.hang_timeout_seconds=5", RANK=rank, LOCAL_RANK=rank)
    job.wait_until_said("the limit is 20 s")
    assert re.search(said, job.console()), job.console()
    ended = job.ended()
    assert ended.code == 1 and "Traceback" not in ended.err


def test_ranks_with_other_degrees_are_named_before_they_wait(tmp_path: Path) -> None:
    """In an earlier version, the ranks first created process groups and silently waited for each
    other.
    """
    port = str(free_port())
    first = rank_alone(tmp_path / "0", "parallel.tensor=2", MASTER_PORT=port)
    second = rank_alone(
        tmp_path / "1", "parallel.tensor=1", MASTER_PORT=port, RANK="1", LOCAL_RANK="1"
    )
    ended = [first.ended(), second.ended()]
    assert [one.code for one in ended] == [2, 2]
    assert all(one.seconds < SECONDS_TO_END for one in ended)
    message = ended[0].err
    assert "All ranks must have one configuration" in message
    assert (
        f"rank 1 on {HOST}: " in message
        and "parallel.data 1 -> 2, parallel.tensor 2 -> 1" in message
    )
    assert ended[1].err == "" and "Traceback" not in message


def test_a_loss_that_is_not_a_number_is_traced_to_rank_micro_batch_and_samples(
    tmp_path: Path,
) -> None:
    fault = "nan rank=1 step=3 work=Forward(1)"
    job = Job(
        tmp_path,
        "agent",
        "training.max_skipped_steps=1",
        fault=fault.replace("(1)", "(micro_batch=1)"),
    )
    ended = job.ended()
    assert ended.code == 1
    said = (
        "the loss is not finite on rank 1 (pp 0, dp 1, tp 0) in micro-batch 1 (samples 33, 34, 35)"
    )
    assert said in ended.out
