"""Mistakes in a mixture of experts. ``test_mutations.py`` trains with each of them."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data_axis import axis
from megaspeed.data_axis.buckets import Reduction
from megaspeed.model import experts
from megaspeed.model.attention import Inputs
from megaspeed.model.experts import Experts, Places, Routing
from megaspeed.model.gpt import GPT, Choice, ExpertBlock
from megaspeed.tensor_parallel import context, parallelize
from megaspeed.tensor_parallel import experts as exchanges
from megaspeed.tensor_parallel.collectives import GroupAxis
from megaspeed.tensor_parallel.experts import AllToAll
from megaspeed.topology.grid import Copies, Grid
from megaspeed.zero import build, engine
from megaspeed.zero.reductions import OwnedSquares
from tests.support.mutations import replaced

LOSS_SCALE = 1024
"""The loss scale of fp16."""


def in_recomputation(change: Callable[[ExpertBlock, Tensor, Inputs, Choice], None]) -> Any:
    """Call ``change`` before a block is recomputed."""

    def changed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def again(
            self: ExpertBlock, x: Tensor, inputs: Inputs, choice: Choice | None = None
        ) -> Tensor:
            if choice is not None and choice.routing is not None:
                change(self, x, inputs, choice)
            return forward(self, x, inputs, choice)

        return again

    return replaced(ExpertBlock, "forward", changed)


def counts_are_taken_again_in_recomputation() -> AbstractContextManager[None]:
    def count(block: ExpertBlock, _: Tensor, __: Inputs, choice: Choice) -> None:
        counts, routing = block._experts.counts, choice.routing
        assert counts is not None and routing is not None
        counts += torch.bincount(routing.experts.flatten(), minlength=len(counts))

    return in_recomputation(count)


def the_choice_is_made_again_in_recomputation() -> AbstractContextManager[None]:
    # A little noise stands for another rounding.
    @torch.no_grad()
    def choose(block: ExpertBlock, x: Tensor, inputs: Inputs, choice: Choice) -> None:
        scores = block.attend(x, inputs)[2]
        noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) / 50
        of_forward = block._experts.__dict__.pop("decide")  # which records choices
        routing = block._experts.choose(scores + noise, len(x), is_trained=False)
        block._experts.decide = of_forward  # type: ignore[method-assign]
        assert choice.routing is not None
        choice.routing = routing._replace(counts=choice.routing.counts)

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


def tensor_ranks_count_their_own_tokens() -> AbstractContextManager[None]:
    return replaced(parallelize, "sum_in_place", lambda _: lambda x, axis: None)


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


# --- on an expert axis ----------------------------------------------------------------------------


def results_are_returned_to_other_rows() -> AbstractContextManager[None]:
    # They are returned in the order of the experts instead of the order of arrival.
    def by_expert(places: Callable[..., Places]) -> Callable[..., Places]:
        def sort(self: AllToAll, counts: Tensor, rows: int) -> Places:
            found = places(self, counts, rows)
            return found._replace(rows=torch.arange(len(found.rows)).unsqueeze(1))

        return sort

    return replaced(AllToAll, "_places", by_expert)


def gradients_of_experts_are_multiplied_by_ep() -> AbstractContextManager[None]:
    # As if each rank had the sum of the losses of all ranks.
    def several_times(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, axis: GroupAxis) -> Tensor:
            return scatter(x * axis.size - (x * (axis.size - 1)).detach(), axis)

        return run

    return replaced(exchanges, "reduce_scatter_parts", several_times)


def gradients_of_experts_are_divided_by_their_copies() -> AbstractContextManager[None]:
    def mistaken(of: Callable[..., Reduction]) -> Callable[..., Reduction]:
        def reduction(run: Run, device_type: str, copies: Copies) -> Reduction:
            return dataclasses.replace(of(run, device_type, copies), ranks=copies.ranks)

        return reduction

    return replaced(axis, "reduction_of_matrices", mistaken)


def experts_are_reduced_over_the_data_axis() -> AbstractContextManager[None]:
    return replaced(Grid, "expert_copies", lambda _: property(lambda grid: grid.copies))


def the_norm_counts_both_copies_of_an_expert() -> AbstractContextManager[None]:
    def unweighted(make: type[OwnedSquares]) -> Callable[..., OwnedSquares]:
        def squares(fragments: Any, owned: Mapping[str, int], _: Mapping[str, float]) -> Any:
            return make(fragments, owned)

        return squares

    return replaced(engine, "OwnedSquares", unweighted)


def all_ranks_get_the_experts_of_the_first() -> AbstractContextManager[None]:
    return replaced(build, "without_broadcast", lambda _: nullcontext)
