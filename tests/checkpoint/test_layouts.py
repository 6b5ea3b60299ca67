"""A run saved at any layout continues at any other with the same results.

Seven layouts save and seven load. In the first round, each loads from four: 28 changes of layout,
in which every ZeRO stage follows every other. Further rounds repeat four layouts, each of which
loads from another one, with other models, another precision and other stages.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.comparison import TOLERANCES
from tests.checkpoint.saved_runs import (
    Stretch,
    continue_from,
    only_checkpoint,
    save_and_continue,
)
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16_IN_FP32, LLAMA, MOE, MUON, tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2))
LATER_LAYOUTS = (1, 3, 2, 5)
"""The order matters, because each loads what the next one saved: pp 2, tp 2, dp 3, dp 2 x tp 2."""
BEFORE, AFTER = 3, 3
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}}

# No degree divides the 301 tokens, or the number of layers (embedding, 3 blocks and head). Both
# tensor ranks have the only key/value head.
ROUNDS: dict[str, dict[str, Any]] = {
    "gpt2-tied": {"scheduler": WARMUP},
    "llama-untied": {
        "model": {
            **LLAMA,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    },
    "gpt2-untied-bf16": {
        "model": {"tie_word_embeddings": False, "residual_dropout": 0.1},
        **BF16_IN_FP32,
    },
    "llama-muon": {
        "model": {**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 1},
        "optimizer": MUON,
    },
}


def stages(round_number: int, layout: int) -> tuple[int, int]:
    """Return (ZeRO stage that saves, ZeRO stage that loads) of a layout in a round."""
    return (layout + round_number) % 4, (3 * layout + 2 * round_number + layout // 4) % 4


def layouts_of(round_number: int) -> Sequence[int]:
    """Return the layouts that save and load in a round."""
    return range(len(LAYOUTS)) if round_number == 0 else LATER_LAYOUTS


def sources(round_number: int, layout: int) -> list[int]:
    """Return the layouts from which a layout loads in a round."""
    layouts = layouts_of(round_number)
    place = layouts.index(layout)
    distances = (0, 1, 2, 3) if round_number == 0 else (1,)
    return [layouts[(place + distance) % len(layouts)] for distance in distances]


def test_every_zero_stage_follows_every_other() -> None:
    for number in range(len(ROUNDS)):
        pairs = {
            (stages(number, source)[0], stages(number, layout)[1])
            for layout in layouts_of(number)
            for source in sources(number, layout)
        }
        assert pairs >= set(product(range(4), range(4))) or number > 0
        assert {load for _, load in pairs} == set(range(4))
        assert len({save for save, _ in pairs}) >= 3


def run_at(
    layout: tuple[int, int, int],
    zero_stage: int,
    folder: Path,
    changes: dict[str, Any],
    keys: dict[str, Any] | None = None,
) -> Run:
    pp, dp, tp = layout
    parallel = {
        "sequence_parallel": tp > 1 and zero_stage % 2 == 1,
        "schedule": ("gpipe", "1f1b")[zero_stage % 2],
        **(keys or {}),
    }
    return small_run(
        TEXT,
        pp=pp,
        dp=dp,
        tp=tp,
        cp=parallel.get("context", 1),
        **{
            **changes,
            "parallel": parallel,
            "zero_optimization": {"stage": zero_stage},
            "training": {"run_dir": str(folder)},
        },
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    run = run_at(LAYOUTS[0], 0, Path("unused"), {})
    return tiny_corpus(run, tmp_path_factory.mktemp("cache"))


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_run_continues_at_every_layout(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, name: str
) -> None:
    number, changes = list(ROUNDS).index(name), ROUNDS[name]
    saved: dict[Path, Stretch] = {}
    checkpoints: dict[int, Path] = {}
    for layout in layouts_of(number):
        run = run_at(LAYOUTS[layout], stages(number, layout)[0], tmp_path / f"{layout}", changes)
        world_size = run.grid.world_size
        stretch = pool.run(world_size, save_and_continue, run, corpus, BEFORE, AFTER)[0]
        checkpoints[layout] = only_checkpoint(run.run_dir)
        saved[checkpoints[layout]] = stretch
    for layout in layouts_of(number):
        run = run_at(LAYOUTS[layout], stages(number, layout)[1], tmp_path / "unused", changes)
        wanted = [checkpoints[source] for source in sources(number, layout)]
        resumed = pool.run(run.grid.world_size, continue_from, run, corpus, wanted, AFTER)[0]
        for checkpoint, after in zip(wanted, resumed, strict=True):
            assert_continues(saved[checkpoint], after, run, str(checkpoint))


def assert_continues(before: Stretch, after: Stretch, run: Run, checkpoint: str) -> None:
    where = f"{checkpoint} at {run.grid}, ZeRO-{run.zero_stage}"
    assert after.copies_differ_by == 0.0, where
    assert before.state.keys() == after.state.keys(), where
    assert ("momentum" in before.state) == (run.muon is not None), where
    bias = before.state.get("router_bias", {}).values()
    assert len(bias) == (run.config.model.num_hidden_layers if run.config.model.num_experts else 0)
    assert all(each.abs().sum() > 0 for each in bias), where
    for kind, tensors in before.state.items():
        assert tensors.keys() == after.state[kind].keys(), where
        for tensor_name, value in tensors.items():
            assert torch.equal(value, after.state[kind][tensor_name]), (where, kind, tensor_name)
    for tensor_name, value in before.computed.items():
        assert torch.equal(value, after.computed[tensor_name]), (where, "computed", tensor_name)
    allowed = TOLERANCES[run.precision].loss
    for uninterrupted, resumed in zip(before.losses, after.losses, strict=True):
        assert abs(resumed - uninterrupted) <= allowed * abs(uninterrupted), where
    assert after.rates == before.rates and after.samples == before.samples, where


def chunks(number: int, groups: int) -> dict[str, Any]:
    return {"schedule": "1f1b", "virtual_stages": number, "micro_batch_groups": groups}


# changes of all layouts, and for each layout (pp, dp, tp), ZeRO stage, keys of ``parallel``
OTHER_KEYS: dict[str, tuple[dict[str, Any], list[tuple[tuple[int, int, int], int, Any]]]] = {
    "replicas": (
        {},
        [
            ((1, 4, 1), 3, {"replicate": 2}),
            ((2, 4, 1), 1, {"replicate": 2}),
            ((1, 2, 2), 3, {}),
            ((1, 4, 2), 2, {"replicate": 4}),
        ],
    ),
    "chunks": (
        {"model": {"num_hidden_layers": 7}, "gradient_accumulation_steps": 4},
        [
            ((2, 2, 1), 3, chunks(2, 2)),
            ((2, 1, 2), 1, chunks(3, 1)),
            ((3, 2, 1), 2, chunks(2, 1)),
            ((4, 1, 1), 3, {}),
        ],
    ),
    "context": (
        {"model": LLAMA},
        [
            ((1, 2, 1), 3, {"context": 2, "context_method": "ulysses"}),
            ((2, 1, 1), 2, {"context": 4, "context_method": "all_gather"}),
            ((1, 1, 2), 1, {"context": 2, "context_method": "all_gather"}),
            ((1, 4, 1), 0, {}),
        ],
    ),
    "muon": (
        {"model": {**LLAMA, "num_hidden_layers": 4}, "optimizer": MUON},
        [
            ((1, 4, 1), 3, {"replicate": 2}),
            ((2, 1, 2), 2, chunks(2, 1)),
            ((1, 2, 1), 1, {"context": 2, "context_method": "ulysses"}),
            ((1, 1, 1), 0, {}),
        ],
    ),
    "experts": (
        {
            "model": {
                **MOE,
                "num_hidden_layers": 4,
                "router_aux_loss_coef": 0.01,
                "router_bias_rate": 0.01,
            },
        },
        [
            ((1, 4, 1), 3, {"replicate": 2, "expert": 4}),
            ((2, 2, 1), 2, {**chunks(2, 1), "expert": 2}),
            ((1, 1, 2), 1, {"context": 2, "context_method": "all_gather", "expert": 2}),
            ((1, 1, 1), 0, {}),
            ((1, 2, 2), 3, {"expert": 2, "expert_exchange": "all_to_all"}),
            ((1, 4, 1), 1, {"expert": 4, "replicate": 2}),
            ((2, 2, 1), 2, {"expert": 2, "expert_exchange": "all_gather"}),
        ],
    ),
    "experts-muon": (
        {"model": {**MOE, "router_bias_rate": 0.01}, "optimizer": MUON},
        [
            ((1, 4, 2), 3, {"replicate": 2}),  # experts: 2 replicas of 4 shards
            ((1, 2, 2), 1, {"expert": 4}),
            ((2, 2, 1), 0, {"expert": 2}),
        ],
    ),
}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", OTHER_KEYS)
def test_a_run_continues_with_other_keys(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, name: str
) -> None:
    """Each layout loads what each of the others has saved."""
    changes, layouts = OTHER_KEYS[name]
    saved: dict[Path, Stretch] = {}
    for number, (layout, stage, keys) in enumerate(layouts):
        run = run_at(layout, stage, tmp_path / f"{number}", changes, keys)
        size = run.grid.world_size
        stretch = pool.run(size, save_and_continue, run, corpus, BEFORE, AFTER)[0]
        saved[only_checkpoint(run.run_dir)] = stretch
    for layout, stage, keys in layouts:
        run = run_at(layout, stage, tmp_path / "unused", changes, keys)
        wanted = list(saved)
        resumed = pool.run(run.grid.world_size, continue_from, run, corpus, wanted, AFTER)[0]
        for checkpoint, after in zip(wanted, resumed, strict=True):
            assert_continues(saved[checkpoint], after, run, str(checkpoint))
