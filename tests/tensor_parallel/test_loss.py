"""The loss over a split vocabulary equals torch's cross-entropy. It neither gathers nor saves
logits.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.measurement.allocations import AllocationLog
from megaspeed.model.micro_batch import NOT_COUNTED
from megaspeed.tensor_parallel import shards
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.shards import vocabulary_rows_per_rank
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.model.tiny_gpt import gpt2
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.tensor_parallel.side_by_side import Case, steps_on_rank
from tests.tensor_parallel.traffic import Message, Traffic

BATCH, SEQUENCE = 2, 6
IGNORED = [(0, 4), (1, 0)]  # (row, position)
_PADDING_LOGIT = 1e30  # the largest of all; the loss must not read it


@dataclass(frozen=True)
class Problem:
    """Logits (B, S, V), targets (B, S), and the gradient of each loss (B, S)."""

    logits: Tensor
    targets: Tensor
    upstream: Tensor


@dataclass(frozen=True)
class Answer:
    """The loss and its gradient. On a rank, the gradient is that of its own columns."""

    losses: Tensor
    gradient: Tensor
    messages: tuple[Message, ...] = ()
    z_losses: Tensor | None = None


Z_LOSS = 0.01


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


def torchs_answer(given: Problem, z_loss: float = 0.0) -> Answer:
    logits = given.logits.float().clone().requires_grad_()
    losses = F.cross_entropy(
        logits.flatten(0, 1), given.targets.flatten(), ignore_index=NOT_COUNTED, reduction="none"
    ).view_as(given.targets)
    z_losses = logits.logsumexp(dim=-1).square() * (given.targets != NOT_COUNTED)
    (losses + z_loss * z_losses).backward(given.upstream)
    assert logits.grad is not None
    return Answer(losses.detach(), logits.grad, (), z_losses.detach())


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
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        axis = TensorAxis(context.tp_group, context.tp_rank, context.grid.tp)
        found = {name: _answer(given, axis) for name, given in PROBLEMS.items()}
        with_z = {name: _answer(given, axis, Z_LOSS) for name, given in ORDINARY.items()}
        return found | {f"{name}, z-loss": answer for name, answer in with_z.items()}


def _answer(given: Problem, axis: TensorAxis, z_loss: float = 0.0) -> Answer:
    vocab_size = given.logits.shape[-1]
    rows = vocabulary_rows_per_rank(vocab_size, axis.size)
    start = min(axis.rank * rows, vocab_size)
    vocabulary = range(start, min(start + rows, vocab_size))
    mine = torch.full((BATCH, SEQUENCE, rows), _PADDING_LOGIT, dtype=given.logits.dtype)
    mine[..., : len(vocabulary)] = given.logits[..., vocabulary.start : vocabulary.stop]
    scales = given.upstream.masked_fill(given.targets == NOT_COUNTED, 0.0)
    loss = VocabParallelLoss(vocabulary, axis, z_loss)
    with Traffic() as traffic:
        found = loss.cross_entropy(mine.flatten(0, 1), given.targets.flatten(), scales.flatten())
    losses, z_losses = found.losses, found.z_losses
    assert losses.dtype == torch.float32
    assert not mine[..., len(vocabulary) :].any(), "padding has a gradient"
    gradient = mine[..., : len(vocabulary)]
    assert (z_losses is None) == (z_loss == 0.0)
    z_losses = None if z_losses is None else z_losses.view_as(given.targets)
    return Answer(losses.view_as(given.targets), gradient, tuple(traffic.messages), z_losses)


@pytest.fixture(scope="module", params=[1, 2, 4])
def answers(pool: RankPool, request: pytest.FixtureRequest) -> dict[str, list[Answer]]:
    """Return every rank's answer to every problem."""
    by_rank = pool.run(request.param, answers_on_rank)
    return {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}


def gradient(ranks: list[Answer]) -> Tensor:
    """Return the gradient (B, S, V) from the columns of all ranks."""
    return torch.cat([rank.gradient for rank in ranks], dim=-1)


Answers = dict[str, list[Answer]]


@pytest.mark.parametrize("name", ORDINARY)
def test_losses_and_gradients_are_torchs(answers: Answers, name: str) -> None:
    expected = torchs_answer(PROBLEMS[name])
    torch.testing.assert_close(answers[name][0].losses, expected.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(answers[name]), expected.gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ORDINARY)
