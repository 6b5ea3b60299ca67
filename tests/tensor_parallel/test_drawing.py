"""Draws have the distribution softmax(z / T), and a rank draws as all ranks together.

Keys are fixed, so a test always gives the same result.
"""

import pytest
import torch
from torch import Tensor

from megaspeed.model.dropout import random_key
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.drawing import Draw

ROWS, IDS = 20_000, 12
LOGITS = torch.linspace(-2, 2, IDS).double().roll(5)
ALL, ALONE = torch.arange(ROWS), TensorAxis()


def scores(draw: Draw, ids: range = range(IDS)) -> Tensor:
    z = LOGITS[ids.start : ids.stop].expand(ROWS, -1)
    return draw.scores(z, ids, ALL, ALONE)


def distance(drawn: Tensor, expected: Tensor) -> float:
    """Return chi-square per degree of freedom, about 1 if the distribution is right."""
    possible = expected > 0
    counts = torch.bincount(drawn, minlength=IDS).double()
    assert counts[~possible].sum() == 0, "these are never drawn"
    expected = expected[possible] * len(drawn)
    return float(((counts[possible] - expected) ** 2 / expected).sum() / (possible.sum() - 1))


@pytest.mark.parametrize("top_k", [None, 5, 100])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_have_the_distribution_of_the_softmax(temperature: float, top_k: int | None) -> None:
    best = LOGITS.topk(min(top_k or IDS, IDS)).indices
    expected = torch.zeros(IDS).double()
    expected[best] = (LOGITS[best] / temperature).softmax(dim=0)
    drawn = scores(Draw(random_key("a"), temperature, top_k)).argmax(dim=1)
    assert distance(drawn, expected) < 3.5, "less than 1 in 100 keys is above it"
    other = scores(Draw(random_key("b"), temperature, top_k)).argmax(dim=1)
    both = drawn[drawn == other]
    assert distance(both, expected**2 / (expected**2).sum()) < 3.5, "keys are independent"
    assert distance(drawn, (1.1 * LOGITS).softmax(dim=0)) > 5, "10% would be noticed"


def test_the_best_of_one_is_the_likeliest() -> None:
    greedy = scores(Draw(random_key("a"), temperature=0.0))
    one = scores(Draw(random_key("a"), 0.8, top_k=1))
    assert torch.equal(one.argmax(dim=1), greedy.argmax(dim=1))
    assert torch.equal(greedy[0], LOGITS)


def test_a_score_depends_on_the_token_and_not_on_the_columns_of_a_rank() -> None:
    draw = Draw(random_key("a"), 0.8)
    parts = [scores(draw, ids) for ids in (range(5), range(5, 6), range(6, IDS))]
    assert torch.equal(torch.cat(parts, dim=1), scores(draw))
    assert len(set(map(tuple, scores(draw).tolist()))) == ROWS, "each prompt has its own draw"


def test_tokens_that_are_never_drawn_are_not() -> None:
    z = LOGITS.clone().index_fill_(0, torch.tensor([3, 5]), -torch.inf).expand(ROWS, -1)
    drawn = Draw(random_key("a"), 100.0).scores(z, range(IDS), ALL, ALONE).argmax(dim=1)
    assert set(drawn.tolist()) == set(range(IDS)) - {3, 5}
