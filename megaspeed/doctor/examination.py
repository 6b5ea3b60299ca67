"""The steps of the doctor, in order. Every rank calls ``examine``, and rank 0 gets the findings.

Rank 0 reads the records, decides whether further checks are possible, and sends this plan. So no
rank waits in a collective if configurations differ or ranks are missing. The further checks:

    run folder     rank 0 writes a file; every rank reads it, then writes and removes its own file
    tp, dp, world  all-reduce of few and of many bytes
    pp             each stage sends to the next while it receives from the previous one

All groups of one axis work at the same time, as they do in a step. Ranks exchange their records
over a key-value store, because a collective would wait for a missing rank, and could not name it:

    rank 1, 2, ...  --send("record", {...})-->  store  --gather("record")-->   rank 0
    rank 1, 2, ...  <----receive("plan")------  store  <--send("plan", ...)--  rank 0
"""

import json
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaspeed.config.resolve import Run
from megaspeed.doctor.checks import Findings
from megaspeed.doctor.record import Link, Record, call_with_timeout, take_record
from megaspeed.job.run_folder import appears
from megaspeed.planning.costs.traffic import bytes_sent
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.store import GroupError, open_store, wait_for_keys

# A record has several steps, each with a limit; making all groups of a large run takes minutes.
_LIMITS_OF_A_RECORD = 4
_LIMITS_OF_THE_LINKS = 4
_LIMITS_OF_EVERYTHING = 30

# A network file system may show a new file to other nodes a little later.
_SECONDS_UNTIL_VISIBLE = 5.0
_SECONDS_UNTIL_ENDED = 5.0

_SMALL_BYTES = 8
_LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_SMALL_TIMES, _LARGE_TIMES = 20, 5


def examine(
    config: Path,
    overrides: Sequence[str],
    launch: LaunchEnvironment,
    seconds: float,
    report: Callable[[Findings], int],
) -> int:
    """Run all steps, and return the exit code. Every rank calls this.

    Each step may take up to ``seconds``. Rank 0 calls ``report``, which returns the exit code of
    all ranks.

    Raises GroupError if rank 0 did not answer, or its world size does not include this rank.
    """
    messages = Messages(launch, open_store(launch, seconds))
    record, run = take_record(config, overrides, launch, seconds)
    messages.send("record", asdict(record))
    if launch.rank == 0:
        code = report(_collect(record, run, launch, messages, seconds))
        messages.send("end", code)
        messages.send("bye", None)
        # The store may end with this process, and launchers end all ranks if one exits with an
        # error. So rank 0 waits until the others have the code.
        messages.gather("bye", _SECONDS_UNTIL_ENDED)
        return code
    plan = messages.receive("plan", _LIMITS_OF_A_RECORD * seconds)
    if launch.rank >= plan["world_size"]:
        raise GroupError(
            f"rank {launch.rank} is not part of the run: rank 0 has world size "
            f"{plan['world_size']}, but here it is {launch.world_size} (from {launch.source})"
        )
    if plan["token"] is not None:
        assert run is not None, "every record has the degrees of its run"
        _check_together(record, run, launch, plan["token"], seconds)
        messages.send("checked", asdict(record))
    code = messages.receive("end", _LIMITS_OF_EVERYTHING * seconds)
    messages.send("bye", None)
    return int(code)


class Messages:
    """This rank's connection to the store of all ranks."""

    def __init__(self, launch: LaunchEnvironment, store: dist.Store) -> None:
        self._launch = launch
        self._store = dist.PrefixStore("doctor", store)

    def send(self, name: str, value: Any) -> None:
        """Store a JSON value of this rank."""
        self._store.set(f"{name}/{self._launch.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> list[Any]:
        """Return the values of all ranks; None for ranks that have sent none after ``seconds``."""
        keys = [f"{name}/{rank}" for rank in range(self._launch.world_size)]
        wait_for_keys(self._store, keys, seconds)
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]

    def receive(self, name: str, seconds: float) -> Any:
        """Wait for a value of rank 0.

        Raises GroupError if it does not arrive within ``seconds``, or the store has ended.
        """
        try:
            self._store.wait([f"{name}/0"], timedelta(seconds=seconds))
            return json.loads(self._store.get(f"{name}/0"))
        except RuntimeError as error:  # torch's DistError is one
            raise GroupError(
                f"rank {self._launch.rank} waited {seconds:g} s for rank 0 ({name}), which did not "
                "answer"
            ) from error


def _collect(
    record: Record, run: Run | None, launch: LaunchEnvironment, messages: Messages, seconds: float
) -> Findings:
    """Make rank 0's part of the checks, and return what all ranks have found."""
    waited = _LIMITS_OF_A_RECORD / 2 * seconds
    records = _records(messages.gather("record", waited))
    findings = Findings(records=records, waited_seconds=waited, run=run)
    plan: dict[str, Any] = {"world_size": launch.world_size, "token": None}
    if not _have_one_layout(records):
        messages.send("plan", plan)
        return findings
    assert run is not None, "every record has the degrees of its run"
    name = f".doctor-{secrets.token_hex(8)}"
    problem = _error_of(seconds, lambda: _token(run.run_dir, name).write_text(name))
    plan["token"] = (name, problem)
    messages.send("plan", plan)
    _check_together(record, run, launch, plan["token"], seconds)
    messages.send("checked", asdict(record))
    checked = _records(messages.gather("checked", 2 * seconds + _SECONDS_UNTIL_VISIBLE))
    _error_of(seconds, lambda: _token(run.run_dir, name).unlink())
    return replace(
        findings,
        records=[now or before for now, before in zip(checked, records, strict=True)],
        silent=[rank for rank, answer in enumerate(checked) if answer is None],
    )


