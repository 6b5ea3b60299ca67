"""Muon trains the same model at any layout, because it orthogonalizes complete matrices."""

from typing import Any

import pytest

from tests.parallel.references import TEXT, References, train_and_compare
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA
from tests.zero.one_rank import small_run

MUON = {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3}}


@pytest.mark.parametrize("layout", [
    dict(), dict(zero_optimization={"stage": 1}), dict(dp=2), dict(dp=2, zero_optimization={"stage":1}),dict(dp=3, zero_optimization={"stage":2}), dict(dp=2, zero_optimization={"stage":3}),
    dict(tp=2), dict(tp=4), dict(tp=4,dp=2), dict(tp=4,dp=2,zero_optimization={"stage":3}), dict(pp=2,tp=2,dp=2,zero_optimization={"stage":2}), dict(pp=2,tp=1,dp=4,zero_optimization={"stage":3}, parallel={"replicate":2}),
    dict(dp=2,cp=2,tp=2,zero_optimization={"stage":1}),
], ids=str)
def test_first(layout: dict[str, Any], pool: RankPool, references: References) -> None:
    run = small_run(TEXT, model=LLAMA, optimizer=MUON, **layout)
    comparison = train_and_compare(pool, references, run, 10)
    print(comparison.largest, [ (l.reference, l.parallel) for l in comparison.losses][-1])
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest
