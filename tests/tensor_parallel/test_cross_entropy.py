"""Cross-entropy over a split vocabulary is torch's cross-entropy, without gathering logits."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaspeed.model.micro_batch import NOT_COUNTED
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.plan import vocabulary_rows_per_rank
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.model.tiny_gpt import gpt2
from tests.support.rank_pool import RankPool
from tests.tensor_parallel.side_by_side import Case, steps_on_rank
from tests.tensor_parallel.traffic import Message, Traffic

BATCH, SEQUENCE = 2, 6
IGNORED = [(0, 4), (1, 0)]  # (row, position)
_PADDING_LOGIT = 1e30  # the largest of all, if it were looked at


@dataclass(frozen=True)
class Problem:
    """Logits (B, S, V), targets (B, S), and the gradient of each loss (B, S)."""

    logits: Tensor
    targets: Tensor
    upstream: Tensor


@dataclass(frozen=True)
class Answer:
    """On a rank the gradient is that of its own columns."""

    losses: Tensor
    gradient: Tensor
    messages: tuple[Message, ...] = ()


def problem(
    vocab_size: int,
    *,
    scale: float = 3.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    generator = torch.Generator().manual_seed(vocab_size)
    targets = torch.randint(vocab_size, (BATCH, SEQUENCE), generator=generator)
    targets[0, :2] = torch.tensor([0, vocab_size - 1])
    for ignored in IGNORED:
        targets[ignored] = NOT_COUNTED
    logits = scale * torch.randn(BATCH, SEQUENCE, vocab_size, generator=generator) + shift
    upstream = torch.randn(BATCH, SEQUENCE, generator=generator)
    return Problem(logits.to(dtype), targets, upstream)


def torchs_answer(given: Problem) -> Answer:
    logits = given.logits.float().clone().requires_grad_()
    losses = F.cross_entropy(
        logits.flatten(0, 1), given.targets.flatten(), ignore_index=NOT_COUNTED, reduction="none"
    ).view_as(given.targets)
    losses.backward(given.upstream)
    assert logits.grad is not None
    return Answer(losses.detach(), logits.grad)


# 5 on 4 ranks: three have no logical column. 33 on 4: 16, 16, 1, 0. 301: 80, 80, 80, 61.
ORDINARY = {f"vocabulary of {size}": problem(size) for size in (5, 33, 64, 301)}
HUGE = {
    "huge": problem(33, scale=1e4),
    "huge and shifted": problem(33, scale=1e4, shift=1e6),
}
BF16 = {"bf16": problem(301, dtype=torch.bfloat16)}
PROBLEMS = {**ORDINARY, **HUGE, **BF16}


def answers_on_rank(launch: LaunchEnvironment) -> dict[str, Answer]:
    grid = Grid(pp=1, dp=1, tp=launch.world_size)
    with ParallelContext.create(grid, launch, timeout_seconds=30) as context:
        axis = TensorAxis(context.tp_group, context.tp_rank, context.tp_size)
        return {name: _answer(given, axis) for name, given in PROBLEMS.items()}


def _answer(given: Problem, axis: TensorAxis) -> Answer:
    vocab_size = given.logits.shape[-1]
    rows = vocabulary_rows_per_rank(vocab_size, axis.size)
    start = min(axis.rank * rows, vocab_size)
    vocabulary = range(start, min(start + rows, vocab_size))
    mine = torch.full((BATCH, SEQUENCE, rows), _PADDING_LOGIT, dtype=given.logits.dtype)
    mine[..., : len(vocabulary)] = given.logits[..., vocabulary.start : vocabulary.stop]
    scales = given.upstream.masked_fill(given.targets == NOT_COUNTED, 0.0)
    loss = VocabParallelLoss(vocabulary, axis)
    with Traffic() as traffic:
        losses = loss.cross_entropy(mine.flatten(0, 1), given.targets.flatten(), scales.flatten())
    assert losses.dtype == torch.float32
    assert not mine[..., len(vocabulary) :].any(), "padding has a gradient"
    gradient = mine[..., : len(vocabulary)]
    return Answer(losses.view_as(given.targets), gradient, tuple(traffic.messages))


@pytest.fixture(scope="module", params=[1, 2, 4])
def answers(pool: RankPool, request: pytest.FixtureRequest) -> dict[str, list[Answer]]:
    """Every rank's answer to every problem."""
    by_rank = pool.run(request.param, answers_on_rank)
    return {name: [of_rank[name] for of_rank in by_rank] for name in PROBLEMS}


def gradient(ranks: list[Answer]) -> Tensor:
    """(B, S, V): every rank's columns beside each other."""
    return torch.cat([rank.gradient for rank in ranks], dim=-1)


Answers = dict[str, list[Answer]]


@pytest.mark.parametrize("name", ORDINARY)
def test_losses_and_gradients_are_torchs(answers: Answers, name: str) -> None:
    expected = torchs_answer(PROBLEMS[name])
    torch.testing.assert_close(answers[name][0].losses, expected.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(answers[name]), expected.gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_ranks_have_the_same_losses_bit_for_bit(answers: Answers, name: str) -> None:
    for rank in answers[name]:
        assert torch.equal(rank.losses, answers[name][0].losses)


@pytest.mark.parametrize("name", PROBLEMS)
def test_ignored_targets_have_no_loss_and_no_gradient(answers: Answers, name: str) -> None:
    for row, column in IGNORED:
        assert answers[name][0].losses[row, column] == 0
        assert not gradient(answers[name])[row, column].any()


@pytest.mark.parametrize("name", HUGE)
def test_huge_logits_do_not_overflow(answers: Answers, name: str) -> None:
    losses, expected = answers[name][0].losses, torchs_answer(PROBLEMS[name])
    assert losses.max() > 1e4 and losses.isfinite().all()
    torch.testing.assert_close(losses, expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(answers[name]), expected.gradient, rtol=1e-5, atol=1e-7)


def test_bf16_logits_lose_nothing_but_the_rounding_of_their_gradient(answers: Answers) -> None:
    losses, expected = answers["bf16"][0].losses, torchs_answer(PROBLEMS["bf16"])
    torch.testing.assert_close(losses, expected.losses, rtol=1e-6, atol=1e-6)
    rounded = gradient(answers["bf16"])
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected.gradient, rtol=2.0**-8, atol=1e-7)


@pytest.mark.parametrize("name", PROBLEMS)
def test_three_numbers_a_token_are_communicated(answers: Answers, name: str) -> None:
    tokens = BATCH * SEQUENCE
    maximum, sums = Message("allreduce_", tokens), Message("allreduce_", 2 * tokens)
    for rank in answers[name]:
        assert rank.messages == (() if len(answers[name]) == 1 else (maximum, sums))


def messages_of_a_step(launch: LaunchEnvironment, case: Case) -> list[Message]:
    with Traffic() as traffic:
        steps_on_rank(launch, [case])
    return traffic.messages


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_message_of_a_whole_step_is_as_large_as_a_ranks_logits(
    pool: RankPool, sequence_parallel: bool
) -> None:
    case = Case(config=gpt2(), sequence_parallel=sequence_parallel)
    tokens, hidden, columns = 3 * 8, 32, 152
    largest = max(message.elements for message in pool.run(2, messages_of_a_step, case)[0])
    assert largest == tokens * hidden < tokens * columns  # a hidden state, as in every block
