"""A run starts with the plain model's weights, and no rank ever holds the complete model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.verify import LogicalTensors, gather_weights
from megaspeed.model.gpt import GPT
from megaspeed.model.initialization import initialize
from megaspeed.tensor_parallel.parallelize import materialize
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import build
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, merge, tiny_corpus, tiny_run
from tests.zero.one_rank import OFFLOAD_ALL, one_rank, small_run

BF16 = {"bf16": {"enabled": True}}
UNTIED = {"tie_word_embeddings": False}


def elements_while_building(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[int, int, int]:
    """Return (most elements gathered at a time, elements of the largest layer, of all layers)."""
    whole: list[int] = []
    layers: list[int] = []

    def watched(
        model: GPT,
        value_of: Callable[[str], Tensor],
        *,
        on_layer_ready: Callable[[nn.Module], None],
        **how: Any,
    ) -> None:
        layers.extend(sum(p.numel() for p in layer.parameters()) for layer in model.layer_modules())

        def look() -> None:
            parameters = model.parameters()
            whole.append(sum(p.numel() for p in parameters if p.device.type != "meta"))

        def watched_value(name: str) -> Tensor:
            value = value_of(name)
            look()
            whole[-1] += value.numel()
            return value

        def watched_layer(layer: nn.Module) -> None:
            look()
            on_layer_ready(layer)
            look()

        materialize(model, watched_value, on_layer_ready=watched_layer, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "materialize", watched)
        with one_rank(launch, run, corpus):
            return max(whole), max(layers), sum(layers)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_zero3_builds_with_one_whole_layer_at_a_time(
    pool: RankPool, text: Path, cache: Path, pp: int, tp: int
) -> None:
    blocks = {"num_hidden_layers": 5}
    run = tiny_run(text, pp=pp, dp=2, tp=tp, model=blocks, zero_optimization={"stage": 3})
    corpus = tiny_corpus(run, cache)
    for most, largest_layer, all_layers in pool.run(
        2 * pp * tp, elements_while_building, run, corpus
    ):
        assert 0 < most <= largest_layer < all_layers / 2


def initial_weights(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> LogicalTensors | None:
    with one_rank(launch, run, corpus) as rank:
        return gather_weights(rank.worker)


@pytest.mark.parametrize(
    ("layout", "stage", "changes"),
    [
        ((2, 2, 2), 0, {}),
        ((1, 1, 4), 1, {"model": LLAMA}),
        ((3, 1, 2), 2, {"model": UNTIED}),
        ((2, 2, 2), 3, {}),
        ((1, 3, 2), 3, BF16),
        ((3, 2, 1), 3, {"model": LLAMA, "zero_optimization": OFFLOAD_ALL}),
    ],
)
def test_initial_weights_are_those_of_the_plain_model_bit_for_bit(
    pool: RankPool,
    text: Path,
    cache: Path,
    layout: tuple[int, int, int],
    stage: int,
    changes: dict[str, Any],
) -> None:
    pp, dp, tp = layout
    zero = {"zero_optimization": {"stage": stage}}
    run = small_run(text, pp=pp, dp=dp, tp=tp, **merge(zero, changes))
    gathered = pool.run(pp * dp * tp, initial_weights, run, tiny_corpus(run, cache))[0]
    assert gathered is not None

    plain = GPT(run.config.model)
    initialize(plain, run.config.model, run.config.training.seed)
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert gathered.tensors.keys() == expected.keys()
    assert gathered.copies_differ_by == 0.0
    for name, value in expected.items():
        rounded = value.bfloat16().float() if run.precision == "bf16" else value
        assert torch.equal(gathered.tensors[name], rounded), name
