"""The steps of the doctor, in order. Every rank calls `examine`, and rank 0 gets the findings.

Rank 0 reads the records, decides which further checks are possible, and informs the other ranks. So
no rank waits in a collective if configurations differ or ranks are missing.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaspeed.analysis.doctor.checks import (
    Messages,
    call_with_timeout,
    check_clocks,
    check_ports,
    check_run_folder,
)
from megaspeed.analysis.doctor.diagnosis import Findings
from megaspeed.analysis.doctor.links import Link, LinkReport, Measurement
from megaspeed.analysis.doctor.record import Record, take_record
from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.meeting import GroupError

# A record has several steps, each with a limit; making all groups of a large run takes minutes.
_LIMITS_OF_A_RECORD = 4
_LIMITS_OF_THE_LINKS = 4
_LIMITS_OF_EVERYTHING = 30


def examine(
    config: Path,
    overrides: Sequence[str],
    launch: LaunchEnvironment,
    messages: Messages,
    *,
    address: str,
    seconds: float,
    report: Callable[[Findings], int],
) -> int:
    """Run all steps. Every rank calls this.

    Args:
        config, overrides: this rank's command line.
        launch: how this process was started.
        messages: the connection between rank 0 and the others.
        address: the address at which other machines reach this machine.
        seconds: the limit of each step.
        report: called on rank 0; returns the exit code of all ranks.

    Returns:
        The exit code.

    Raises:
        GroupError: rank 0 did not answer, or its world size does not include this rank.
    """
    record, run = take_record(config, overrides, launch, seconds)
    messages.send("record", asdict(record))
    if launch.rank != 0:
        steps = messages.receive("steps", _LIMITS_OF_A_RECORD * seconds)
        if launch.rank >= steps["world_size"]:
            raise GroupError(
                f"rank {launch.rank} is not part of the run: rank 0 has world size "
                f"{steps['world_size']}, this rank {launch.world_size} (from {launch.source})"
            )
        if steps["first_ranks"] is not None:
            assert run is not None, "every record has the degrees of its run"
            _Checks(run, launch, messages, address, seconds).run_all(steps["first_ranks"])
        code: int = messages.receive("end", _LIMITS_OF_EVERYTHING * seconds)
        messages.send("bye", None)
        return code
    waited = _LIMITS_OF_A_RECORD / 2 * seconds
    records = [answer and Record(**answer) for answer in messages.gather("record", waited)]
    findings = Findings(records=records, waited_seconds=waited, run=run)
    first_ranks = [each.rank for each in findings.answered if each.first_of_node]
    comparable = _have_one_layout(records)
    messages.broadcast(
        "steps",
        {"world_size": launch.world_size, "first_ranks": first_ranks if comparable else None},
    )
    if comparable:
        assert run is not None, "every record has the degrees of its run"
        checks = _Checks(run, launch, messages, address, seconds)
        findings = replace(findings, **checks.run_all(first_ranks))
    code = report(findings)
    messages.broadcast("end", code)
    # The store may end with this process, and an exit code other than 0 ends the others.
    _wait_for_goodbyes(messages, [each.rank for each in findings.answered if each.rank])
    return code


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


@dataclass
class _Checks:
    """One rank's part of the checks that several ranks make together."""

    run: Run
    launch: LaunchEnvironment
    messages: Messages
    address: str
    seconds: float

    def run_all(self, first_ranks: list[int]) -> dict[str, Any]:
        """Run all checks. Returns the fields of `Findings`, which are complete on rank 0 alone."""
        messages, seconds = self.messages, self.seconds
        # The other ranks wait longer, because rank 0 asks one machine after the other.
        patience = 1 if self.launch.rank == 0 else 4
        clocks: dict[int, float | None] = {}
        ports: dict[int, str] = {}
        if self.launch.rank in first_ranks:
            clocks = check_clocks(messages, first_ranks, seconds)
        folder = check_run_folder(
            self.run.run_dir, messages, seconds, token_seconds=seconds * (len(first_ranks) + 1)
        )
        if self.launch.rank in first_ranks:
            ports = check_ports(messages, self.address, first_ranks, patience * seconds)
        return {"clocks": clocks, "folder": folder, "ports": ports, "links": self._measure_links()}

    def _measure_links(self) -> list[LinkReport | None]:
        deadline = time.monotonic() + (_LIMITS_OF_THE_LINKS + 1) * self.seconds
        # A spare rank joins no group.
        in_layout = self.launch.rank < self.run.grid.world_size
        own = self._measure_own_links() if in_layout else LinkReport()
        self.messages.send("links", asdict(own))
        if self.launch.rank != 0:
            return []
        answers = self.messages.gather("links", deadline - time.monotonic())
        return [
            answer
            and LinkReport(
                links=[Link(**link) for link in answer["links"]], problem=answer["problem"]
            )
            for answer in answers
        ]

    def _measure_own_links(self) -> LinkReport:
        limit = _LIMITS_OF_THE_LINKS * self.seconds
        measurement = Measurement()

        def join_and_measure() -> None:
            # The groups have a longer timeout. Otherwise NCCL would end the process before its
            # report.
            grid = self.run.grid
            launch = replace(self.launch, world_size=grid.world_size)
            with ParallelContext.create(grid, launch, timeout_seconds=2 * limit) as context:
                measurement.measure(context)

        problem = None
        try:
            call_with_timeout(limit, join_and_measure)
        except TimeoutError:
            problem = f"was stuck for {limit:g} s in {measurement.step}"
        except (RuntimeError, ValueError, OSError) as error:  # torch's and ours
            problem = f"failed in {measurement.step}: {str(error).strip().splitlines()[0]}"
        return LinkReport(links=list(measurement.links), problem=problem)


def _wait_for_goodbyes(messages: Messages, ranks: list[int]) -> None:
    deadline = time.monotonic() + 5.0
    for rank in ranks:
        with suppress(GroupError):
            messages.receive(f"bye/{rank}", max(0.01, deadline - time.monotonic()))
