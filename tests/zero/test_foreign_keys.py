"""DeepSpeed's keys that have no effect change no bit of the training."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.foreign_keys import NO_EFFECT
from megaspeed.measurement.verification.verify import ParallelRun, train_rank
from tests.support.rank_pool import RankPool
from tests.support.tiny import merge, tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"

VALUES: dict[str, tuple[tuple[int, ...], Any]] = {
    "reduce_scatter": ((1, 2, 3), False),
    "use_multi_rank_bucket_allreduce": ((1, 2), True),
    "offload_optimizer": ((1, 2, 3), {"device": "cpu"}),
    "offload_param": ((3,), {"device": "cpu"}),
    "sub_group_size": ((3,), 3000),
    "stage3_prefetch_bucket_size": ((3,), 0),
    "stage3_param_persistence_threshold": ((3,), 1000),
    "stage3_model_persistence_threshold": ((3,), 2000),
    "stage3_max_live_parameters": ((3,), 20_000),
}
"""Key of zero_optimization -> the stages at which it has an effect, and a value that is not the
default."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_keys_without_effect_change_no_bit(stage: int, pool: RankPool, tmp_path: Path) -> None:
    of_others = {key: value for key, (stages, value) in VALUES.items() if stage not in stages}
    without_effect: dict[str, Any] = {}
    for key in NO_EFFECT:
        value: Any = {"enabled": True}
        for part in reversed(key.split(".")):
            value = {part: value}
        without_effect = merge(without_effect, value)
    plain: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if stage < 3:  # tiny_run already sets one
        plain["zero_optimization"]["stage3_param_persistence_threshold"] = None
    changed = merge(merge(plain, without_effect), {"zero_optimization": of_others})
    results = []
    for values in (plain, changed):
        run = small_run(TEXT, dp=2, **values)
        first, _ = pool.run(2, train_rank, run, tiny_corpus(run, tmp_path), 2)
        assert isinstance(first, ParallelRun)
        results.append(first)
    expected, found = results
    assert found.losses == expected.losses and found.grad_norms == expected.grad_norms
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert found.weights[name].equal(weight), name
