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

If several ranks share the experts of a block, they exchange tokens (``Exchange``, implemented in
``tensor_parallel/experts.py``), and each computes the rows of its own experts. What is sent has c
columns after the D features. They contain the weights with which the rows are summed:

    h -> [pack] -> sent -> [exchange] -> received -> [experts] -> [exchange] -> returned -> [unpack]

``Balance`` (``training/balance.py``) counts how many tokens use each expert, and may add a bias to
the scores, for the choice only.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.grouped_products import converting_product, grouped_product
from megaspeed.model.recomputation import Compose


class Routing(NamedTuple):
    """Which experts the tokens of a micro-batch use. The T k rows are sorted by expert."""

    experts: Tensor  # (T, k) int64, the experts that each token uses
    # (T k,) int64, for each row: token x k + place of the expert in the token's choice.
    order: Tensor
    rows: Tensor  # (T, k) int64, the row of each token and expert; the inverse of ``order``
    loads: Tensor  # (E,) int64, the number of rows of each expert
    offsets: Tensor  # (E,) int32, where the rows of each expert end
    # (B, E) int64, how many tokens of each complete sequence use each expert; None if there is no
    # auxiliary loss.
    counts: Tensor | None
    # (T,) int64, the sequence of each token; None if all sequences have equally many tokens here,
    # or if there is no auxiliary loss.
    sequences: Tensor | None


class Places(NamedTuple):
    """Where the rows of experts come from, and where they go. Rows are sorted by expert."""

    # (n,) int64, for each row: token x j + place among the token's rows, of which there are at most
    # j.
    order: Tensor
    tokens: Tensor  # (n,) int64, the token of each row
    rows: Tensor  # (tokens, j) int64, the rows of each token
    # (experts,) int32, where the rows of each expert end. Rows after the last offset are not used,
    # and may contain anything.
    offsets: Tensor
    is_used: Tensor | None = None  # (tokens, j) bool, whether a row is used; None if all are


class Received(NamedTuple):
    """What an exchange of a micro-batch needs besides the ``Routing``."""

    sent_rows: list[int]  # how many rows are sent to each rank; empty if that is not needed
    # How many rows are received from each rank; empty if that is not needed.
    received_rows: list[int]
    places: Callable[[], Places]  # sorts what is received by expert, when it is first called


