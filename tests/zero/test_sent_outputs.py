"""The outputs of a pipeline stage are freed once sent, even if DeepSpeed refers to them."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import one_rank, small_run


def outputs_during_backwards(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> list[tuple[int, int]]:
    """Return for each backward of two steps: outputs of the step so far, how many still exist."""
    with one_rank(launch, run, corpus) as rank:
        forward, backward = rank.engine.forward, rank.engine.backward
        outputs: list[weakref.ref[torch.UntypedStorage]] = []
        seen: list[tuple[int, int]] = []

        def watched_forward(*arguments: Any, **options: Any) -> Tensor:
            output = forward(*arguments, **options)
            outputs.append(weakref.ref(output.untyped_storage()))
            return output

        def watched_backward(*arguments: Any, **options: Any) -> None:
            backward(*arguments, **options)
            seen.append((len(outputs), sum(storage() is not None for storage in outputs)))

        rank.engine.forward = watched_forward  # type: ignore[method-assign]
        rank.engine.backward = watched_backward  # type: ignore[method-assign]
        for step in range(2):
            outputs.clear()
            rank.train_step(step)
        return seen


@pytest.mark.parametrize(
    ("zero_stage", "schedule"), [(0, "1f1b"), (1, "gpipe"), (2, "1f1b"), (3, "gpipe"), (3, "1f1b")]
)
def test_the_first_stage_holds_no_output_in_its_backwards(
    pool: RankPool, text: Path, cache: Path, zero_stage: int, schedule: str
) -> None:
    run = small_run(
        text,
        pp=2,
        dp=2,
        gradient_accumulation_steps=4,
        parallel={"schedule": schedule},
        zero_optimization={"stage": zero_stage},
    )
    first, *_ = pool.run(4, outputs_during_backwards, run, tiny_corpus(run, cache))
    made = [2, 3, 4, 4] if schedule == "1f1b" else [4, 4, 4, 4]
    assert first == [(outputs, 0) for outputs in made * 2]
