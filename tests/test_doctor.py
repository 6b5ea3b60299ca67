"""``megaspeed doctor`` under real launchers, with ranks that differ and ranks that never come."""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Forked
from tests.support.launched import free_port, launch
from tests.support.machine import limit
from tests.support.tiny import GPT2, MOE

TEXT = Path(__file__).parents[1] / "LICENSE"
CONFIG: dict[str, Any] = {
    "model": GPT2,
    "data": {"train": ["text.txt"], "validation_fraction": 0, "sequence_length": 16},
    "training": {"steps": 4},
    "train_batch_size": 12,
    "gradient_clipping": 1.0,
}
SECONDS = 120.0
STEP_SECONDS = math.ceil(limit(3))
"""The doctor's limit of a step in tests in which a rank does not answer."""
DOCTOR = ("-m", "megaspeed.cli", "doctor")
VARIABLES = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def deepspeed(ranks: int) -> list[str | Path]:
    program = Path(sys.executable).with_name("deepspeed")
    options = ["--num_accelerators", str(ranks), "--master_port", str(free_port())]
    return [program, *options, "--module", "megaspeed.cli"]


def lay_out(folder: Path, **changes: Any) -> Path:
    """Write the configuration and its text to a folder. Return the configuration's path."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_bytes(TEXT.read_bytes())
    config = folder / "run.json"
    config.write_text(json.dumps({**CONFIG, **changes}))
    return config


@dataclass(frozen=True)
class Rank:
    """A rank of the doctor, and the file with its output."""

    process: Forked
    out: Path


def start(
    rank: int,
    world_size: int,
    port: int | str,
    config: Path,
    *options: str,
    program: Sequence[str | Path] = DOCTOR,
) -> Rank:
    """Start one rank in the folder of its configuration, as any launcher would."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    variables = {**place, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    environment = {
        **VARIABLES,
        **{name: str(value) for name, value in variables.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MEGASPEED_CACHE": str(config.parent / "cache"),
    }
    command = [*program, "--config", config, *options]
    out = config.parent / f"out-{rank}"
    return Rank(Forked(command, config.parent, environment, out, out), out)


