"""A model of transformers is imported, trained and exported the same at every layout.

    stock model --import--> checkpoint --load--> ranks --logits, a few steps--> the stock model's
                                                   |
                                                   +--save--export--> the stock model's weights

The stock model is trained by transformers and torch alone; only the samples are ours. Every model
is laid out over all axes at once, and at one more layout.
(``tests/parallel/test_equality.py`` compares the layouts of each family with each other.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.hugging_face import read_model_section
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from tests.hugging_face.imported_run import train_imported
from tests.hugging_face.models import (
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    same,
    saved,
    smollm3,
    stablelm,
    starcoder2,
    weights_in,
)
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
STEPS = 2
WEIGHTS = 2e-4
"""How much trained weights may differ."""

Layout = tuple[int, int, int]  # (pipeline, data, tensor)
ALL_AXES: Layout = (2, 2, 2)
ZERO_STAGES: dict[Layout, int] = {(1, 1, 1): 0, (2, 2, 1): 3, (1, 2, 2): 1, ALL_AXES: 2}

NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Layout]] = {
    "gpt2 tied": (lambda: gpt2(n_layer=3, **NO_DROPOUT), (2, 2, 1)),
    "llama grouped, tied": (
        lambda: llama(num_hidden_layers=3, tie_word_embeddings=True),
        (1, 2, 2),
    ),
    "llama grouped, untied": (lambda: llama(num_hidden_layers=3), (2, 2, 1)),
    "mistral": (lambda: mistral(num_hidden_layers=3), (1, 1, 1)),
    "gpt_neox": (lambda: gpt_neox(num_hidden_layers=3), (1, 2, 2)),
    "granite": (lambda: granite(num_hidden_layers=3), (1, 1, 1)),
    "olmo2": (lambda: olmo2(num_hidden_layers=3), (2, 2, 1)),
    "smollm3": (smollm3, (1, 1, 1)),
    "stablelm": (lambda: stablelm(num_hidden_layers=3), (1, 1, 1)),
    "phi3": (
        lambda: phi3(num_hidden_layers=3, num_key_value_heads=1, sliding_window=12),
        (1, 1, 1),
    ),
    "qwen2": (lambda: qwen2(num_hidden_layers=3), (1, 2, 2)),
    "qwen3": (lambda: qwen3(num_hidden_layers=3, attention_bias=True), (1, 1, 1)),
    "starcoder2": (lambda: starcoder2(num_hidden_layers=3), (1, 1, 1)),
    "qwen3_moe": (lambda: qwen3_moe(num_hidden_layers=3, num_experts=4), (2, 2, 1)),
}


@dataclass
class Trained:
    """A model after training.

    Attributes:
        logits: logits (24, S, V) of the first step's samples, before that step.
        losses: loss of each step.
        weights: weights after the last step, under transformers' names.
    """

    logits: Tensor
    losses: list[float]
    weights: dict[str, Tensor]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("make", "another"), MODELS.values(), ids=MODELS.keys())
def test_an_imported_model_is_the_stock_model(
    make: Callable[[], PreTrainedModel], another: Layout, pool: RankPool, tmp_path: Path
) -> None:
    stock = make()
    folder = saved(stock, tmp_path / "hf")
    imported = tmp_path / "imported"
    import_model(folder, imported)
    corpus = tiny_corpus(run_at((1, 1, 1), folder, tmp_path), tmp_path / "cache")
    expected = train_stock(stock, run_at((1, 1, 1), folder, tmp_path), corpus)
    first = weights_in(folder)
    changes = [(expected.weights[name] - first[name]).abs().max() for name in expected.weights]
    assert min(changes) > 2 * WEIGHTS, "otherwise, missing steps would not be noticed"
    for layout in (ALL_AXES, another):
        run = run_at(layout, folder, tmp_path)
        world_size = run.grid.world_size
        logits, losses = pool.run(world_size, train_imported, run, corpus, imported, STEPS)[0]
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-4, msg=str(layout))
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0, msg=str(layout))
        before, after = sorted((run.run_dir / "checkpoints").glob("step-*"))
        export_model(before, tmp_path / f"before {layout}")
        assert same(weights_in(folder), weights_in(tmp_path / f"before {layout}")), layout
        export_model(after, tmp_path / f"after {layout}")
        trained = weights_in(tmp_path / f"after {layout}")
        torch.testing.assert_close(
            without_key_biases(trained), without_key_biases(expected.weights), rtol=0, atol=WEIGHTS
        )


def run_at(layout: Layout, folder: Path, place: Path) -> Run:
    (pp, dp, tp), model = layout, read_model_section(str(folder))
    # 4 ranks of a pipeline stage can share the experts.
    expert = math.gcd(model.get("num_experts", 1), 4) if layout == ALL_AXES else 1
    return tiny_run(
        TEXT,
        pp=pp,
        dp=dp,
        tp=tp,
        model=model,
        gradient_accumulation_steps=2,
        zero_optimization={"stage": ZERO_STAGES[layout]},
        parallel={"sequence_parallel": layout == ALL_AXES, "expert": expert},
        training={"run_dir": str(place / f"run {layout}")},
    )


def train_stock(stock: PreTrainedModel, run: Run, corpus: PreparedCorpus) -> Trained:
    """Train the same steps with transformers and torch."""
    size = run.batch.train_batch_size
    loader = TrainingLoader(corpus, LoaderShape(size, 1, 0, 1))
    params = run.config.optimizer.params
    matrices = [p for p in stock.parameters() if p.ndim > 1]
    vectors = [p for p in stock.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": params.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
    )
    batches = [loader.micro_batch(step * size, 0) for step in range(STEPS)]
    with torch.no_grad():
        first = stock(batches[0].tokens).logits
    losses = []
    for batch in batches:
        logits = stock(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stock.parameters(), run.config.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = weights_in(saved(stock, run.run_dir / "stock"))
    return Trained(first, losses, weights)


def without_key_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without biases of keys.

    A key bias changes all scores of a row equally, so its gradient is only rounding. Adam scales it
    to full steps, whose sign may differ between machines.
    """
    return {
        name: torch.cat(value.chunk(3)[::2]) if name.endswith("c_attn.bias") else value
        for name, value in weights.items()
    }
