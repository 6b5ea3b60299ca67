"""megaspeed's turn in a benchmark: the complete training job on one rank.

steps    1 .. W + S               last
         as of every contestant   not counted: it ends with a validation
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Precision
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.files.json_values import read_records
from megaspeed.measurement.timed_steps import (
    Steps,
    describe_device,
    forget_peak,
    matmul_flops,
    timed_rank,
)
from megaspeed.model.gpt import DTYPES
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.pretrain import main as train_main
from megaspeed.training.run_folder import METRICS
from megaspeed.training.worker import Worker


class _Clock(Checkpointing):
    """Note when each step of the training loop has ended, and save nothing.

    A large model's checkpoint would take longer than the steps.
    """

    def __init__(
        self, ends: list[float], warm_up: int, worker: Worker, corpus: PreparedCorpus
    ) -> None:
        super().__init__(worker, corpus)
        self._ends, self._warm_up = ends, warm_up
        self._device = worker.context.device
        ends.append(time.perf_counter())

    def finished(self) -> list[SaveReport]:
        """The loop calls this at the end of each step, after all records are written."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == 1 + self._warm_up:
            forget_peak(self._device)
        return super().finished()

    def save(self, progress: Progress) -> None:
        """Add only the report of a save."""
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
    launch: LaunchEnvironment, config: Path, precision: Precision, steps: Steps
) -> Iterator[Any]:
    """Train as one rank of the main job. Yield its ``TimedRank`` and the rate of a matmul.

    The run folder has the name of the configuration without its suffix.
    """
    ends: list[float] = []
    make_checkpointing = partial(_Clock, ends, steps.warm_up)
    code = train_main(["--config", str(config)], make_checkpointing=make_checkpointing)
    if code:
        raise RuntimeError(f"megaspeed train ended with exit code {code}")
    lines = read_records(config.with_suffix("") / METRICS)
    records = [each for each in lines if each and "peak_memory_bytes" in each]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the current GPU
    yield timed_rank(
        steps,
        ends,
        losses=[record["loss"] for record in records],
        grad_norm=records[-1]["grad_norm"],
        skipped_steps=sum(record["skipped"] for record in records),
        peak_bytes=max(records[-1]["peak_memory_bytes"]),
        device=describe_device(device, launch.world_size),
    )
    yield matmul_flops(device, DTYPES[precision])
