"""A rank is killed (SIGKILL) at a random moment of a save, many times.

Each time, the run resumes from a complete checkpoint, with the losses of an undisturbed run.
"""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.inspection import inspect, newest_complete
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.supervision.answers import broadcast
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint.saved_runs import SavedRun, started
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
# To run more: KILLS=200 python -m pytest tests/checkpoint/test_kills.py --timeout 1000
KILLS = int(os.environ.get("KILLS", "16"))
RANKS = 2
STEPS_AFTERWARDS = 3


def train_until_killed(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, victim: int, seed: int
) -> int:
    """Resume, then train and save each step. ``victim`` is killed in the second or third save.

    Without a victim, take a few steps and return the number of the last.
    """
    chance = random.Random(seed)
    fatal_save = chance.randint(2, 3)
    folder = CheckpointFolder(run.run_dir / "checkpoints")
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        group = context.checkpoint_group
        broadcast(group, folder.clear_leftovers)
        newest, skipped = newest_complete(broadcast(group, folder.newest_first), group)
        assert skipped == (), "every folder with a checkpoint's name is complete"
        if newest is not None:
            rank.progress = rank.checkpointing.load(newest)
        seconds = 0.05
        for number in range(1, 100 if victim >= 0 else STEPS_AFTERWARDS + 1):
            rank.train_step()
            if launch.rank == 0:
                record(run.run_dir, rank.progress.step, rank.progress.loss)
            if launch.rank == victim and number == fatal_save:
                kill_this_process_in(chance.uniform(0, 1.2 * seconds))
            start = time.perf_counter()
            rank.checkpointing.save(rank.progress)
            if victim >= 0:
                while not rank.checkpointing.finished():
                    time.sleep(0.001)
            seconds = time.perf_counter() - start
        assert all(report.error is None for report in rank.checkpointing.close())
        return rank.progress.step


def kill_this_process_in(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def record(folder: Path, step: int, loss: float | None) -> None:
    with (folder / "losses.jsonl").open("a") as file:
        file.write(json.dumps([step, loss]) + "\n")


def undisturbed(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> list[float]:
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        return [rank.train_step() for _ in range(steps)]


@pytest.mark.timeout(150 + 5 * KILLS)
def test_a_killed_save_never_costs_a_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    runs = {
        in_background: small_run(
            TEXT,
            dp=RANKS,
            gradient_accumulation_steps=1,
            zero_optimization={"stage": 2},
            training={"run_dir": str(tmp_path), "keep_last": 2, "async_save": in_background},
        )
        for in_background in (False, True)
    }
    corpus = tiny_corpus(runs[False], tmp_path / "cache")
    folder = CheckpointFolder(tmp_path / "checkpoints")
    newest = torn = 0
    for seed in range(KILLS):
        run, victim = runs[seed % 2 == 1], random.Random(seed).randrange(RANKS)
        with pytest.raises(RankFailure, match="SIGKILL"):
            pool.run(RANKS, train_until_killed, run, corpus, victim, seed)
        torn += bool(folder.leftovers())
        whole = folder.newest_first()
        assert whole and not any(inspect(checkpoint).problems for checkpoint in whole)
        assert int(whole[0].name.removeprefix("step-")) > newest, f"kill {seed} cost progress"
        newest = int(whole[0].name.removeprefix("step-"))
    assert torn >= KILLS // 4, "most kills did not hit a save"
    last = pool.run(RANKS, train_until_killed, runs[False], corpus, -1, 0)[0]
    assert last == newest + STEPS_AFTERWARDS
    expected = pool.run(RANKS, undisturbed, runs[False], corpus, last)[0]
    recorded = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [step for step, _ in recorded if step == last]
    for step, loss in recorded:
        assert loss == expected[step - 1], f"step {step} went on wrong"
