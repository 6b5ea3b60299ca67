"""The ranks of one attempt meet in a store, and never meet ranks of an earlier attempt."""

import json
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import megaspeed
from megaspeed.supervision.meeting import Meeting, RanksDisagree, check_in
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.store import GroupError
from tests.support.machine import limit

WORLD = 3


def launched(rank: int) -> LaunchEnvironment:
    return LaunchEnvironment(
        rank=rank, world_size=WORLD, local_rank=rank, local_world_size=WORLD, source="a test"
    )


@pytest.fixture
def agents_store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of torchrun's agent, which outlives the ranks of an attempt."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit(30))
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def meet(*configurations: dict[str, int]) -> list[Meeting]:
    """Let all ranks meet, each in a thread."""
    with ThreadPoolExecutor(WORLD) as threads:
        ranks = [
            threads.submit(check_in, launched(rank), configuration, limit(30))
            for rank, configuration in enumerate(configurations)
        ]
        return [rank.result() for rank in ranks]


def test_an_attempt_sees_nothing_of_an_earlier_one(agents_store: dist.Store) -> None:
    """If a node has joined or left, torchrun does not count the restart. In an earlier version, the
    ranks of one attempt received different numbers and waited for each other, or they met under the
    keys of a dead attempt.
    """
    first = meet(*[{"seed": 1}] * WORLD)
    first[2].store.set("claim", json.dumps(["failed", 2]))
    second = meet(*[{"seed": 2}] * WORLD)
    second[1].store.set("mine", "1")
    assert not any(meeting.store.check(["claim"]) for meeting in second)
    assert all(meeting.store.check(["mine"]) for meeting in second)
    assert not first[0].store.check(["mine"])


def test_a_rank_that_died_on_arrival_does_not_keep_the_others(agents_store: dist.Store) -> None:
    dist.PrefixStore("attempts", agents_store).append("words", "0123 ")  # type: ignore[attr-defined]
    assert len(meet(*[{"seed": 1}] * WORLD)) == WORLD


def test_what_is_left_between_attempts_is_seen_by_the_next(agents_store: dist.Store) -> None:
    for meeting in meet(*[{}] * WORLD):
        assert meeting.between_attempts is not None
        meeting.between_attempts.set(f"from {meeting.launch.rank}", "")
    (last, *_) = meet(*[{}] * WORLD)
    assert last.between_attempts is not None
    assert last.between_attempts.check([f"from {rank}" for rank in range(WORLD)])


def test_ranks_that_differ_are_named_with_their_keys(agents_store: dist.Store) -> None:
    with pytest.raises(RanksDisagree, match=r"ranks 1, 2 on [^,:]+: seed 1 -> 2"):
        meet({"seed": 1}, {"seed": 2}, {"seed": 2})


OTHER_RANK = f"""
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.supervision.meeting import RanksDisagree, check_in

try:
    check_in(LaunchEnvironment(1, 2, 1, 2, "a test"), {{"seed": 1}}, {limit(120)})
except RanksDisagree as error:
    print(error)
"""


def test_a_rank_with_other_code_is_named_with_its_host(
    agents_store: dist.Store, tmp_path: Path
) -> None:
    """An earlier version trained one model with GELU on one rank and ReLU on the other."""
    shutil.copytree(Path(megaspeed.__file__).parent, tmp_path / "megaspeed")
    changed = tmp_path / "megaspeed" / "model" / "gpt.py"
    changed.write_text(changed.read_text() + "\n")
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with pytest.raises(RanksDisagree) as disagree:
        check_in(LaunchEnvironment(0, 2, 0, 2, "a test"), {"seed": 1}, limit(120))
    said = str(disagree.value)
    assert other.communicate(timeout=limit(120))[0] == f"{said}\n"
    (line,) = [line for line in said.splitlines() if line.startswith("  ")]
    version = rf'"{re.escape(megaspeed.__version__)} \(code [0-9a-f]{{12}}\)"'
    host = re.escape(socket.gethostname())
    named = rf"  rank 1 on {host}: software\.megaspeed {version} -> {version}"
    assert re.fullmatch(named, line), said
    assert "Give every node the same code, files and " in said


def test_missing_ranks_are_named_on_the_ranks_that_wait(agents_store: dist.Store) -> None:
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(check_in, launched(rank), {}, timeout)
            for rank, timeout in ((0, 3.0), (1, 6.0))
        ]
        errors = [rank.exception() for rank in ranks]
    assert all(isinstance(error, GroupError) for error in errors)
    assert all("for rank 2 of 3" in str(error) for error in errors)
