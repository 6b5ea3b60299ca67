"""A profile has a trace of every rank. Its table accounts for all of the time."""

import functools
import gzip
import json
import os
import re
import signal
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.job import pretrain
from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import Pipeline, pipeline_of
from megaspeed.topology.activity import PARTS
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.profile import Profile, describe_times, profiled_ranks
from tests.checkpoint.saved_runs import started
from tests.pipeline.shapes import shape
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, tiny_corpus, tiny_run
from tests.training.recorded import Record, receive, train

TEXT = Path(__file__).parents[2] / "LICENSE"


def read_trace(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank's only trace."""
    (file,) = (folder / "profile").glob(f"*.rank-{rank}.json.gz")
    with gzip.open(file, "rt") as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


def table_of(records: list[Record]) -> str:
    """Return the table, which only rank 0 has."""
    first, *others = [record.summary.profile for record in records if record.summary is not None]
    assert first is not None and others == [None] * (len(records) - 1)
    return first


def columns(table: str) -> dict[str, float]:
    """Return the mean of each row of a table, in ms."""
    rows = re.findall(r"^(\S.{25}) +([\d,.]+) +[\d.]+%", table, re.MULTILINE)
    return {label.strip(): float(mean.replace(",", "")) for label, mean in rows}


def lost_in(table: str) -> list[float]:
    """Return the ms that each cause adds to the step."""
    _, _, lost = table.partition("lost in step")
    return [
        float(ms.replace(",", "")) for ms in re.findall(r"^  \D+([-\d,.]+)", lost, re.MULTILINE)
    ]


def profiled_run(folder: Path, **changes: Any) -> Run:
    profile = {"start_step": 3, "steps": 2}
    training = {"steps": 6, "log_interval": 100, "run_dir": str(folder), "profile": profile}
    return tiny_run(TEXT, training=training, **changes)


def test_each_rank_has_a_trace_of_its_steps(pool: RankPool, tmp_path: Path) -> None:
    zero = {"stage": 3}
    run = profiled_run(tmp_path / "run", pp=2, dp=2, tp=2, zero_optimization=zero)
    records = pool.run(8, train, run, tiny_corpus(run, tmp_path))
    for rank in range(8):
        spans = [e for e in read_trace(tmp_path / "run", rank) if e["ph"] == "X"]
        own = [e for e in spans if e.get("cat") == "user_annotation"]
        counted = Counter(e["name"] for e in own)
        micro_batches = run.batch.gradient_accumulation_steps
        program = stage_program(shape("1f1b", 2, micro_batches), rank // 4)
        for instruction in program:
            assert counted[str(instruction)] == 2, "once in each of the two steps"
        assert counted["step 3"] == counted["step 4"] == 1 and counted["world"] == 2
        assert counted["tensor"] > 0 and counted["data"] > 0
        steps = [e for e in own if e["name"] in ("step 3", "step 4")]
        for e in own:
            if e["name"].startswith(("Forward", "Backward")):
                inside = [s for s in steps if s["ts"] <= e["ts"] < s["ts"] + s["dur"]]
                assert len(inside) == 1 and inside[0]["tid"] == e["tid"]

    summary = table_of(records)
    assert summary == (tmp_path / "run/profile/steps-3-4.txt").read_text()
    bubble, *_ = lost = lost_in(summary)
    assert len(lost) == 3 and 0 < bubble < columns(summary)["step"]
    *table, trace = summary.splitlines()
    assert "steps-3-4.rank-*.json.gz (8 of 8 ranks)" in trace and max(map(len, table)) <= 80
    traces = [f"steps-3-4.rank-{rank}.json.gz" for rank in range(8)]
    files = sorted(p.name for p in (tmp_path / "run/profile").iterdir())
    assert files == ["steps-3-4.png", *traces, "steps-3-4.txt"]
    assert (tmp_path / "run/profile/steps-3-4.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_the_parts_in_the_table_add_up_to_the_steps(
    zero_stage: int, pool: RankPool, tmp_path: Path
) -> None:
    run = profiled_run(tmp_path / "run", pp=2, dp=2, zero_optimization={"stage": zero_stage})
    records = pool.run(4, train, run, tiny_corpus(run, tmp_path))
    for record in records:
        assert [parts.step for parts in record.parts_of_steps] == [3, 4], "both are timed"
    means = columns(table_of(records))
    step = means.pop("step")
    assert len(means) == len(PARTS) - 2  # without context and expert axes
    assert sum(means.values()) == pytest.approx(step, abs=0.5)
    wall = [1000 * metrics.step_time_seconds for metrics in records[0].steps[2:4]]
    assert step == pytest.approx(sum(wall) / 2, rel=0.25)


def _recording_at_each_wait(launch: LaunchEnvironment, run: Run) -> list[bool]:
    """Profile two empty steps. Return whether torch recorded each time gathers were awaited."""
    recording: list[bool] = []
    with started(launch, run) as context:
        profile = Profile(
            run, context, lambda: recording.append(torch.autograd._profiler_enabled())
        )
        for step in range(1, 7):
            with profile.step(step):
                pass
            if profile.ends_with(step, stops=False):
                profile.write(step, pipeline_of(run))
    return recording


def test_gathers_are_awaited_before_a_recording_begins_or_ends(
    pool: RankPool, tmp_path: Path
) -> None:
    """A step at ZeRO-1 and 2 leaves gathers in flight. A recording began or ended before they were
    awaited, and on a busy machine two of twenty runs ended with a SIGSEGV in their wait.
    """
    run = profiled_run(tmp_path / "run", zero_optimization={"stage": 2})
    (recording,) = pool.run(1, _recording_at_each_wait, run)
    assert recording == [False, False, True], "prepared, begun, ended"


def test_a_rank_that_cannot_write_is_missing_and_the_run_continues(
    pool: RankPool, tmp_path: Path
) -> None:
    run = profiled_run(tmp_path / "run", dp=2)
    (tmp_path / "run/profile/steps-3-4.rank-1.json.gz").mkdir(parents=True)
    records = pool.run(2, train, run, tiny_corpus(run, tmp_path))
    assert read_trace(tmp_path / "run", 0)
    assert [len(record.steps) for record in records] == [6, 6]
    assert "(1 of 2 ranks); rank 1: Is a directory: " in table_of(records)


def test_without_a_trace_there_is_still_a_table(pool: RankPool, tmp_path: Path) -> None:
    run = profiled_run(tmp_path / "run", dp=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("a file where the folder should be")
    records = pool.run(2, train, run, tiny_corpus(run, tmp_path))
    assert [len(record.steps) for record in records] == [6, 6]
    assert "no trace; rank 0: File exists: " in table_of(records)
    assert columns(table_of(records))["compute"] > 0


def test_a_run_that_stops_and_resumes_within_the_steps_writes_both_parts(
    pool: RankPool, tmp_path: Path
) -> None:
    chunks = {"model": {"num_hidden_layers": 4}, "parallel": {"virtual_stages": 2}}
    run = profiled_run(tmp_path / "run", pp=2, **chunks)
    corpus = tiny_corpus(run, tmp_path)
    stop = functools.partial(receive, number=signal.SIGTERM, rank=1)
    stopped: list[Record] = pool.run(2, train, run, corpus, stop)
    saved = stopped[0].saves[-1].checkpoint
    pool.run(2, train, run, corpus, None, saved)
    assert sorted(p.name for p in (tmp_path / "run/profile").iterdir()) == [
        f"steps-{step}-{step}.{suffix}"
        for step in (3, 4)
        for suffix in ("png", "rank-0.json.gz", "rank-1.json.gz", "txt")
    ]


def printed_run(launch: LaunchEnvironment, config: Path) -> str:
    """Return the output of the main job on this rank."""
    os.environ["MEGASPEED_CACHE"] = str(config.with_name("cache"))
    with redirect_stdout(StringIO()) as output:
        assert pretrain.main(["--config", str(config)]) == 0
    return output.getvalue()


def test_a_run_prints_the_table_at_its_end(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    values = {
        "model": GPT2,
        "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
        "training": {"steps": 4, "run_dir": str(tmp_path / "run"), "profile": {"start_step": 1}},
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
    }
    file.write_text(json.dumps(values))
    output, silent = pool.run(2, printed_run, file)
    table = (tmp_path / "run/profile/steps-1-3.txt").read_text()
    lines = [line.rstrip() for line in output.splitlines()]
    first = lines.index(table.splitlines()[0])
    assert lines[first : first + table.count("\n")] == table.splitlines()
    assert "step      3  profile: " in output and not silent


def test_a_large_run_profiles_one_replica_or_one_rank_of_each_stage() -> None:
    assert profiled_ranks(Grid(pp=2, dp=2, tp=4)) == list(range(16))
    assert profiled_ranks(Grid(pp=2, dp=4, tp=4)) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert profiled_ranks(Grid(pp=4, dp=16, tp=8)) == [0, 128, 256, 384]
    assert profiled_ranks(Grid(pp=1, dp=4, tp=1), (2, 9)) == [2]


def test_the_table_names_the_slowest_rank_and_what_it_is_slow_in() -> None:
    """There are two steps of two stages. Rank 1 computes 20 ms longer, and rank 0 waits for it."""
    zero = dict.fromkeys(PARTS, 0.0)
    ranks = [
        {**zero, "compute": 0.040, "pipeline": 0.055, "host": 0.005},
        {**zero, "compute": 0.060, "pipeline": 0.035, "host": 0.005},
    ]
    times = [[(step, *rank.values()) for rank in ranks] for step in (10, 11)]
    assert describe_times(times, Grid(pp=2, dp=1, tp=1)).splitlines() == [
        "steps 10 to 11, mean over the steps; pp 2 x dp 1 x tp 1",
        "                            ms a step   share       lowest rank     highest rank",
        "compute                          50.0   50.0%          40.0 (0)         60.0 (1)",
        "exposed communication, tp         0.0    0.0%           0.0 (0)          0.0 (0)",
        "exposed communication, dp         0.0    0.0%           0.0 (0)          0.0 (0)",
        "bubble and messages, pp          45.0   45.0%          35.0 (1)         55.0 (0)",
        "loss and norm, all ranks          0.0    0.0%           0.0 (0)          0.0 (0)",
        "data wait                         0.0    0.0%           0.0 (0)          0.0 (0)",
        "optimizer                         0.0    0.0%           0.0 (0)          0.0 (0)",
        "host                              5.0    5.0%           5.0 (0)          5.0 (0)",
        "step                            100.0  100.0%",
        "slowest: rank 1 (pp 1, dp 0, tp 0) worked 65.0 ms, median 55.0 ms;",
        "  most of the difference: compute, +10.0 ms to the median",
    ]


class Collectives(TorchDispatchMode):
    """Keeps the names of the collectives that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def collectives_of_a_profile(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> set[str]:
    """Return the collectives with which a rank writes its profile."""
    write, collectives = Profile.write, Collectives()

    def watched(profile: Profile, last: int, pipeline: Pipeline) -> str:
        with collectives:
            return write(profile, last, pipeline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profile, "write", watched)
        train(launch, run, corpus)
    return collectives.names


def test_no_rank_opens_new_connections_for_a_profile(pool: RankPool, tmp_path: Path) -> None:
    """Over NCCL, a gather to rank 0 would connect it with each rank, in the middle of a run."""
    run = profiled_run(tmp_path / "run", pp=2, dp=2)
    named = pool.run(4, collectives_of_a_profile, run, tiny_corpus(run, tmp_path))
    assert named == [{"c10d::allgather_"}] * 4
    assert (tmp_path / "run/profile/steps-3-4.png").exists()
