"""The gradient norm counts every logical parameter once, at every layout.

If every element of the gradient is 1, the norm is the square root of the number of elements. The
tests compute this number from the shape of the model alone. Elements that exist only because of the
layout (rows of vocabulary padding) get 1000. These must not affect the norm.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16, BF16_IN_FP32, merge, tiny_corpus, tiny_run
from tests.zero.one_rank import OFFLOAD, OFFLOAD_ALL, OneRank, one_rank

# 1, 2, 3 and 4 divide the 12 heads. 2, 3 and 4 do not divide the vocabulary.
GPT2 = {
    "architecture": "gpt2",
    "vocab_size": 301,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "max_position_embeddings": 8,
}
LLAMA = {
    "architecture": "llama",
    "vocab_size": 301,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 60,
    "max_position_embeddings": 8,
}
UNTIED = {**GPT2, "tie_word_embeddings": False}
TIED_LLAMA = {**LLAMA, "tie_word_embeddings": True}
ONE_KEY_VALUE_HEAD = {**LLAMA, "num_key_value_heads": 1}

KEEP_SMALL_PARAMETERS = {"stage3_param_persistence_threshold": 500}
PER_MICRO_BATCH = {"parallel": {"gradient_reduction": "per_micro_batch"}}
PER_STEP = {"parallel": {"gradient_reduction": "per_step"}}
SEQUENCE_PARALLEL = {"parallel": {"sequence_parallel": True}}

# (pp, dp, tp), model, ZeRO stage, more of zero_optimization, more of the JSON
CASES: list[tuple[tuple[int, int, int], dict[str, Any], int, dict[str, Any], dict[str, Any]]] = [
    ((1, 1, 1), GPT2, 0, {}, {}),
    ((1, 2, 2), GPT2, 0, {}, PER_MICRO_BATCH),
    ((2, 1, 4), LLAMA, 0, {}, {}),
    ((4, 2, 1), UNTIED, 0, {}, BF16_IN_FP32),
    ((1, 1, 3), GPT2, 1, {}, SEQUENCE_PARALLEL | {"data": {"sequence_length": 6}}),
    ((2, 2, 2), TIED_LLAMA, 1, {}, BF16_IN_FP32),
    ((1, 2, 4), ONE_KEY_VALUE_HEAD, 1, {}, PER_MICRO_BATCH),
    ((4, 1, 2), UNTIED, 1, OFFLOAD, {}),
    ((1, 3, 2), GPT2, 2, {}, {}),
    ((2, 2, 1), GPT2, 2, {}, BF16),
    ((3, 2, 1), TIED_LLAMA, 2, {}, PER_STEP),
    ((2, 1, 2), GPT2, 2, OFFLOAD, {}),
    ((1, 2, 2), LLAMA, 3, {}, {}),
    ((2, 2, 2), GPT2, 3, {}, {}),
    ((2, 1, 3), ONE_KEY_VALUE_HEAD, 3, {}, {}),
    ((2, 3, 1), GPT2, 3, KEEP_SMALL_PARAMETERS, PER_STEP),
    ((1, 2, 4), TIED_LLAMA, 3, OFFLOAD_ALL, {}),
    ((2, 2, 1), GPT2, 3, OFFLOAD, BF16_IN_FP32),
]


def describe(case: tuple[Any, ...]) -> str:
    (pp, dp, tp), model, stage, zero, more = case
    tied = model.get("tie_word_embeddings", model["architecture"] == "gpt2")
    words = [f"zero{stage}", f"pp{pp}", f"dp{dp}", f"tp{tp}", model["architecture"]]
    words += ["tied"] * tied + sorted(zero) + sorted(more)
    return "-".join(words)


def logical_parameters(config: ModelConfig) -> int:
    """Return how many elements the model's parameters have, from its shape alone."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    head = 0 if config.tie_word_embeddings else v * d
    if config.architecture == "gpt2":
        attention = 3 * (d * d + d) + (d * d + d)
        mlp = (d * f + f) + (f * d + d)
        norms, final_norm = 2 * (d + d), d + d
        positions = config.max_position_embeddings * d
    else:
        key_value = config.num_key_value_heads * config.head_dim
        attention = d * d + 2 * key_value * d + d * d
        mlp = 3 * d * f
        norms, final_norm = 2 * d, d
        positions = 0
    block = attention + mlp + norms
    return v * d + positions + config.num_hidden_layers * block + final_norm + head


def write_ones(rank: OneRank) -> None:
    """Write 1 to every logical element of this rank's gradient, and 1000 to vocabulary padding."""
    for fragment in rank.engine.gradients.fragments:
        shard = rank.worker.shards[fragment.name]
        width = shard.local_shape[1] if len(shard.local_shape) == 2 else 1
        logical = max(0, shard.logical_rows * width - fragment.start)
        fragment.values[:logical] = 1.0
        fragment.values[logical:] = 1000.0


def norm_of_ones(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> float:
    with one_rank(launch, run, corpus) as rank:
        result = rank.train_step(0, look=lambda: write_ones(rank))
        assert not result.skipped
        return result.grad_norm


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_a_gradient_of_ones_has_the_square_root_of_the_number_of_parameters_as_norm(
    pool: RankPool, text: Path, cache: Path, case: tuple[Any, ...]
) -> None:
    (pp, dp, tp), model, stage, zero, more = case
    small = {
        "model": model,
        "data": {"sequence_length": 8},
        "zero_optimization": {"stage": stage, **zero},
        "gradient_accumulation_steps": 2,
    }
    run = tiny_run(text, pp=pp, dp=dp, tp=tp, **merge(small, more))
    norms = pool.run(pp * dp * tp, norm_of_ones, run, tiny_corpus(run, cache))
    expected = math.sqrt(logical_parameters(run.config.model))
    assert norms == pytest.approx([expected] * len(norms), rel=1e-6)
    assert len(set(norms)) == 1, "all ranks clip by the same number"
