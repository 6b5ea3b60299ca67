"""The steps of the doctor, in order. Every rank calls `examine`, and rank 0 gets the findings.

Rank 0 reads the records, decides which further checks are possible, and informs the other ranks. So
no rank waits in a collective if configurations differ or ranks are missing.

The last step measures each group of the run with the operations of the training:

    tp, dp, world    all-reduce of few and of many bytes
    pp               each stage sends to the next while it receives from the previous one

All groups of one axis work at the same time, as they do in a step.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaspeed.config.resolve import Run
from megaspeed.doctor.checks import (
    Messages,
    call_with_timeout,
    check_clocks,
    check_ports,
    check_run_folder,
)
from megaspeed.doctor.diagnosis import Findings, Link, LinkReport
from megaspeed.doctor.record import Record, take_record
from megaspeed.planning.costs.traffic import bytes_sent
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.store import GroupError

# A record has several steps, each with a limit; making all groups of a large run takes minutes.
_LIMITS_OF_A_RECORD = 4
_LIMITS_OF_THE_LINKS = 4
_LIMITS_OF_EVERYTHING = 30

_SMALL_BYTES = 8
_LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_SMALL_TIMES, _LARGE_TIMES = 20, 5


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
    """Runs all steps, and returns the exit code. Every rank calls this.

    Each step may take up to ``seconds``. Other machines reach this one at ``address``. Rank 0 calls
    ``report``, which returns the exit code of all ranks.

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
                f"{steps['world_size']}, but here it is {launch.world_size} (from {launch.source})"
            )
        if steps["first_ranks"] is not None:
            assert run is not None, "every record has the degrees of its run"
            _check_together(run, launch, messages, address, steps["first_ranks"], seconds)
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
        checked = _check_together(run, launch, messages, address, first_ranks, seconds)
        findings = replace(findings, **checked)
    code = report(findings)
    messages.broadcast("end", code)
    # The store may end with this process, and launchers end all ranks if one exits with an error.
    # So rank 0 waits until the others have the code.
    deadline = time.monotonic() + 5.0
    for each in findings.answered:
        if each.rank:
            with suppress(GroupError):
                messages.receive(f"bye/{each.rank}", max(0.01, deadline - time.monotonic()))
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


def _check_together(
    run: Run,
    launch: LaunchEnvironment,
    messages: Messages,
    address: str,
    first_ranks: list[int],
    seconds: float,
) -> dict[str, Any]:
    """This rank's part of the checks between ranks.

    Returns:
        Fields of `Findings`, which are complete on rank 0 alone.
    """
    is_first = launch.rank in first_ranks
    clocks = check_clocks(messages, first_ranks, seconds) if is_first else {}
    folder = check_run_folder(
        run.run_dir, messages, seconds, token_seconds=seconds * (len(first_ranks) + 1)
    )
    # The other ranks wait longer, because rank 0 asks one machine after the other.
    patience = seconds if launch.rank == 0 else 4 * seconds
    ports = check_ports(messages, address, first_ranks, patience) if is_first else {}
    deadline = time.monotonic() + (_LIMITS_OF_THE_LINKS + 1) * seconds
    messages.send("links", asdict(_measure_links(run, launch, _LIMITS_OF_THE_LINKS * seconds)))
    links: list[LinkReport | None] = []
    if launch.rank == 0:
        for answer in messages.gather("links", deadline - time.monotonic()):
            if answer is not None:
                answer["links"] = [Link(**link) for link in answer["links"]]
            links.append(answer and LinkReport(**answer))
    return {"clocks": clocks, "folder": folder, "ports": ports, "links": links}


def _measure_links(run: Run, launch: LaunchEnvironment, seconds: float) -> LinkReport:
    """Joins the run's process groups, and measures those of more than one rank."""
    report = LinkReport()
    if launch.rank >= run.grid.world_size:
        return report  # a spare rank joins no group
    launch = replace(launch, world_size=run.grid.world_size)
    step = "while joining the process groups"

    def join_and_measure() -> None:
        nonlocal step
        # The groups have a longer timeout. Otherwise NCCL would end the process before its report.
        with ParallelContext.create(run.grid, launch, timeout_seconds=2 * seconds) as context:
            groups = {
                "tp": context.tp_group,
                "dp": context.dp_group,
                "pp": context.pp_group,
                "world": context.world_group,
            }
            for axis, group in groups.items():
                if group is not None and group.size() > 1:
                    step = f"while measuring {axis} {dist.get_process_group_ranks(group)}"
                    report.links.append(_measure(axis, group, context))
                # All ranks start the next axis together, so measurements do not overlap.
                dist.all_reduce(torch.zeros(1, device=context.device), group=context.world_group)

    problem = None
    try:
        call_with_timeout(seconds, join_and_measure)
    except TimeoutError:
        problem = f"was stuck for {seconds:g} s {step}"
    except (RuntimeError, ValueError, OSError) as error:  # of torch and of megaspeed
        problem = f"failed {step}: {str(error).strip().splitlines()[0]}"
    return LinkReport(links=list(report.links), problem=problem)


def _measure(axis: str, group: dist.ProcessGroup, context: ParallelContext) -> Link:
    def median_seconds(message_bytes: int, times: int) -> float:
        outgoing = torch.zeros(message_bytes // 4, device=context.device)
        incoming = torch.empty_like(outgoing)
        seconds = []
        for _ in range(times + 1):
            start = time.perf_counter()
            if axis == "pp":
                _exchange_with_neighbours(outgoing, incoming, group, context)
            else:
                dist.all_reduce(outgoing, group=group)
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


def _exchange_with_neighbours(
    outgoing: torch.Tensor,
    incoming: torch.Tensor,
    group: dist.ProcessGroup,
    context: ParallelContext,
) -> None:
    batch = []
    if context.next_rank is not None:
        batch.append(dist.P2POp(dist.isend, outgoing, context.next_rank, group))
    if context.previous_rank is not None:
        batch.append(dist.P2POp(dist.irecv, incoming, context.previous_rank, group))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
