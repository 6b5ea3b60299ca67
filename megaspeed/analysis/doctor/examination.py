"""The checks of the doctor, in order. Every rank calls `examine`, and rank 0 gets the findings.

Rank 0 reads the records, decides which further checks are possible, and informs the other ranks. So
no rank waits in a collective if configurations differ or ranks are missing.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megaspeed.analysis.doctor.clock import answer_clock, measure_clocks
from megaspeed.analysis.doctor.deadline import within
from megaspeed.analysis.doctor.findings import Findings, LinkAnswer
from megaspeed.analysis.doctor.folder import SharedFolderCheck
from megaspeed.analysis.doctor.links import Link, Measurement
from megaspeed.analysis.doctor.messages import Messages
from megaspeed.analysis.doctor.ports import check_ports
from megaspeed.analysis.doctor.record import Record, take_record
from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.meeting import GroupError

# A record has several steps, each with a limit; making all groups of a large run takes minutes.
_LIMITS_OF_A_RECORD = 4
_LIMITS_OF_THE_LINKS = 4
_LIMITS_OF_EVERYTHING = 30


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The result on rank 0."""

    findings: Findings
    run: Run | None  # rank 0's


def examine(
    config: Path,
    overrides: Sequence[str],
    launch: LaunchEnvironment,
    messages: Messages,
    *,
    address: str,
    seconds: float,
    report: Callable[[Examined], int],
) -> int:
    """All steps; every rank calls this.

    Args:
        config, overrides: this rank's command line.
        launch: how this process was started.
        messages: between rank 0 and the others.
        address: this machine's address, as the other machines reach it.
        seconds: the limit of each step.
        report: called on rank 0; returns the exit code of all ranks.

    Returns:
        The exit code.

    Raises:
        GroupError: rank 0 did not answer, or its world size does not include this rank.
    """
    record, run = take_record(config, overrides, launch, seconds)
    messages.put("record", record.as_json())
    if launch.rank != 0:
        steps = messages.hear("steps", _LIMITS_OF_A_RECORD * seconds)
        if launch.rank >= steps["world_size"]:
            raise GroupError(
                f"rank {launch.rank} is not part of the run: rank 0 has world size "
                f"{steps['world_size']}, this rank {launch.world_size} (from {launch.source})"
            )
        with suppress(GroupError):
            _take_part(steps["ring"], run, launch, messages, address, seconds)
        code: int = messages.hear("end", _LIMITS_OF_EVERYTHING * seconds)
        messages.put("bye", None)
        return code
    findings = _collect(run, launch, messages, address, seconds)
    code = report(Examined(findings=findings, run=run))
    messages.tell("end", code)
    # The store may end with this process, and an exit code other than 0 ends the others.
    came = {each.rank for each in findings.came} - {0}
    if came:
        _wait_for_goodbyes(messages, came)
    return code


def _collect(
    run: Run | None, launch: LaunchEnvironment, messages: Messages, address: str, seconds: float
) -> Findings:
    waited = _LIMITS_OF_A_RECORD / 2 * seconds
    answers = messages.everyones("record", waited)
    records = [None if each is None else Record.from_json(each) for each in answers]
    findings = Findings(records=records, waited_seconds=waited)
    ring = [each.rank for each in findings.came if each.first_of_node]
    together = _is_one_run(records)
    messages.tell("steps", {"world_size": launch.world_size, "ring": ring if together else None})
    if not together:
        return findings
    assert run is not None, "every record has the degrees of its run"
    findings.clocks = measure_clocks(messages, [rank for rank in ring if rank != 0], seconds)
    folder = SharedFolderCheck(run.run_dir, messages, seconds)
    folder.leave()
    folder.look()
    findings.folder = folder.judge()
    findings.ports = check_ports(messages, address, ring, seconds)
    deadline = time.monotonic() + (_LIMITS_OF_THE_LINKS + 1) * seconds
    messages.put("links", _measure(run, launch, seconds))
    all_links = messages.everyones("links", deadline - time.monotonic())
    findings.links = [
        None
        if answer is None
        else LinkAnswer(
            links=tuple(
                Link(**{**link, "ranks": tuple(link["ranks"])}) for link in answer["links"]
            ),
            problem=answer["problem"],
        )
        for answer in all_links
    ]
    return findings


def _take_part(
    ring: list[int] | None,
    run: Run | None,
    launch: LaunchEnvironment,
    messages: Messages,
    address: str,
    seconds: float,
) -> None:
    """The same steps on the other ranks."""
    if ring is None:
        return
    assert run is not None, "every record has the degrees of its run"
    if launch.rank in ring:
        with suppress(GroupError):
            answer_clock(messages, seconds * len(ring))
    with suppress(GroupError):
        # Rank 0 sends the token after it has measured all clocks.
        messages.hear("token", seconds * (len(ring) + 1))
        SharedFolderCheck(run.run_dir, messages, seconds).look()
    if launch.rank in ring:
        with suppress(GroupError):
            check_ports(messages, address, ring, 4 * seconds)
    messages.put("links", _measure(run, launch, seconds))


def _is_one_run(records: list[Record | None]) -> bool:
    """Whether all ranks answered with one layout and kind of device, and one has valid input."""
    degrees = {None if each is None else each.degrees for each in records}
    kinds = {None if each is None else each.device == "cpu" for each in records}
    wrong = all(each is not None and each.wrong_input is not None for each in records)
    return not wrong and len(degrees) == 1 and len(kinds) == 1 and not degrees & {None, ()}


def _measure(run: Run, launch: LaunchEnvironment, seconds: float) -> dict[str, object]:
    in_layout = run.grid.world_size
    if launch.rank >= in_layout:  # a spare rank, which joins no group
        return {"links": [], "problem": None}
    limit = _LIMITS_OF_THE_LINKS * seconds
    measurement = Measurement()

    def join_and_measure() -> None:
        # The groups have a longer timeout. Otherwise NCCL would end the process before its report.
        training = replace(launch, world_size=in_layout)
        with ParallelContext.create(run.grid, training, timeout_seconds=2 * limit) as context:
            measurement.measure(context)

    problem = None
    try:
        within(limit, join_and_measure)
    except TimeoutError:
        problem = f"was stuck for {limit:g} s in {measurement.at}"
    except (RuntimeError, ValueError, OSError) as error:  # torch's and ours
        problem = f"failed in {measurement.at}: {str(error).strip().splitlines()[0]}"
    return {"links": [link.as_json() for link in measurement.links], "problem": problem}


def _wait_for_goodbyes(messages: Messages, ranks: set[int]) -> None:
    deadline = time.monotonic() + 5.0
    for rank in sorted(ranks):
        with suppress(GroupError):
            messages.hear(f"bye/{rank}", max(0.01, deadline - time.monotonic()))
