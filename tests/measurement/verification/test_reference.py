"""Every layout is compared with plain training."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.reference import train_reference
from megaspeed.measurement.verification.verify import whole_batch
from megaspeed.model.gpt import GPT
from megaspeed.model.initialization import initialize
from tests.support.tiny import GPT2, LLAMA, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[3] / "LICENSE"
STEPS = 12


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def by_hand(run: Run, corpus: PreparedCorpus) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a minimal loop in torch, without micro-batches."""
    model = GPT(run.config.model)
    initialize(model, run.config.model, run.config.training.seed)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = whole_batch(run, corpus, step)
        logits = model(torch.cat([part.tokens for part in batch]))
        targets = torch.cat([part.targets for part in batch])
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.config.gradient_clipping)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_reference_is_a_plain_loop_that_learns(shape: dict[str, Any], cache: Path) -> None:
    run = tiny_run(TEXT, model=shape)
    corpus = tiny_corpus(run, cache)
    record = train_reference(run, functools.partial(whole_batch, run, corpus), STEPS)
    losses, weights = by_hand(run, corpus)
    assert record.losses == pytest.approx(losses, rel=1e-6)
    assert record.losses[-1] < record.losses[0] - 0.1
    assert all(norm > run.config.gradient_clipping for norm in record.grad_norms)
    for name, weight in weights.items():
        torch.testing.assert_close(record.weights[name], weight, rtol=1e-3, atol=1e-5)
        assert not torch.equal(record.initial_weights[name], weight), f"{name} was trained"


def test_the_norm_is_that_of_the_first_gradients_before_clipping(cache: Path) -> None:
    run = tiny_run(TEXT, gradient_clipping=1e-3)
    batches = functools.partial(whole_batch, run, tiny_corpus(run, cache))
    record = train_reference(run, batches, 1)
    norms = torch.stack([g.norm() for g in record.first_gradients.values()])
    assert record.grad_norms == pytest.approx([float(norms.norm())], rel=1e-5)
    assert record.grad_norms[0] > 1e-3


def test_the_degrees_and_the_micro_batch_are_ignored(cache: Path) -> None:
    def losses(run: Run) -> list[float]:
        batches = functools.partial(whole_batch, run, tiny_corpus(run, cache))
        return train_reference(run, batches, 3).losses

    alone = losses(tiny_run(TEXT))
    spread = losses(tiny_run(TEXT, pp=2, dp=2, tp=2, zero_optimization={"stage": 3}))
    assert spread == pytest.approx(alone, rel=1e-6)


def test_bf16_keeps_fp32_weights_and_stays_near_fp32(cache: Path) -> None:
    run = tiny_run(TEXT)
    batches = functools.partial(whole_batch, run, tiny_corpus(run, cache))
    exact = train_reference(run, batches, STEPS)
    rounded_run = tiny_run(TEXT, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    rounded = train_reference(rounded_run, batches, STEPS)
    assert all(weight.dtype == torch.float32 for weight in rounded.weights.values())
    assert rounded.losses == pytest.approx(exact.losses, rel=1e-3)
    assert rounded.losses != exact.losses
