"""A mixture of experts in place of the MLP: each token uses k of E feed-forward layers.

    h (B, S, D) -> [scores] -> (T, E) -> [choose] -> Routing -> [experts] -> (B, S, D)

    scores     softmax of the router's product, in fp32; T = B S tokens
    choose     the k experts with the largest scores of each token, of equal scores the first ones
    experts    T k rows sorted by expert -> gate and up -> silu(gate) * up * score -> down
               -> sum over the k rows of each token

A row is a token with one of its experts, so each token has k rows. ("Row of a weight" and
"sequence" are named as such.) No token is dropped and no row is padding, so the output of a token
does not depend on the other tokens. Forward and backward move rows by gathers, so only counts,
which are whole numbers, are added in any order: two runs of one layout have the same bits. Experts
are chosen with a stable sort, because torch does not define which of equal scores ``topk`` returns.

The choice is made once for each forward. If a block is recomputed, it uses the choice of the
forward: rounding may differ, and another choice would give wrong gradients.

``Balance`` (``training/balance.py``) counts how many tokens use each expert, and may add a bias to
the scores, for the choice only.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.grouped_products import converting_product, grouped_product
from megaspeed.model.parameters import Row
from megaspeed.model.recomputation import Compose


class Routing(NamedTuple):
    """Which experts the tokens of a micro-batch use. The T k rows are sorted by expert."""

    experts: Tensor
    """(T, k) int64, the experts that each token uses."""
    order: Tensor
    """(T k,) int64, for each row: token x k + place of the expert in the token's choice."""
    rows: Tensor
    """(T, k) int64, the row of each token and expert; the inverse of ``order``."""
    offsets: Tensor
    """(E,) int32, where the rows of each expert end."""
    counts: Tensor | None
    """(B, E) int64, how many tokens of each complete sequence use each expert; None if there is no
    auxiliary loss."""


class ExpertLinear(nn.Module):
    """The matrices of all experts, one below the other: a weight (E out, in)."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        assert row.columns is not None
        self._experts = row.experts
        self.weight = nn.Parameter(torch.empty(row.rows, row.columns))
        if not self.weight.is_meta:  # torch imports its compiler to draw on the meta device
            nn.init.normal_(self.weight)

    @property
    def matrices(self) -> Tensor:
        """The weight as (E, out, in)."""
        return self.weight.view(self._experts, -1, self.weight.shape[1])


class Router(ExpertLinear):
    """Computes the scores of the experts. It has one matrix, (E, D)."""

    def forward(self, h: Tensor) -> Tensor:
        """Map h (B, S, D) to scores (T, E) in fp32."""
        logits: Tensor = _Logits.apply(h.flatten(0, 1), self.weight)
        return logits.softmax(dim=-1)


def auxiliary_loss(scores: Tensor, counts: Tensor, active: int) -> Tensor:
    """E sum_e f_e P_e of each sequence, summed over the sequences: an fp32 scalar.

    f_e is the fraction of the sequence's tokens that use expert e, P_e the mean score of e in the
    sequence (Fedus et al. 2021, "Switch Transformers", equation 4). The loss of a sequence is k if
    all experts get equally many tokens. ``load_balancing_loss_func`` of transformers returns the
    same if it is called with one layer and one sequence.

    Args:
        scores: (T, E) of this rank's tokens. If ranks share a sequence, the sum of their results is
            the loss of the sequence.
        counts: (B, E) of complete sequences, see ``Routing``.
        active: k.
    """
    length = counts.sum(1, keepdim=True) / active  # tokens of a complete sequence
    probabilities = scores.view(len(counts), -1, scores.shape[1]).sum(1) / length
    return (counts / length * probabilities).sum() * scores.shape[1]


class Experts(nn.Module):
    """The router and all experts of a block. Each expert computes what ``SwiGluMlp`` does.

    ``share_sequences`` sets ``sum_over_sequence``. ``Balance`` sets ``bias``, ``counts`` and
    ``auxiliary``.
    """

    def __init__(
        self, config: ModelConfig, modules: Mapping[str, nn.Module], compose: Compose
    ) -> None:
        super().__init__()
        assert config.num_experts_per_tok is not None
        self.compose = compose
        router, gate_up, down = (modules[f"mlp.{name}"] for name in ("router", "gate_up", "down"))
        assert isinstance(gate_up, ExpertLinear) and isinstance(down, ExpertLinear)
        self.router, self.gate_up, self.down = router, gate_up, down
        self.active = config.num_experts_per_tok
        self.normalizes = config.norm_topk_prob
        self.coefficient = config.router_aux_loss_coef
        self.bias: Tensor | None = None
        """(E,) fp32, added to the scores for the choice only."""
        self.counts: Tensor | None = None
        """(E,) int64: each training forward adds how many tokens use each expert."""
        self.auxiliary: Tensor | None = None
        """fp32 scalar: each training forward adds the auxiliary losses of its sequences."""
        self.sum_over_sequence: Callable[[Tensor], None] | None = None
        """Sums counts over the ranks that share each sequence, in place."""

    def decide(self, scores: Tensor) -> Tensor:
        """The experts of each token (T, k), the one with the largest score first."""
        biased = scores if self.bias is None else scores + self.bias
        experts = biased.sort(dim=-1, descending=True, stable=True).indices  # (T, E)
        return experts[:, : self.active].contiguous()  # a view would keep all for the backward

    @torch.no_grad()
    def choose(self, scores: Tensor, sequences: int, *, is_trained: bool) -> Routing:
        """Choose the experts of each token.

        Args:
            scores: (T, E).
            sequences: B, the number of sequences.
            is_trained: whether a backward follows. Only then are the tokens of experts counted.
        """
        experts = self.decide(scores)
        counts = scores.new_zeros((sequences, scores.shape[1]), dtype=torch.int64)
        choices = experts.reshape(sequences, -1)
        counts.scatter_add_(1, choices, torch.ones_like(choices))  # exact in any order
        of_all = counts.sum(0)
        if is_trained and self.counts is not None:
            self.counts += of_all
        order = experts.flatten().sort(stable=True).indices
        rows = torch.empty_like(order)
        rows.scatter_(0, order, torch.arange(len(order), device=order.device))
        routing = Routing(experts, order, rows.view_as(experts), of_all.cumsum(0).int(), None)
        if not is_trained or self.coefficient == 0.0:
            return routing
        if self.sum_over_sequence is not None:
            self.sum_over_sequence(counts)
        if self.auxiliary is not None:
            self.auxiliary += auxiliary_loss(scores, counts, self.active)
        return routing._replace(counts=counts)

    def forward(
        self, h: Tensor, scores: Tensor, routing: Routing, gradient_scale: Tensor | None
    ) -> Tensor:
        """Map h (B, S, D) to (B, S, D).

        Args:
            h: hidden states (B, S, D).
            scores: (T, E) of the router.
            routing: the choice.
            gradient_scale: scalar. The backward computes gradients of this number times the sum of
                the losses of all tokens. None if there is no auxiliary loss.
        """
        if gradient_scale is not None and routing.counts is not None:
            scale = gradient_scale * self.coefficient
            scores = _AuxiliaryLoss.apply(scores, routing.counts, scale, self.active)
        weights = scores.gather(1, routing.experts)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        of_rows = weights.to(h.dtype).flatten().gather(0, routing.order).unsqueeze(1)
        where = (routing.order // self.active, routing.rows, routing.offsets)
        gate_up = _GateUp.apply(h.flatten(0, 1), self.gate_up.matrices, *where)
        matrices = self.down.matrices
        activation = partial(_swiglu, weights=of_rows)
        y = self.compose(activation, lambda x: _Down.apply(x, matrices, *where), gate_up)
        return y.view_as(h)


def _swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)  # each (T k, F)
    return F.silu(gate) * up * weights


class _Logits(torch.autograd.Function):
    """h W^T in fp32, or in fp64 if h is fp64. h is kept for the backward in its own type."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        return F.linear(h.to(wide), weight.to(wide))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        of_h = converting_product(gradient, weight).to(h.dtype)
        return of_h, converting_product(gradient.t(), h).to(weight.dtype)