def test_a_z_loss_equals_its_definition(answers: Answers, name: str) -> None:
    expected, found = torchs_answer(PROBLEMS[name], Z_LOSS), answers[f"{name}, z-loss"]
    for rank in found:
        torch.testing.assert_close(rank.losses, expected.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rank.z_losses, expected.z_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(found), expected.gradient, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(gradient(found), torchs_answer(PROBLEMS[name]).gradient)


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


# --- chunks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadStep:
    """The loss of hidden states, and the gradients of a multiple of it."""

    loss: Tensor
    x_gradient: Tensor
    weight_gradient: Tensor


SCALE = 0.25


def head_of(tokens: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    """Return (hidden states (2, S, D), projection, targets (2, S)). The first target is not
    counted.
    """
    generator = torch.Generator().manual_seed(tokens)
    width = 16
    projection = nn.utils.skip_init(nn.Linear, width, vocab_size, bias=False, dtype=dtype)
    with torch.no_grad():
        projection.weight.normal_(generator=generator)
    x = torch.randn(2, tokens // 2, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (2, tokens // 2), generator=generator)
    targets[0, 0] = NOT_COUNTED
    return x, projection, targets


def our_step(x: Tensor, projection: nn.Linear, targets: Tensor, total: Tensor) -> HeadStep:
    loss = VocabParallelLoss(range(projection.out_features), TensorAxis(None, 0, 1))
    value = loss(x, projection, targets, scale=SCALE, gradient_sum=lambda _: total)
    value.backward()
    assert x.grad is not None and projection.weight.grad is None
    return HeadStep(value.detach(), x.grad, total)


def torchs_step(x: Tensor, projection: nn.Linear, targets: Tensor) -> HeadStep:
    """Compute the same step with torch's cross-entropy, in fp32."""
    x, weight = (t.detach().float().requires_grad_() for t in (x, projection.weight))
    logits = (x @ weight.t()).flatten(0, 1)
    value = F.cross_entropy(logits, targets.flatten(), ignore_index=NOT_COUNTED, reduction="sum")
    (SCALE * value).backward()
    assert x.grad is not None and weight.grad is not None
    return HeadStep(value.detach(), x.grad, weight.grad)


@pytest.mark.parametrize("tokens_in_a_chunk", [24, 12, 5, 1])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)])
def test_chunks_are_torchs_loss_and_gradients_and_add_to_what_is_there(
    dtype: torch.dtype, rtol: float, tokens_in_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_LOGITS_OF_A_CHUNK", tokens_in_a_chunk * 33)
    x, projection, targets = head_of(24, 33, dtype)
    before = torch.ones(33, x.shape[-1])
    ours = our_step(x, projection, targets, before.clone())
    expected = torchs_step(x, projection, targets)
    torch.testing.assert_close(ours.loss, expected.loss, rtol=rtol, atol=0)
    for mine, theirs in (
        (ours.x_gradient.float(), expected.x_gradient),
        (ours.weight_gradient - before, expected.weight_gradient),
    ):
        assert float((mine - theirs).norm()) < rtol * float(theirs.norm())


def test_chunks_are_equally_long_if_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LOGITS_OF_A_CHUNK", 1000)
    assert shards.tokens_of_a_chunk(96, 10) == 96, "960 logits are one chunk"
    assert shards.tokens_of_a_chunk(96, 50) == 16, "6 chunks, because 5 would not be equal"
    assert shards.tokens_of_a_chunk(97, 50) == 20, "a prime number"
    assert shards.tokens_of_a_chunk(4, 5000) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_at_128k_tokens_of_vocabulary_only_a_chunk_of_logits_exists(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size, tokens, chunk = 2**17, 64, 8
    monkeypatch.setattr(shards, "_LOGITS_OF_A_CHUNK", chunk * vocab_size)
    x, projection, targets = head_of(tokens, vocab_size, dtype)
    total = torch.zeros(vocab_size, x.shape[-1])
    our_step(x, projection, targets, total)
    x.grad = None
    loss = VocabParallelLoss(range(vocab_size), TensorAxis(None, 0, 1))
    log = AllocationLog(x.device)
    log.claim("parameters", [x, projection.weight, targets, total])
    with log:
        value = loss(x, projection, targets, scale=1.0, gradient_sum=lambda _: total)
        kept = log.live().activations
        value.backward()
    assert kept <= x.nbytes + 8, "the gradient of the hidden states, and the loss"
    product = 0 if dtype == torch.float32 else projection.weight.nbytes
    of_logits = log.peak().activations - kept - product
    bytes_a_logit = 4 if dtype == torch.float32 else 6
    assert of_logits < 1.001 * bytes_a_logit * chunk * vocab_size