class Exchange(Protocol):
    """How ranks exchange the tokens of their experts."""

    def begin(self, routing: Routing) -> Callable[[], Received]:
        """Start to send the choice to the other ranks. Return a function that waits for theirs."""

    def pack(self, h: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """Return what is sent, (n, D + c), of tokens h (T, D) and weights (T, k) of their rows."""

    def send(self, packed: Tensor, received: Received) -> Tensor:
        """Return what is received, (n, D + c)."""

    def send_back(self, results: Tensor, received: Received) -> Tensor:
        """Return the results (n, D) for the tokens of this rank."""

    def unpack(self, returned: Tensor, routing: Routing) -> Tensor:
        """Return the sum for each token (T, D)."""


class ExpertLinear(nn.Module):
    """The matrices of some experts, one below the other: a weight (E out, in)."""

    def __init__(self, rows: int, columns: int, experts: int) -> None:
        super().__init__()
        self._experts = experts
        self.weight = nn.Parameter(torch.empty(rows, columns))
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


def auxiliary_loss(
    scores: Tensor, counts: Tensor, active: int, sequences: Tensor | None = None
) -> Tensor:
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
        sequences: (T,), the sequence of each token, see ``Routing``.
    """
    length = counts.sum(1, keepdim=True) / active  # tokens of a complete sequence
    if sequences is not None:
        return ((counts / length.square())[sequences] * scores).sum() * scores.shape[1]
    probabilities = scores.view(len(counts), -1, scores.shape[1]).sum(1) / length
    return (counts / length * probabilities).sum() * scores.shape[1]


class Experts(nn.Module):
    """The router of a block, and its experts on this rank. Each expert computes what ``SwiGluMlp``
    does.

    ``parallelize`` sets ``exchange`` and ``part``. ``parallelize`` and ``share_sequences`` append
    to ``sums_over_sequence``. ``Balance`` sets ``bias``, ``counts`` and ``auxiliary``.
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
        self.part = (0, 1)
        """(index, count): the tokens of all sequences, one after the other, are divided into
        ``count`` equal parts. This rank has the part ``index``."""
        self.sums_over_sequence: list[Callable[[Tensor], None]] = []
        """Each sums counts over ranks that share sequences, in place."""
        self.exchange: Exchange | None = None
        """None if this rank has all experts."""

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
        experts, of_tokens = self.decide(scores), None
        counts = scores.new_zeros((sequences, scores.shape[1]), dtype=torch.int64)
        index, parts = self.part
        if parts > 1:
            first, length = index * len(scores), len(scores) * parts // sequences
            of_tokens = torch.arange(first, first + len(scores), device=scores.device) // length
            choices = (experts + of_tokens.unsqueeze(1) * scores.shape[1]).flatten()
            counts.view(-1).scatter_add_(0, choices, torch.ones_like(choices))
        else:
            choices = experts.reshape(sequences, -1)
            counts.scatter_add_(1, choices, torch.ones_like(choices))  # exact in any order
        of_all = counts.sum(0)
        if is_trained and self.counts is not None:
            self.counts += of_all
        order = experts.flatten().sort(stable=True).indices
        rows = torch.empty_like(order)
        rows.scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = of_all.cumsum(0).int()
        routing = Routing(experts, order, rows.view_as(experts), of_all, ends, None, None)
        if not is_trained or self.coefficient == 0.0:
            return routing
        for sum_over in self.sums_over_sequence:
            sum_over(counts)
        if self.auxiliary is not None:
            self.auxiliary += auxiliary_loss(scores, counts, self.active, of_tokens)
        return routing._replace(counts=counts, sequences=of_tokens)

    def weights(
        self, scores: Tensor, routing: Routing, gradient_scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the weight of each row (T, k).

        Args:
            scores: (T, E) of the router.
            gradient_scale: scalar. The backward computes gradients of this number times the sum of
                the losses of all tokens. None if there is no auxiliary loss.
            dtype: of the weights.
        """
        if gradient_scale is not None and routing.counts is not None:
            scale = gradient_scale * self.coefficient
            scores = _AuxiliaryLoss.apply(
                scores, routing.counts, routing.sequences, scale, self.active
            )
        weights = scores.gather(1, routing.experts)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(dtype)

    def forward(
        self, h: Tensor, scores: Tensor, routing: Routing, gradient_scale: Tensor | None
    ) -> Tensor:
        """Map h (B, S, D) to (B, S, D) on a rank that has all experts; see ``weights``."""
        weights = self.weights(scores, routing, gradient_scale, h.dtype)
        tokens = routing.order // self.active
        places = Places(routing.order, tokens, routing.rows, routing.offsets)
        of_rows = _WeightsOfRows.apply(weights, places.order, places.rows, None)
        return self.compute(h.flatten(0, 1), of_rows, places).view_as(h)

    def compute(self, h: Tensor, of_rows: Tensor, places: Places) -> Tensor:
        """Map tokens (tokens, D) to the sums (tokens, D) of their rows. ``of_rows`` (n,) are the
        weights of the rows.
        """
        where = places[1:]
        gate_up = _GateUp.apply(h, self.gate_up.matrices, *where)
        matrices = self.down.matrices
        activation = partial(_swiglu, weights=of_rows.unsqueeze(1))
        return self.compose(activation, lambda x: _Down.apply(x, matrices, *where), gate_up)

    def compute_received(self, received: Tensor, places: Places) -> Tensor:
        """``compute`` for what ``exchange`` has received, (tokens, D + c)."""
        hidden, most = self.gate_up.weight.shape[1], places.rows.shape[1]
        weights = received[:, hidden : hidden + most]
        of_rows = _WeightsOfRows.apply(weights, places.order, places.rows, places.is_used)
        return self.compute(received[:, :hidden], of_rows, places)


class _WeightsOfRows(torch.autograd.Function):
    """Weights (tokens, j) -> the weight of each row (n,), sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, order: Tensor, rows: Tensor, is_used: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows, is_used)
        return weights.flatten()[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows, is_used = ctx.saved_tensors
        found = gradient[rows]
        # A gather, because a scatter would add the values of unused rows, which may be anything.
        found = found if is_used is None else torch.where(is_used, found, 0.0)
        return found, None, None, None


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
    def forward(
        ctx: Any,
        scores: Tensor,
        counts: Tensor,
        sequences: Tensor | None,
        scale: Tensor,
        active: int,
    ) -> Tensor:
        ctx.save_for_backward(counts, sequences, scale)
        ctx.active = active
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        counts, sequences, scale = ctx.saved_tensors
        tokens, experts = gradient.shape
        used = counts / (counts.sum(1, keepdim=True) / ctx.active)  # f_e of each sequence
        added = used * (scale * experts)  # (B, E)
        if sequences is not None:
            return gradient + added[sequences], None, None, None, None
        by_row = gradient.view(len(counts), tokens // len(counts), experts)
        return (by_row + added.unsqueeze(1)).view_as(gradient), None, None, None, None


def _sum_by_token(found: Tensor, is_used: Tensor | None) -> Tensor:
    """Sum the used ones of each token's rows: (tokens, j, D) -> (tokens, D)."""
    if is_used is not None:
        found = torch.where(is_used.unsqueeze(2), found, 0.0)
    return found.squeeze(1) if found.shape[1] == 1 else found.sum(1)


class _GateUp(torch.autograd.Function):
    """Each token times the matrices of its experts: (tokens, D) -> (n, F + F), sorted by expert.

    The backward gathers the rows again, so only (tokens, D) is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        matrices: Tensor,
        tokens: Tensor,
        rows: Tensor,
        offsets: Tensor,
        is_used: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(h, matrices, tokens, rows, offsets, is_used)
        return grouped_product(h[tokens], matrices.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        h, matrices, tokens, rows, offsets, is_used = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_matrices = grouped_product(gradient.t(), h, offsets, tokens)
        of_h = _sum_by_token(grouped_product(gradient, matrices, offsets)[rows], is_used)
        return of_h, of_matrices, None, None, None, None


class _Down(torch.autograd.Function):
    """Each row times the matrix of its expert, summed for each token: (n, F) -> (tokens, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrices: Tensor,
        tokens: Tensor,
        rows: Tensor,
        offsets: Tensor,
        is_used: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, matrices, tokens, offsets)
        return _sum_by_token(grouped_product(x, matrices.transpose(1, 2), offsets)[rows], is_used)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, matrices, tokens, offsets = ctx.saved_tensors
        of_rows = gradient[tokens]
        of_matrices = grouped_product(of_rows.t(), x, offsets)
        return grouped_product(of_rows, matrices, offsets), of_matrices, None, None, None, None