class _AuxiliaryLoss(torch.autograd.Function):
    """Returns the scores. The backward adds the gradient of ``scale`` x S x ``auxiliary_loss``."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, scale: Tensor, active: int) -> Tensor:
        ctx.save_for_backward(counts, scale)
        ctx.active = active
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        counts, scale = ctx.saved_tensors
        tokens, experts = gradient.shape
        used = counts / (counts.sum(1, keepdim=True) / ctx.active)  # f_e of each sequence
        added = (used * (scale * experts)).unsqueeze(1)  # (B, 1, E)
        by_row = gradient.view(len(counts), tokens // len(counts), experts)
        return (by_row + added).view_as(gradient), None, None, None


class _GateUp(torch.autograd.Function):
    """Each token times the matrices of its experts: (T, D) -> (T k, F + F), sorted by expert.

    The backward gathers the rows again, so only (T, D) is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, matrices: Tensor, tokens: Tensor, rows: Tensor, offsets: Tensor
    ) -> Tensor:
        ctx.save_for_backward(h, matrices, tokens, rows, offsets)
        return grouped_product(h[tokens], matrices.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        h, matrices, tokens, rows, offsets = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_matrices = grouped_product(gradient.t(), h, offsets, tokens)
        of_h = grouped_product(gradient, matrices, offsets)[rows].sum(1)
        return of_h, of_matrices, None, None, None


class _Down(torch.autograd.Function):
    """Each row times the matrix of its expert, summed for each token: (T k, F) -> (T, D)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrices: Tensor, tokens: Tensor, rows: Tensor, offsets: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, matrices, tokens, offsets)
        return grouped_product(x, matrices.transpose(1, 2), offsets)[rows].sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, matrices, tokens, offsets = ctx.saved_tensors
        of_rows = gradient[tokens]
        of_matrices = grouped_product(of_rows.t(), x, offsets)
        return grouped_product(of_rows, matrices, offsets), of_matrices, None, None, None
