"""Runs of one process of plain torch, and parallel runs that are compared with them."""

import functools
from collections.abc import Callable
from pathlib import Path

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.comparison import Comparison
from megaspeed.measurement.verification.reference import ReferenceRun, train_reference
from megaspeed.measurement.verification.verify import ParallelRun, compare, train_rank, whole_batch
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus

TEXT = Path(__file__).parent.parent.parent / "LICENSE"
FEW_STEPS = 3
"""The number of steps for a layout that another run trains for ten steps."""


class References:
    """Runs of one process, each trained once for each model, text and batch."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._known: dict[str, ReferenceRun] = {}

    def of(self, run: Run, steps: int, choices: Tensor | None = None) -> ReferenceRun:
        corpus = tiny_corpus(run, self.cache)
        config = run.config
        numerics = (
            f"{run.precision} {config.gradient_clipping} {steps} {run.batch.train_batch_size} "
            f"{config.training.z_loss} {config.training.skip_spikes!r} "
            f"{config.train_batch_size_schedule}"
        )
        key = f"{config.model!r} {config.data!r} {config.optimizer!r} {numerics}"
        if choices is not None:
            key += str(hash(choices.numpy().tobytes()))
        if key not in self._known:
            batches = functools.partial(whole_batch, run, corpus)
            self._known[key] = train_reference(run, batches, steps, choices=choices)
        return self._known[key]


def train_and_compare(
    pool: RankPool,
    references: References,
    run: Run,
    steps: int,
    train: Callable[..., ParallelRun | None] = train_rank,
) -> Comparison:
    corpus = tiny_corpus(run, references.cache)
    results = pool.run(run.grid.world_size, train, run, corpus, steps)
    assert results[0] is not None
    reference = references.of(run, steps, results[0].experts.choices)
    return compare(run, results[0], reference)


def train_rank_in_fp16(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    """Train in fp16. DeepSpeed refuses CPUs without fp16 kernels of oneDNN; torch has its own."""
    CPU_Accelerator.is_fp16_supported = lambda self: True
    return train_rank(launch, run, corpus, steps)
