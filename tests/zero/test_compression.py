"""Compressed gradients: bounds, feedback, equal copies, skipped steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import merge, tiny_corpus
from tests.zero.one_rank import one_rank, small_run
from tests.zero.test_workarounds import first_step

INT8: dict[str, Any] = {"type": "int8", "block": 64}
POWER_SGD: dict[str, Any] = {"type": "powersgd", "rank": 4, "start_step": 1}


def compressed(how: Any, **parallel: Any) -> dict[str, Any]:
    return {"parallel": {"gradient_compression": how, **parallel}}


def gradients_of_a_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[dict[str, Tensor] | None, float]:
    with one_rank(launch, run, corpus) as rank:
        gradients, norm = first_step(rank)
        for step in range(1,4): norm = rank.train_step(step).loss
        return gradients, norm


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [INT8, POWER_SGD], ids=lambda how: how["type"])
def test_smoke(pool: RankPool, text: Path, cache: Path, dp: int, stage: int, how: Any) -> None:
    changes = {"zero_optimization": {"stage": stage}, "train_batch_size": 8}
    plain = small_run(text, dp=dp, **changes)
    corpus = tiny_corpus(plain, cache)
    (exact, n0), *_ = pool.run(dp, gradients_of_a_step, plain, corpus)
    (close, n1), *_ = pool.run(dp, gradients_of_a_step, small_run(text, dp=dp, **merge(changes, compressed(how))), corpus)
    print(dp, stage, how["type"], n0, n1)
    for name in exact:
        print(f"{name:40} {float((exact[name]-close[name]).norm()/exact[name].norm()):.4f}")
