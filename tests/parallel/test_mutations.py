"""The comparison with one process fails when the parallel run is wrong.

Each mutation is a typical mistake in such code. Every rank makes it during one training. This
training must differ from one process at the place where the mistake shows. The same training
without the mistake must not differ.

The tolerance is the widest that ``megaspeed verify`` can allow later steps. Verify allows it if the
order of the samples changes the training of one process a lot.
"""

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed import comm
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis import axis
from megaspeed.data_axis.buckets import Reduction
from megaspeed.measurement.verification.comparison import LARGEST_WIDENING, Comparison, Difference
from megaspeed.measurement.verification.reference import ReferenceRun, train_reference
from megaspeed.measurement.verification.verify import ParallelRun, compare, train_rank, whole_batch
from megaspeed.model.dropout import MaskShard, SampleDropout
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.tensor_parallel import layers, shards
from megaspeed.tensor_parallel.collectives import Pending, reduce_from_tensor_axis
from megaspeed.tensor_parallel.layers import RowParallelLinear
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training import worker
from megaspeed.zero import build, engine
from megaspeed.zero.engine import ZeroEngine
from tests.parallel.expert_mistakes import (
    all_ranks_get_the_experts_of_the_first,
    an_expert_gets_no_gradient,
    context_ranks_count_their_own_tokens,
    counts_are_taken_again_in_recomputation,
    experts_are_reduced_over_the_data_axis,
    gate_and_up_are_exchanged,
    gradients_of_experts_are_divided_by_their_copies,
    gradients_of_experts_are_multiplied_by_ep,
    results_are_returned_to_other_rows,
    tensor_ranks_count_their_own_tokens,
    the_auxiliary_loss_is_that_of_a_micro_batch,
    the_auxiliary_loss_lacks_the_scale_of_the_loss,
    the_bias_is_in_the_weights_of_experts,
    the_choice_ignores_the_bias,
    the_choice_is_made_again_in_recomputation,
    the_norm_counts_both_copies_of_an_expert,
)
from tests.support.mutations import replaced
from tests.support.rank_pool import RankPool
from tests.support.tiny import MOE, merge, tiny_corpus, tiny_run

STEPS = 3


# --- the mistakes ---------------------------------------------------------------------------------


def the_norm_counts_both_copies_of_a_tied_weight() -> AbstractContextManager[None]:
    return replaced(
        build,
        "_owned_elements",
        lambda owned: (
            lambda shards, axis, _context: owned(
                shards, axis, SimpleNamespace(is_first_pipeline_stage=True)
            )
        ),
    )


def the_norm_is_of_one_pipeline_stage() -> AbstractContextManager[None]:
    def alone(norm_of: Callable[..., float]) -> Callable[..., float]:
        def of_this_stage(self: ZeroEngine, squares: list[float], losses: list[float]) -> float:
            context = self._context
            ranks = context.grid.dp * context.grid.tp
            first = context.pp_rank * ranks
            return norm_of(self, squares[first : first + ranks], losses)

        return of_this_stage

    return replaced(ZeroEngine, "_norm_of", alone)


def only_the_last_micro_batch_survives() -> AbstractContextManager[None]:
    def forgetful(backward: Callable[..., None]) -> Callable[..., None]:
        def forget_then_go(self: ZeroEngine, *args: Any, **kwargs: Any) -> None:
            for parameter in self.module.parameters():
                parameter.grad = None
            backward(self, *args, **kwargs)

        return forget_then_go

    return replaced(ZeroEngine, "backward", forgetful)


def nothing_is_averaged_over_the_data_axis() -> AbstractContextManager[None]:
    done = SimpleNamespace(wait=lambda: None)
    return replaced(comm, "all_reduce", lambda _: lambda *_args, **_more: done)


def tied_gradients_are_not_summed() -> AbstractContextManager[None]:
    return replaced(engine, "add_gradients_of_other_end", lambda _: lambda *_args, **_more: None)


def gradients_are_not_summed_over_the_tensor_axis() -> AbstractContextManager[None]:
    # The input of a column-parallel layer gets only the gradient of this rank's columns.
    done = SimpleNamespace(wait=lambda: None)
    return replaced(layers, "start_all_reduce", lambda _: lambda x, axis: Pending(x, done, axis))


def every_rank_averages_over_its_own_tokens() -> AbstractContextManager[None]:
    def own(_scale: Callable[[Run], float]) -> Callable[[Run], float]:
        return lambda run: 1.0 / run.tokens_per_step

    return replaced(worker, "backward_scale", own)


def every_tensor_rank_reports_its_loss() -> AbstractContextManager[None]:
    return replaced(worker.Worker, "_loss_of", lambda _: lambda _self, losses: sum(losses))