def _records(answers: Sequence[Any]) -> list[Record | None]:
    return [None if answer is None else Record.of_json(answer) for answer in answers]


def _have_one_layout(records: list[Record | None]) -> bool:
    """Whether all ranks answered with the same layout and device type, and one has valid input."""
    answered = [record for record in records if record is not None]
    layouts = {(tuple(record.degrees), record.device == "cpu") for record in answered}
    return (
        len(answered) == len(records)
        and len(layouts) == 1
        and all(record.degrees for record in answered)
        and any(record.wrong_input is None for record in answered)
    )


def _token(run_dir: Path, name: str) -> Path:
    """Return the path of a file in the run folder, or in the first folder above it that exists."""
    folders = (run_dir, *run_dir.parents)
    return next(folder for folder in folders if folder.exists()) / name


def _error_of(seconds: float, step: Callable[[], object]) -> str | None:
    """Return the error of a step of the check of the run folder; None if there is none."""
    try:
        call_with_timeout(seconds, step)
    except TimeoutError:
        return f"the file system of training.run_dir did not answer within {seconds:g} s"
    except OSError as error:
        return str(error)
    return None


def _check_together(
    record: Record,
    run: Run,
    launch: LaunchEnvironment,
    token: tuple[str, str | None],
    seconds: float,
) -> None:
    """Make this rank's part of the checks between ranks, and add the results to its record."""
    name, problem = token
    problem = problem or _error_of(
        seconds + _SECONDS_UNTIL_VISIBLE, lambda: _read_and_write(run.run_dir, name, launch.rank)
    )
    if problem is not None:
        record.problems["run folder"] = problem
    if launch.rank < run.grid.world_size:  # a spare rank joins no group
        _measure_links(record, run, launch, _LIMITS_OF_THE_LINKS * seconds)


def _read_and_write(run_dir: Path, name: str, rank: int) -> None:
    token = _token(run_dir, name)
    if not appears(token, _SECONDS_UNTIL_VISIBLE):
        raise OSError(f"{token} of rank 0 is not visible here: the folder is not shared")
    if token.read_text() != name:
        raise OSError(f"{token} does not contain what rank 0 wrote there")
    own = token.with_name(f"{name}-{rank}")
    own.touch()
    own.unlink()


def _measure_links(record: Record, run: Run, launch: LaunchEnvironment, seconds: float) -> None:
    """Join the run's process groups, and measure those of more than one rank."""
    launch = replace(launch, world_size=run.grid.world_size)
    step = "while joining the process groups"
    links: list[Link] = []

    def join_and_measure() -> None:
        nonlocal step
        # The groups have a longer timeout. Otherwise NCCL would end the process before its report.
        with ParallelContext.create(run.grid, launch, timeout_seconds=2 * seconds) as context:
            for axis, group in context.groups_by_axis.items():
                step = f"while measuring {axis} {dist.get_process_group_ranks(group)}"
                links.append(_measure(axis, group, context))
                # All ranks start the next axis together, so measurements do not overlap.
                dist.all_reduce(torch.zeros(1, device=context.device), group=context.world_group)

    try:
        call_with_timeout(seconds, join_and_measure)
    except TimeoutError:
        record.problems["process groups"] = f"was stuck for {seconds:g} s {step}"
    except (RuntimeError, ValueError, OSError) as error:  # of torch and of megaspeed
        reason = str(error).strip().splitlines()[0]
        record.problems["process groups"] = f"failed {step}: {reason}"
    record.links = list(links)


def _measure(axis: str, group: dist.ProcessGroup, context: ParallelContext) -> Link:
    def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        if axis != "pp":
            dist.all_reduce(outgoing, group=group)
            return
        batch = []
        if context.next_rank is not None:
            batch.append(dist.P2POp(dist.isend, outgoing, context.next_rank, group))
        if context.previous_rank is not None:
            batch.append(dist.P2POp(dist.irecv, incoming, context.previous_rank, group))
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    def median_seconds(message_bytes: int, times: int) -> float:
        outgoing = torch.zeros(message_bytes // 4, device=context.device)
        incoming = torch.empty_like(outgoing)
        seconds = []
        for _ in range(times + 1):
            start = time.perf_counter()
            exchange(outgoing, incoming)
            if context.device.type == "cuda":
                torch.cuda.synchronize(context.device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])  # the first call also opens connections

    large = _LARGE_BYTES[context.device.type]
    sent = bytes_sent("send" if axis == "pp" else "all_reduce", large, group.size())
    return Link(
        axis=axis,
        ranks=dist.get_process_group_ranks(group),
        latency_seconds=median_seconds(_SMALL_BYTES, _SMALL_TIMES),
        bytes_per_second=sent / median_seconds(large, _LARGE_TIMES),
    )
