"""Runs that train on a stream of the hub while it is tokenized, as a user starts them."""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaspeed.data.documents import read_documents
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import train_tokenizer
from megaspeed.supervision.process_end import has_ended
from tests.data.words import WORDS
from tests.data.written_formats import json_lines
from tests.support.hub import COMMIT, Hub
from tests.support.jobs import Job, Launcher
from tests.support.machine import limit

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

TOKENS = 30_000  # 64 shards of 469 tokens, each 29 samples, 2.4 steps


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text(" ".join(WORDS))
    document = read_documents([SourceFile("a.txt", folder / "a.txt")])
    train_tokenizer(document, 301).save(folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder, chance = tmp_path / "hub" / "data", random.Random(0)
    folder.mkdir(parents=True)
    for number in range(2):
        documents = [" ".join(chance.choices(WORDS, k=4)) for _ in range(512)]
        (folder / f"train-{number}.jsonl").write_bytes(json_lines(documents))
    with Hub(folder.parent) as hub:
        yield hub


def started(
    folder: Path,
    hub: Hub,
    tokenizer: Path,
    *changes: str,
    launcher: Launcher = "forked",
    **source: Any,
) -> Job:
    stream = {"dataset": "us/words", "revision": COMMIT, "streaming": True, "tokens": TOKENS}
    data = [f"data.train={json.dumps([{**stream, **source}])}", f"data.tokenizer={tokenizer}"]
    variables: Any = hub.environment
    return Job(folder, launcher, *data, *changes, **variables)


def losses(job: Job) -> list[float]:
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def saved_steps(job: Job) -> list[int]:
    return [int(path.name[-8:]) for path in (job.run_dir / "checkpoints").glob("step-*")]


def test_training_begins_before_the_stream_has_ended_and_waits_longer_than_a_hang(
    tmp_path: Path, hub: Hub, tokenizer: Path
) -> None:
    hub.held.add("train-1.jsonl")
    hang_seconds = limit(5)
    changes = f"training.hang_timeout_seconds={hang_seconds}", "training.steps=150"
    job = started(tmp_path / "slow", hub, tokenizer, *changes)
    job.wait_until_training()
    job.wait_until_said("waiting for tokens: shard 3")  # one of the second file
    time.sleep(1.8 * hang_seconds)
    assert job.launcher.poll() is None and "data/train-1.jsonl" not in hub.answered
    hub.held.clear()
    ended = job.ended()
    assert ended.code == 0, ended.err
    assert len(losses(job)) == 150 and "no progress" not in ended.err


def test_no_process_is_left_if_the_rank_that_started_it_was_killed(
    tmp_path: Path, hub: Hub, tokenizer: Path
) -> None:
    hub.held.add("train-1.jsonl")
    job = started(tmp_path / "orphan", hub, tokenizer, launcher="megaspeed")
    job.wait_until_training()
    (process,) = [one for one in job.processes() if "spawn_main" in " ".join(one.cmdline())]
    parent = process.parent()
    assert parent is not None
    parent.kill()
    job.ended()  # waits until no process is left
    assert has_ended(process.pid)


@pytest.mark.parametrize("defect", ["too short", "broken line"])
def test_a_run_trains_on_the_complete_shards_of_a_stream_and_saves(
    tmp_path: Path, hub: Hub, tokenizer: Path, defect: str
) -> None:
    """The reason is the last line. The same command ends in the same way again."""
    tokens, reason = 60_000, 'has 32,340 of 60,000; write "tokens": 32340'
    if defect == "broken line":
        path = tmp_path / "hub" / "data" / "train-1.jsonl"
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([*lines[:300], b'{"text": "', *lines[301:]]))
        tokens, reason = TOKENS, "state a revision that can be read, or fewer tokens"
    launcher: Launcher = "megaspeed" if defect == "too short" else "forked"
    for _ in range(2):
        job = started(tmp_path / "run", hub, tokenizer, launcher=launcher, tokens=tokens)
        ended = job.ended()
        assert ended.code == 2, ended.err
        last = ended.out.strip().splitlines()[-1]
        assert last.startswith("training stopped:") and last.endswith(reason), ended.out
        assert "Traceback" not in ended.err and "no progress" not in ended.err
        complete = len([*tmp_path.glob("run/cache/streams/*/*.json")])
        steps = complete * ((-(-tokens // 64) - 1) // 16) // 12
        assert len(losses(job)) == steps > 24
        assert saved_steps(job) == [steps]


def test_a_signal_ends_a_run_that_waits_for_tokens(
    tmp_path: Path, hub: Hub, tokenizer: Path
) -> None:
    hub.held.add("train-1.jsonl")
    job = started(tmp_path / "waits", hub, tokenizer, launcher="megaspeed")
    job.wait_until_training()
    job.wait_until_said("waiting for tokens: shard 3")  # one of the second file
    for process in job.processes():
        process.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == 0, ended.err
    assert saved_steps(job) == [len(losses(job))]
    assert "leaked" not in ended.err, "the killed process had no semaphore"


def test_a_run_whose_tokenizing_process_was_killed_gives_the_same_losses_when_started_again(
    tmp_path: Path, hub: Hub, tokenizer: Path
) -> None:
    hub.held.add("train-1.jsonl")
    steps = ["training.steps=100", "training.save_interval=10"]
    job = started(tmp_path / "killed", hub, tokenizer, *steps)
    job.wait_until_training()
    (process,) = [one for one in job.processes() if "spawn_main" in " ".join(one.cmdline())]
    process.send_signal(signal.SIGKILL)
    ended = job.ended()
    assert ended.code == 1
    assert "us/words must run until it is done, but ended with exit code -9" in ended.err
    hub.held.clear()
    again = started(tmp_path / "killed", hub, tokenizer, *steps)
    assert again.ended().code == 0
    whole = started(tmp_path / "whole", hub, tokenizer, *steps)
    assert whole.ended().code == 0
    assert losses(again)[-1] == losses(whole)[-1]
    other = started(tmp_path / "whole", hub, tokenizer, "training.steps=110", revision="f" * 40)
    refused = other.ended()
    assert refused.code == 2 and "the training text (data.train) was" in refused.err