def a_bias_is_added_on_every_tensor_rank() -> AbstractContextManager[None]:
    def add_then_sum(self: RowParallelLinear, x: Tensor) -> Tensor:
        assert self.bias is not None
        return reduce_from_tensor_axis(x @ self.weight.T + self.bias, self.axis)

    return replaced(RowParallelLinear, "forward", lambda _: add_then_sum)


def every_tensor_rank_drops_the_same_part() -> AbstractContextManager[None]:
    # Each rank takes the first part of the full mask.
    def first(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drop(self: SampleDropout, x: Tensor, samples: Tensor) -> Tensor:
            self.shard = MaskShard(index=0, count=self.shard.count)
            return forward(self, x, samples)

        return drop

    return replaced(SampleDropout, "forward", first)


def later_pipeline_stages_do_not_receive_documents() -> AbstractContextManager[None]:
    def received_by_half(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(self: ZeroEngine, x: Tensor, batch: MicroBatch, *others: Any) -> Tensor:
            if not self._context.is_first_pipeline_stage:
                batch = dataclasses.replace(batch, documents=None)
            return forward(self, x, batch, *others)

        return attend

    return replaced(ZeroEngine, "forward", received_by_half)


def the_norm_of_each_head_keeps_its_ranks_gradient() -> AbstractContextManager[None]:
    # The weight is replicated, but each rank applies it to its own heads.
    return replaced(shards, "gradient_is_partial", lambda _: lambda _parameter, **_axis: False)


def planned(**changes: Any) -> AbstractContextManager[None]:
    """Plan another reduction of gradients."""

    def mistaken(of: Callable[..., Reduction]) -> Callable[..., Reduction]:
        return lambda *args: dataclasses.replace(of(*args), **changes)

    return replaced(axis, "reduction_of_matrices", mistaken)


def the_sum_is_not_divided() -> AbstractContextManager[None]:
    return planned(divides=None)


def gradients_are_sent_in_another_type() -> AbstractContextManager[None]:
    return planned(sent="bf16", copies=True)


# --- where each shows -----------------------------------------------------------------------------

Shows = Callable[[Comparison], list[Difference]]


def in_losses(comparison: Comparison) -> list[Difference]:
    return comparison.losses[:1]  # before any step, so that nothing else can show


def in_later_losses(comparison: Comparison) -> list[Difference]:
    return comparison.losses[1:]  # biases start at zero


def in_norms(comparison: Comparison) -> list[Difference]:
    return comparison.grad_norms[:1]


def in_gradients(comparison: Comparison) -> list[Difference]:
    return comparison.gradients


def in_counts(comparison: Comparison) -> list[Difference]:
    return comparison.experts[1:2]


def in_choices(comparison: Comparison) -> list[Difference]:
    return comparison.experts[3:]


ZERO1 = {"zero_optimization": {"stage": 1}}
ZERO3 = {"zero_optimization": {"stage": 3}}
DROPOUT = {"model": {"attention_dropout": 0.2}}
QK_NORM = {"model": {"qk_norm": True}}
RESET: dict[str, Any] = {"data": {"reset_at_documents": True}}
# Weights are large, so that a mistake in the experts changes the loss.
EXPERTS: dict[str, Any] = {"model": {**MOE, "initializer_range": 0.2}}
BALANCED = merge(EXPERTS, {"model": {"router_bias_rate": 0.1, "router_aux_loss_coef": 0.1}})
GATHERED = merge(EXPERTS, {"parallel": {"expert": 2, "expert_exchange": "all_gather"}})
SENT = merge(EXPERTS, {"parallel": {"expert": 2, "expert_exchange": "all_to_all"}})
# Micro-batches have 3 sequences, so each of two tensor ranks has a half of the second one.
SHARED_SEQUENCE = {**BALANCED, "gradient_accumulation_steps": 8}
RECOMPUTED = {**BALANCED, "parallel": {"activation_checkpointing": "full"}}

MUTATIONS: dict[Callable[[], AbstractContextManager[None]], tuple[dict[str, Any], Shows]] = {
    the_norm_counts_both_copies_of_a_tied_weight: ({"pp": 2, **ZERO3}, in_norms),
    the_norm_is_of_one_pipeline_stage: ({"pp": 2, "dp": 2}, in_norms),
    only_the_last_micro_batch_survives: ({"pp": 2, **ZERO1}, in_gradients),
    nothing_is_averaged_over_the_data_axis: ({"pp": 2, "dp": 2}, in_gradients),
    tied_gradients_are_not_summed: ({"pp": 2, **ZERO1}, in_gradients),
    gradients_are_not_summed_over_the_tensor_axis: ({"tp": 2}, in_gradients),
    every_rank_averages_over_its_own_tokens: ({"pp": 2, "dp": 2}, in_gradients),
    every_tensor_rank_reports_its_loss: ({"tp": 2}, in_losses),
    a_bias_is_added_on_every_tensor_rank: ({"tp": 2}, in_later_losses),
    every_tensor_rank_drops_the_same_part: ({"tp": 2, **DROPOUT}, in_gradients),
    the_norm_of_each_head_keeps_its_ranks_gradient: ({"tp": 2, **QK_NORM}, in_gradients),
    later_pipeline_stages_do_not_receive_documents: ({"pp": 2, **RESET}, in_gradients),
    the_sum_is_not_divided: ({"dp": 2, **ZERO1}, in_gradients),
    gradients_are_sent_in_another_type: ({"dp": 2, **ZERO3}, in_gradients),
    counts_are_taken_again_in_recomputation: ({"dp": 2, **RECOMPUTED}, in_counts),
    the_choice_is_made_again_in_recomputation: ({"dp": 2, **RECOMPUTED}, in_gradients),
    the_choice_ignores_the_bias: ({"pp": 2, **BALANCED}, in_choices),
    the_bias_is_in_the_weights_of_experts: ({"pp": 2, **BALANCED}, in_later_losses),
    the_auxiliary_loss_is_that_of_a_micro_batch: ({"pp": 2, **BALANCED}, in_gradients),
    the_auxiliary_loss_lacks_the_scale_of_the_loss: ({"pp": 2, **BALANCED}, in_gradients),
    context_ranks_count_their_own_tokens: ({"cp": 2, **BALANCED}, in_gradients),
    an_expert_gets_no_gradient: ({"dp": 2, **EXPERTS}, in_gradients),
    gate_and_up_are_exchanged: ({"dp": 2, **EXPERTS}, in_losses),
    tensor_ranks_count_their_own_tokens: ({"tp": 2, **SHARED_SEQUENCE}, in_gradients),
    results_are_returned_to_other_rows: ({"dp": 2, **SENT}, in_losses),
    gradients_of_experts_are_multiplied_by_ep: ({"dp": 2, **GATHERED}, in_gradients),
    gradients_of_experts_are_divided_by_their_copies: ({"dp": 2, **SENT}, in_gradients),
    experts_are_reduced_over_the_data_axis: ({"dp": 2, **SENT}, in_gradients),
    the_norm_counts_both_copies_of_an_expert: ({"tp": 2, **EXPERTS}, in_norms),
    all_ranks_get_the_experts_of_the_first: ({"dp": 2, **SENT, **ZERO1}, in_losses),
}


def train_mutated(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, mutation: str | None
) -> ParallelRun | None:
    mistake = nullcontext() if mutation is None else globals()[mutation]()
    with mistake:
        return train_rank(launch, run, corpus, STEPS)


@functools.cache
def reference_of(
    cache: Path, text: Path, model: str, reset: bool, choices: bytes | None
) -> ReferenceRun:
    run = tiny_run(text, model=json.loads(model), **(RESET if reset else {}))
    batches = functools.partial(whole_batch, run, tiny_corpus(run, cache))
    replayed = None if choices is None else torch.from_numpy(pickle.loads(choices))
    return train_reference(run, batches, STEPS, choices=replayed)


def drifted(reference: ReferenceRun) -> ReferenceRun:
    """Return a run so far from the reference that later steps get the largest tolerance."""
    return dataclasses.replace(
        reference,
        losses=[2.0 * loss for loss in reference.losses],
        grad_norms=[2.0 * norm for norm in reference.grad_norms],
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def train(pool: RankPool, cache: Path, documents: Path) -> Callable[[str | None, Run], Comparison]:
    """Return a function that trains with a mutation or, once for each run, without one."""

    def mutated(mutation: str | None, run: Run) -> Comparison:
        corpus = tiny_corpus(run, cache)
        parallel = pool.run(run.grid.world_size, train_mutated, run, corpus, mutation)[0]
        assert parallel is not None
        model = run.config.model.model_dump_json(exclude_none=True)
        choices = parallel.experts.choices
        stored = None if choices is None else pickle.dumps(choices.numpy())
        reset = run.config.data.reset_at_documents
        reference = reference_of(cache, documents, model, reset, stored)
        return compare(run, parallel, reference, [] if mutation is None else [drifted(reference)])

    unharmed: dict[str, Comparison] = {}

    def train(mutation: str | None, run: Run) -> Comparison:
        if mutation is not None:
            return mutated(mutation, run)
        key = repr(run)
        if key not in unharmed:
            unharmed[key] = mutated(None, run)
        return unharmed[key]

    return train


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_comparison_fails_when(
    mutation: Callable[[], AbstractContextManager[None]],
    train: Callable[[str | None, Run], Comparison],
    documents: Path,
) -> None:
    changes, shows = MUTATIONS[mutation]
    run = tiny_run(documents, **changes)
    right, wrong = train(None, run), train(mutation.__name__, run)
    assert right.equal, right.largest
    assert wrong.losses[1].allowed == LARGEST_WIDENING * wrong.losses[0].allowed
    assert not wrong.equal
    furthest = max(shows(wrong), key=lambda difference: difference.relative)
    assert furthest.relative > 10 * furthest.allowed, "more than rounding"