def ended(ranks: list[Rank]) -> list[tuple[int, str]]:
    """Wait for all ranks. Return the exit code and the output of each."""
    try:
        codes = [rank.process.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
    return [(code, rank.out.read_text()) for code, rank in zip(codes, ranks, strict=True)]


def test_all_is_fine_under_a_launcher(tmp_path: Path) -> None:
    config = lay_out(tmp_path)
    options: list[str | Path] = ["doctor", "--config", config, "--json", tmp_path / "doctor.json"]
    launched = launch([*deepspeed(2), *options], tmp_path, tmp_path / "runs")
    assert launched.code == 0, launched.out + launched.err
    check_that_all_is_fine(launched.out, tmp_path, [("dp", 1), ("world", 1)])


def test_all_is_fine_with_a_spare_rank_and_an_agent_that_keeps_the_store(tmp_path: Path) -> None:
    """torchrun's agent keeps the store, too."""
    config, out = lay_out(tmp_path, parallel={"pipeline": 2, "spare_ranks": True}), tmp_path / "out"
    command: list[str | Path] = [*DOCTOR, "--config", config, "--json", tmp_path / "doctor.json"]
    agent = Forked(command, tmp_path, VARIABLES, out, out, ranks=3, keeps_store=True)
    assert agent.wait(SECONDS) == 0, out.read_text()
    check_that_all_is_fine(out.read_text(), tmp_path, [("pp", 1), ("world", 1)])


def test_all_is_fine_with_every_axis(tmp_path: Path) -> None:
    expected = [("pp", 2), ("tp", 2), ("world", 1)]
    check_four_ranks(tmp_path, expected, parallel={"pipeline": 2, "tensor": 2})


def test_all_is_fine_with_shared_experts(tmp_path: Path) -> None:
    expected = [("dp", 1), ("ep", 2), ("expert_shard", 2), ("world", 1)]
    zero = {"stage": 1}
    check_four_ranks(tmp_path, expected, model=MOE, parallel={"expert": 2}, zero_optimization=zero)


def check_four_ranks(folder: Path, groups: list[tuple[str, int]], **changes: Any) -> None:
    config, port = lay_out(folder, **changes), free_port()
    ranks = ended([start(rank, 4, port, config, "--json", "doctor.json") for rank in range(4)])
    assert [code for code, _ in ranks] == [0, 0, 0, 0], ranks
    check_that_all_is_fine("".join(out for _, out in ranks), folder, groups)


def check_that_all_is_fine(out: str, folder: Path, groups: list[tuple[str, int]]) -> None:
    """Check the output of a doctor that finds no problem, with these numbers of groups by axis."""
    assert "wrong" not in out
    assert out.count("doctor  ") == 1, "only rank 0 prints"
    report = json.loads((folder / "doctor.json").read_text())
    assert report["fine"] and report["problems"] == []
    axes = [group["axis"] for group in report["groups"]]
    assert [(axis, axes.count(axis)) for axis in dict.fromkeys(axes)] == groups
    for group in report["groups"]:
        assert 0 < group["latency_seconds"] < limit(10) and group["bytes_per_second"] > 0
    assert not (folder / "runs").exists(), "the doctor's files in the run folder are removed"


def test_ranks_with_another_configuration_text_or_folder_are_named(tmp_path: Path) -> None:
    """Ranks 0 and 1 differ only in their folders. Rank 2 clips at another norm, and rank 3's text
    has one letter more.
    """
    run_dir = {"steps": 4, "run_dir": str(tmp_path / "shared")}
    configs = [lay_out(tmp_path / str(rank), training=run_dir) for rank in range(4)]
    lay_out(tmp_path / "2", training=run_dir, gradient_clipping=0.5)
    with (tmp_path / "3" / "text.txt").open("a") as text:
        text.write("x")
    port = free_port()
    ranks = ended([start(rank, 4, port, config) for rank, config in enumerate(configs)])
    assert [code for code, _ in ranks] == [1, 1, 1, 1], ranks
    lines = [line for line in ranks[0][1].splitlines() if line.startswith("wrong:")]
    assert len(lines) == 2, ranks[0][1]
    assert "rank 2 " in lines[0] and "gradient_clipping is 0.5, but 1.0 on most ranks" in lines[0]
    assert "rank 3 " in lines[1] and "data: training text is " in lines[1]
    assert [out for _, out in ranks[1:]] == ["", "", ""]


@pytest.mark.waits
def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    """There should be three ranks. Ranks 0 and 2 come, and one rank that expects four."""
    config, port = lay_out(tmp_path / "run"), free_port()
    before = time.monotonic()
    places = [(0, 3), (2, 3), (3, 4)]
    options = ("--timeout", str(2 * STEP_SECONDS))
    ranks = ended([start(*place, port, config, *options) for place in places])
    assert time.monotonic() - before < limit(60)
    assert [code for code, _ in ranks] == [1, 1, 1]
    (line,) = [line for line in ranks[0][1].splitlines() if line.startswith("wrong:")]
    assert f"rank 1 (?), ranks: did not answer within {4 * STEP_SECONDS} s" in line
    assert "rank 3 is not part of the run: rank 0 has world size 3, but here it is 4" in ranks[2][1]


STUCK = """
import os, sys, time
from pathlib import Path
from dataclasses import asdict
from megaspeed.doctor.examination import Messages
from megaspeed.doctor.record import take_record
from megaspeed.topology.launch import read_launch_environment
from megaspeed.topology.store import open_store

launch = read_launch_environment(os.environ)
messages = Messages(launch, open_store(launch, 60))
record, _ = take_record(Path(sys.argv[-1]), [], launch, 60)
messages.send("record", asdict(record))
time.sleep(10**6)
"""


@pytest.mark.waits
def test_a_rank_that_stops_on_the_way_is_named_in_time(tmp_path: Path) -> None:
    """The rank joins, and then stops answering. No step waits for it forever."""
    config, port = lay_out(tmp_path / "run"), free_port()
    before = time.monotonic()
    (tmp_path / "stuck.py").write_text(STUCK)
    stuck = start(1, 2, port, config, program=[tmp_path / "stuck.py"])
    try:
        ((code, out),) = ended([start(0, 2, port, config, "--timeout", str(STEP_SECONDS))])
    finally:
        stuck.process.kill()
    assert code == 1
    assert time.monotonic() - before < limit(90)
    stuck_seconds = 4 * STEP_SECONDS
    assert "rank 0 " in out
    assert f"stuck for {stuck_seconds} s while joining the process groups" in out
    assert "rank 1 " in out and "did not report the checks between ranks" in out


def test_one_process_needs_no_port(tmp_path: Path) -> None:
    """In an earlier version, a MASTER_PORT left in the shell ended in a traceback of int()."""
    ((code, out),) = ended([start(0, 1, "abc", lay_out(tmp_path / "run"))])
    assert code == 0, out
    assert "wrong" not in out and "Traceback" not in out


def test_wrong_input_of_all_ranks_is_reported_with_exit_code_2(tmp_path: Path) -> None:
    config, port = lay_out(tmp_path / "run", gradient_clipping=-1), free_port()
    ranks = ended([start(rank, 2, port, config) for rank in range(2)])
    assert [code for code, _ in ranks] == [2, 2]
    assert "gradient_clipping" in ranks[0][1] and ranks[1][1] == ""


@pytest.mark.waits
def test_a_meeting_point_that_is_taken_or_out_of_reach_is_named_in_time(tmp_path: Path) -> None:
    config = lay_out(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        port = taken.getsockname()[1]
        options = ("--timeout", str(STEP_SECONDS))
        (first,) = ended([start(0, 2, port, config, *options)])
        (second,) = ended([start(1, 2, port, config, *options)])
    assert (first[0], second[0]) == (1, 1)
    assert f"rank 0 could not listen at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)" in first[1]
    assert f"rank 1 has not reached the store of rank 0 at 127.0.0.1:{port}" in second[1]
    assert "Traceback" not in first[1] + second[1]
