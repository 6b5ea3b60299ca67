"""The choices of experts in both trainings, and the balance of the single process.

    ranks          [decide] -> choices of each sample --replayed--+
                                                                  v
    one process    [decide] -> its own choices, compared     used instead
                   [router] -> scores -> auxiliary loss, by autograd

Two scores of a token may be nearly equal. Then rounding determines which is larger, and so which
expert the token uses. If the two trainings choose different experts, the choice is flipped. A
flipped choice changes a result much more than rounding does, although neither training is wrong.
So the single process uses the choices of the ranks (it replays them), and counts how many of its
own would differ. The two scores of a flipped choice must be nearly equal.

This file does not use ``training/balance.py`` or the gradient scale of the model, because it
checks them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.data.loader import LoaderShape
from megaspeed.model.documents import places_in
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import GPT
from megaspeed.model.micro_batch import MicroBatch


@dataclass
class ExpertRecord:
    """What a training records about its experts. Empty if the model has none."""

    loads: list[list[list[int]]] = field(default_factory=list)  # of each step, block and expert
    bias: Tensor | None = None  # of the routers (blocks, E), after the last step
    auxiliary_losses: list[float] = field(default_factory=list)  # of each step, without coefficient
    choices: Tensor | None = None  # (blocks, samples of all steps, S, k) int32, made by the ranks
    flipped: int = 0  # how many of them the single process would have made differently
    # For each step, the largest difference between the scores of a process's own choice and of the
    # replayed one, relative to the token's largest score.
    gaps: list[float] = field(default_factory=list)


def experts_of(model: nn.Module) -> dict[int, Experts]:
    """Number of the block -> its experts."""
    assert isinstance(model, GPT)
    return {int(n): b.mlp for n, b in model.blocks.items() if isinstance(b.mlp, Experts)}


def record_choices(model: nn.Module, run: Run, shape: LoaderShape, steps: int) -> Tensor:
    """Record the choices of a rank's blocks in all training forwards that follow.

    Returns:
        (blocks of the complete model, samples, S, k) int32. The forwards fill it. It is -1 where
        another rank chooses.
    """
    config, length = run.config.model, run.config.data.sequence_length
    active, batches = config.num_experts_per_tok or 0, [*run.schedule.first_steps(length, steps)]
    samples, size = sum(batch for _, batch in batches), shape.micro_batch_size * shape.dp_size
    choices = torch.full((config.num_hidden_layers, samples, length, active), -1).int()
    places = places_in(shape.part.ranges(length))

    def recorded(experts: Experts, of_block: Tensor) -> Callable[..., Tensor]:
        decide, (part, parts) = experts.decide, experts.part
        # In every schedule, the forwards of a block come in the order of the micro-batches.
        forwards = ((start, m) for start, batch in batches for m in range(batch // size))

        def record(scores: Tensor) -> Tensor:
            start, index = next(forwards)
            rows = start + torch.tensor(shape.rows(index)).unsqueeze(1)
            tokens = torch.broadcast_tensors(rows, places)  # of all tensor ranks
            own = [each.flatten().chunk(parts)[part] for each in tokens]
            chosen = decide(scores)
            of_block[own[0], own[1]] = chosen.to("cpu", torch.int32)
            return chosen

        return record

    for block, experts in experts_of(model).items():
        experts.decide = recorded(experts, choices[block])  # type: ignore[method-assign]
    return choices


class ReferenceExperts:
    """The experts of the single process. If the model has no experts, it does nothing.

    Args:
        model: the complete model.
        run: the run, with the coefficients of the balance.
        replayed: the choices that the model uses instead of its own; None to use its own.
    """

    def __init__(self, model: GPT, run: Run, replayed: Tensor | None) -> None:
        self._config, self._rows = run.config.model, 0
        self._count = self._config.num_experts or 0
        self._replayed, self._experts = replayed, experts_of(model)
        self._scores: dict[int, Tensor] = {}  # of the last forward (T, E), with their graph
        self._used: dict[int, list[Tensor]] = {block: [] for block in self._experts}
        device = next(model.parameters()).device
        self._bias = torch.zeros(len(self._experts), self._count, device=device)
        self.record = ExpertRecord()
        for block, experts in self._experts.items():
            experts.bias = self._bias[block]
            experts.router.register_forward_hook(partial(self._keep, block))
            decide = partial(self._decide, block, experts.decide)
            experts.decide = decide  # type: ignore[method-assign]

    def begin_step(self, rows: int) -> None:
        """Begin a step of ``rows`` sequences."""
        self._rows = rows
        self._used = {block: [] for block in self._experts}
        self.record.auxiliary_losses.append(0.0)
        self.record.gaps.append(0.0)

    def begin_forward(self, batch: MicroBatch) -> None:
        self._samples = batch.samples.cpu()

    def objective(self) -> Tensor | float:
        """The auxiliary loss of the last forward, times its coefficient.

        For each block and sequence it is E sum_e f_e P_e. f_e is the fraction of the sequence's
        tokens that use expert e, P_e the mean score of e. The loss of a step is the mean over its
        sequences, summed over blocks.
        """
        if self._config.router_aux_loss_coef == 0.0:
            return 0.0
        losses = []
        for block, scores in self._scores.items():
            by_row = scores.view(len(self._samples), -1, self._count)  # (B, S, E)
            used = self._used[block][-1].view(*by_row.shape[:2], -1)  # (B, S, k)
            fractions = F.one_hot(used, self._count).sum(2).float().mean(1)
            losses.append(self._count * (fractions * by_row.mean(1)).sum())
        loss = torch.stack(losses).sum() / self._rows
        self.record.auxiliary_losses[-1] += loss.item()
        return self._config.router_aux_loss_coef * loss

    def end_step(self, *, taken: bool) -> None:
        """Record the loads of the step. If it is taken, move each bias towards equal loads."""
        self.record.loads.append([])
        for block, used in self._used.items():
            loads = torch.bincount(torch.cat(used).flatten(), minlength=self._count)
            self.record.loads[-1].append(loads.tolist())
            # The mean load is sum / E; without the division, whole numbers are compared.
            below = torch.sign(loads.sum() - self._count * loads)
            self._bias[block] += self._config.router_bias_rate * below * taken
        self.record.bias = self._bias.cpu()

    def _keep(self, block: int, _: nn.Module, __: Any, scores: Tensor) -> None:
        self._scores[block] = scores

    def _decide(self, block: int, decide: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        used = decide(scores)
        if self._replayed is not None:
            own, used = used, self._replayed[block, self._samples].to(used).view_as(used)
            self.record.flipped += int((own.unsqueeze(2) != used.unsqueeze(1)).all(2).sum())
            biased = scores + self._bias[block]
            best, replayed = (biased.gather(1, these).sort().values for these in (own, used))
            gap = ((best - replayed) / scores.amax(1, keepdim=True)).max().item()
            self.record.gaps[-1] = max(self.record.gaps[-1], gap)
        self._used[block].append(used)
        return used
