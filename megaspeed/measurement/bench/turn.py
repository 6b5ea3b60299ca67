"""A contestant's turn on one rank: it trains the steps of each workload, and measures them.

steps of a workload    1 .. WARM_UP_STEPS    + 1 .. + S    last
                       not counted           timed         not counted: megaspeed's ends with
                                                           a validation
"""

import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Precision, Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.files.json_values import read_records
from megaspeed.measurement.bench.peers import PeerName, Settings, Step, make_step
from megaspeed.model.gpt import DTYPES
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.metrics import peak_flops_per_second
from megaspeed.training.pretrain import main as train_main
from megaspeed.training.run_folder import METRICS
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import Worker, peak_memory

WARM_UP_STEPS = 3
"""Steps before the timed ones. DeepSpeed's ZeRO-3 records its gathers in the first two."""

_MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
_MATMUL_SECONDS = 0.1
_NO_LIMIT_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one rank measured of one workload."""

    step_seconds: Sequence[float]  # of each timed step
    first_loss: float  # of the first step, mean over its tokens, in nats
    peak_bytes: int  # of the CUDA allocator; on a CPU, of the resident set with all libraries


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes on."""

    name: str  # the GPU's name, or "CPU"
    peak_flops: float | None  # dense operations a second in the run's dtype; None if not known
    matmul_flops: float  # operations a second of a large matrix product in the run's dtype


class _Clock(Checkpointing):
    """Notes when each step of the training loop has ended, and saves nothing.

    A large model's checkpoint would take longer than the steps.
    """

    def __init__(self, ends: list[float], worker: Worker, corpus: PreparedCorpus) -> None:
        super().__init__(worker, corpus)
        self._ends = ends

    def finished(self) -> list[SaveReport]:
        """The loop calls this at the end of each step, after all records are written."""
        self._ends.append(time.perf_counter())
        return super().finished()

    def save(self, progress: Progress) -> None:
        """Only adds the report of a save."""
        self._finished.append(
            SaveReport(
                step=progress.step,
                checkpoint=self._run.run_dir,
                size_bytes=0,
                seconds=0.0,
                stall_seconds=0.0,
                error=None,
                deleted=(),
            )
        )


def train_megaspeed(
    launch: LaunchEnvironment, configs: Sequence[tuple[Path, int]], steps: int, precision: Precision
) -> tuple[list[Turn], Device]:
    """Takes megaspeed's turn as one rank: the main job, once for each workload.

    Args:
        launch: the place of this rank.
        configs: for each workload, the file of its configuration, and a port for its ranks.
        steps: number of timed steps.
        precision: the run's.
    """
    turns = []
    for file, port in configs:
        os.environ["MASTER_PORT"] = str(port)
        _forget_memory()
        ends: list[float] = []
        code = train_main(["--config", str(file)], make_checkpointing=partial(_Clock, ends))
        if code:
            raise RuntimeError(f"megaspeed train ended with exit code {code}")
        values = json.loads(file.read_text(encoding="utf-8"))
        metrics = Path(values["training"]["run_dir"]) / METRICS
        records = [each for each in read_records(metrics) if each and "peak_memory_bytes" in each]
        turns.append(
            Turn(
                step_seconds=_timed(ends, steps),
                first_loss=records[0]["loss"],
                peak_bytes=max(records[-1]["peak_memory_bytes"]),
            )
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the current GPU
    return turns, _device(device, precision)


def _timed(ends: Sequence[float], steps: int) -> list[float]:
    """The seconds of the timed steps, given when each step has ended."""
    return [b - a for a, b in pairwise(ends[WARM_UP_STEPS - 1 : WARM_UP_STEPS + steps])]


def train_peer(
    launch: LaunchEnvironment,
    peer: PeerName,
    settings: Settings | None,
    runs: Sequence[Run],
    corpora: Sequence[PreparedCorpus],
    steps: int,
) -> tuple[list[Turn], Device]:
    """Takes a peer's turn as one rank: ``runs`` are the workloads, ``corpora`` their data."""
    turns = []
    # The launch has a time limit, so its collectives need none.
    with ParallelContext.create(runs[0].grid, launch, timeout_seconds=_NO_LIMIT_SECONDS) as context:
        for run, corpus in zip(runs, corpora, strict=True):
            _forget_memory()
            step = make_step(peer, settings, run, context)
            turns.append(_time_peer(step, run, corpus, steps, context))
        device = _device(context.device, runs[0].precision)
    return turns, device


def _time_peer(
    step: Step, run: Run, corpus: PreparedCorpus, steps: int, context: ParallelContext
) -> Turn:
    _forget_memory()
    inputs = StepInputs(run, corpus, context)
    losses, ends = [], []
    for number in range(run.config.training.steps):
        load = inputs.load(number * run.batch.train_batch_size)
        # The loss as a number: a GPU has finished everything that was launched before.
        losses.append(float(step(load, inputs.learning_rate(number))))
        ends.append(time.perf_counter())
    peak = peak_memory(context.device)
    inputs.close()
    # After the last step, because users read only their own rank's loss in a step.
    first_loss = torch.tensor(losses[0], dtype=torch.float64, device=context.device)
    dist.all_reduce(first_loss, group=context.world_group)
    return Turn(
        step_seconds=_timed(ends, steps),
        first_loss=float(first_loss) / run.grid.world_size,
        peak_bytes=peak,
    )


def _forget_memory() -> None:
    """Frees what is not used any more, and starts the CUDA allocator's peak again."""
    gc.collect()
    if torch.cuda.is_initialized():  # it must not be, before the rank has chosen its GPU
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _device(device: torch.device, precision: Precision) -> Device:
    return Device(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        peak_flops=peak_flops_per_second(device, precision),
        matmul_flops=_matmul_flops_per_second(device, DTYPES[precision]),
    )


@torch.no_grad()
def _matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the fastest of several products of two large square matrices.

    All ranks measure at about the same time, because they share the machine when they train, too.
    """
    size = _MATMUL_SIZES[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    fastest, end = float("inf"), time.perf_counter() + _MATMUL_SECONDS
    repeats = 0
    while repeats < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        _ = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        repeats += 1
        fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * size**3 / fastest
