"""One training step on paper: what the host waits for, launches, sends and reads."""

from dataclasses import dataclass
from typing import Any

from megaspeed.topology.launch import LaunchEnvironment
from tests.paper_gpu.accelerator import paper_accelerator
from tests.paper_gpu.fake_world import batches, fake_rank, paper_run
from tests.paper_gpu.recorder import Message, Recorder
from tests.support.rank_pool import RankPool


@dataclass(frozen=True)
class PaperStep:
    """The third step of one rank. By then, everything is known that is learned in the first step.

    Attributes:
        device_waits: where in the code -> how often the host waits until a stream, or the device,
            has no work left.
        event_waits: where in the code -> how often the host waits for one event.
        reads: where in the code -> how often the host reads a number of the device.
        launches: number of kernels.
        messages: calls of process groups.
        skipped: whether the optimizer step was skipped. Such a step would prove nothing.
    """

    device_waits: dict[str, int]
    event_waits: dict[str, int]
    reads: dict[str, int]
    launches: int
    messages: list[Message]
    skipped: bool


def paper_step(pool: RankPool, *, rank: int = 0, **changes: Any) -> PaperStep:
    """Return the step of rank ``rank`` in the run ``paper_run(**changes)``."""
    (step,) = pool.run(1, step_of, rank, changes)
    assert not step.skipped
    return step


def step_of(launch: LaunchEnvironment, rank: int, changes: dict[str, Any]) -> PaperStep:
    """The same, called within a job of the rank pool."""
    run = paper_run(**changes)
    load = batches(run)
    with paper_accelerator() as accelerator, fake_rank(run, rank) as worker:
        for _ in range(2):
            worker.train_step(load, 1e-3)
        accelerator.waits.clear()
        with Recorder() as recorder:
            result = worker.train_step(load, 1e-3)
    return PaperStep(
        device_waits=accelerator.device_waits,
        event_waits=accelerator.event_waits,
        reads=dict(recorder.reads),
        launches=sum(recorder.launches.values()),
        messages=recorder.messages,
        skipped=result.skipped,
    )
