"""Mistakes in a mixture of experts. ``test_mutations.py`` trains with each of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspeed.model import experts
from megaspeed.model.attention import Inputs
from megaspeed.model.experts import Experts, Routing
from megaspeed.model.gpt import GPT, ExpertBlock
from megaspeed.tensor_parallel import context
from tests.support.mutations import replaced

LOSS_SCALE = 1024
"""The loss scale of fp16."""


def in_recomputation(change: Callable[[ExpertBlock, Tensor, Inputs, list[Routing]], None]) -> Any:
    """Call ``change`` before a block is recomputed."""

    def changed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def again(
            self: ExpertBlock, x: Tensor, inputs: Inputs, kept: list[Routing] | None = None
        ) -> Tensor:
            if kept:
                change(self, x, inputs, kept)
            return forward(self, x, inputs, kept)

        return again

    return replaced(ExpertBlock, "forward", changed)


def counts_are_taken_again_in_recomputation() -> AbstractContextManager[None]:
    def count(block: ExpertBlock, _: Tensor, __: Inputs, kept: list[Routing]) -> None:
        counts = block._experts.counts
        assert counts is not None
        counts += torch.bincount(kept[0].experts.flatten(), minlength=len(counts))

    return in_recomputation(count)


def the_choice_is_made_again_in_recomputation() -> AbstractContextManager[None]:
    # A little noise stands for another rounding.
    @torch.no_grad()
    def choose(block: ExpertBlock, x: Tensor, inputs: Inputs, kept: list[Routing]) -> None:
        scores = block.attend(x, inputs)[2]
        noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) / 50
        of_forward = block._experts.__dict__.pop("decide")  # which records choices
        routing = block._experts.choose(scores + noise, len(x), is_trained=False)
        block._experts.decide = of_forward  # type: ignore[method-assign]
        kept[0] = routing._replace(counts=kept[0].counts)

    return in_recomputation(choose)


def the_choice_ignores_the_bias() -> AbstractContextManager[None]:
    def unbiased(self: Experts, scores: Tensor) -> Tensor:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.active]

    return replaced(Experts, "decide", lambda _: unbiased)


def the_bias_is_in_the_weights_of_experts() -> AbstractContextManager[None]:
    def biased(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Experts, h: Tensor, scores: Tensor, *others: Any) -> Tensor:
            assert self.bias is not None
            return forward(self, h, scores + self.bias, *others)

        return run

    return replaced(Experts, "forward", biased)


def the_auxiliary_loss_is_that_of_a_micro_batch() -> AbstractContextManager[None]:
    def over_all_rows(choose: Callable[..., Routing]) -> Callable[..., Routing]:
        def run(*args: Any, **more: Any) -> Routing:
            routing = choose(*args, **more)
            assert routing.counts is not None
            mean = routing.counts.float().mean(0, keepdim=True)
            return routing._replace(counts=mean.expand_as(routing.counts))

        return run

    return replaced(Experts, "choose", over_all_rows)


def scaled(factor: Callable[[Tensor], Tensor | float]) -> AbstractContextManager[None]:
    """Multiply the gradient scale of the auxiliary loss by ``factor`` of the scale."""

    def mistaken(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: GPT, *args: Any) -> Tensor:
            *others, scale = args
            return forward(self, *others, scale * factor(scale))

        return run

    return replaced(GPT, "forward", mistaken)


def the_auxiliary_loss_lacks_the_scale_of_the_loss() -> AbstractContextManager[None]:
    return scaled(lambda scale: 1.0 / scale)


def the_auxiliary_loss_lacks_the_scale_of_fp16() -> AbstractContextManager[None]:
    return scaled(lambda _: 1.0 / LOSS_SCALE)


def context_ranks_count_their_own_tokens() -> AbstractContextManager[None]:
    return replaced(context, "sum_in_place", lambda _: lambda x, axis: None)


def an_expert_gets_no_gradient() -> AbstractContextManager[None]:
    def without_the_first(backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            of_h, of_matrices, *others = backward(*args)
            of_matrices[0] = 0.0
            return of_h, of_matrices, *others

        return run

    return replaced(experts._Down, "backward", without_the_first)


def gate_and_up_are_exchanged() -> AbstractContextManager[None]:
    def exchanged(gate_up: Tensor, weights: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up * weights

    return replaced(experts, "_swiglu", lambda _: exchanged)
