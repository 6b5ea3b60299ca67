"""The updates of Muon equal those of one process, at every layout."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from megaspeed.config.deepspeed_keys import MuonParams
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis import orthogonalization
from megaspeed.data_axis.orthogonalization import Section
from megaspeed.measurement.verification import reference
from megaspeed.measurement.verification.reference import train_reference
from megaspeed.measurement.verification.verify import (
    compare,
    gather_weights,
    train_rank,
    whole_batch,
)
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import Parameter, parameter_named, parameters_of
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training import worker
from megaspeed.training.learning_rate import learning_rate
from megaspeed.training.replicas import Replicas
from megaspeed.zero import muon
from megaspeed.zero.muon import MuonUpdates, coefficients_of, orthogonalized, shape_factor
from tests.support.mutations import replaced
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16_IN_FP32, GPT2, LLAMA, MUON, merge, tiny_corpus
from tests.zero.one_rank import one_rank, put_an_infinity, small_run

STEPS = 3
RATES = [3e-3, 5e-3, 4e-3]

Weights = list[dict[str, Tensor]]
"""The weights before the first step and after each step, by full parameter name."""


def muon_run(text: Path, **changes: Any) -> Run:
    base = {"model": LLAMA, "optimizer": MUON, "gradient_clipping": 0.3}
    return small_run(text, **merge(base, changes))


def weights_of_rank_0(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, mutation: str | None = None
) -> tuple[Weights, int]:
    """Return the weights, and how many sections this rank has orthogonalized in the last step."""
    with (
        nullcontext() if mutation is None else globals()[mutation](),
        one_rank(launch, run, corpus) as rank,
    ):
        found = [gather_weights(rank.worker)]
        for step, rate in enumerate(RATES):
            rank.train_step(step, rate)
            found.append(gather_weights(rank.worker))
        weights = [{} if each is None else dict(each.tensors) for each in found]
        assert rank.engine.muon is not None
        return weights, rank.engine.muon.sections_in_step


def weights_of_reference(run: Run, corpus: PreparedCorpus) -> Weights:
    """Return the weights of one process that trains with plain torch."""
    rates = iter(RATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "learning_rate", lambda *_args, **_more: next(rates))
        found: Weights = []

        def record(model: GPT, masters: dict[str, nn.Parameter]) -> None:
            found.append(reference._copies(masters))
            copy_weights(model, masters)

        copy_weights = reference._copy_weights
        patch.setattr(reference, "_copy_weights", record)
        batches = functools.partial(whole_batch, run, corpus)
        trained = train_reference(run, batches, STEPS)
    return [trained.initial_weights, *found]


def largest_error(run: Run, found: Weights, expected: Weights) -> tuple[float, str]:
    """Return the largest relative difference of the update of a matrix, and where it is."""
    errors = []
    for before, after in zip(range(STEPS), range(1, STEPS + 1), strict=True):
        for name, weight in expected[before].items():
            if not parameter_named(run.config.model, name).is_block_matrix:
                continue  # AdamW amplifies rounding where a gradient is about zero
            right = expected[after][name].double() - weight.double()
            wrong = found[after][name].double() - found[before][name].double() - right
            errors.append((float(wrong.norm() / right.norm()), f"{name} in step {after}"))
    return max(errors)


SMALL = {"reduce_bucket_size": 3000}  # parts of a section are in several buckets and partitions
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 4, "dp": 2, "zero_optimization": {"stage": 3, **SMALL}},
    {"tp": 2, "dp": 3, "zero_optimization": {"stage": 2, **SMALL}},
    {"dp": 5, "zero_optimization": {"stage": 1, **SMALL}, "train_batch_size": 20},
    {"tp": 2, "dp": 3, "zero_optimization": {"stage": 0}},
    {"pp": 2, "dp": 4, "parallel": {"replicate": 2}, "zero_optimization": {"stage": 1, **SMALL}},
    {"tp": 2, "model": {**GPT2, "num_hidden_layers": 2}, "zero_optimization": {"stage": 0}},
    {
        "tp": 4,
        "optimizer": {
            "params": {
                "per_head_muon": True,
                "nesterov": False,
                "adjust_lr_fn": "match_rms_adamw",
                "momentum": 0.8,
            }
        },
    },
    {"dp": 2, "optimizer": {"params": {"ns_coefficients": "polar_express", "ns_steps": 6}}},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_update_is_that_of_one_process(
    layout: dict[str, Any], pool: RankPool, text: Path, cache: Path
) -> None:
    run = muon_run(text, **layout)
    corpus = tiny_corpus(run, cache)
    results = pool.run(run.grid.world_size, weights_of_rank_0, run, corpus)
    error, where = largest_error(run, results[0][0], weights_of_reference(run, corpus))
    assert error < 5e-5, where  # rounding; 3e-5 at most at these layouts
    matrices = [p for p in parameters_of(run.config.model).values() if p.is_block_matrix]
    sections = sum(len(parameter.row.sections) for parameter in matrices)
    times = run.grid.replicate if run.grid.is_hybrid else 1  # replicas repeat each other's work
    assert sum(count for _, count in results) == times * sections


# --- mistakes -------------------------------------------------------------------------------------


def a_shard_is_orthogonalized_by_itself() -> AbstractContextManager[None]:
    def by_halves(complete: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, how: torch.cat([complete(half, how) for half in x.chunk(2, 1)], 1)

    return replaced(muon, "orthogonalized", by_halves)


def gate_and_up_are_one_matrix() -> AbstractContextManager[None]:
    def joined(sections: Callable[..., Iterator[Section]]) -> Callable[..., Iterator[Section]]:
        def of(*args: Any) -> Iterator[Section]:
            for section in sections(*args):
                _, rows, columns = section.shape
                if section.name == "gate":
                    part, shape = 2 * section.part, (1, 2 * rows, columns)
                    yield dataclasses.replace(section, part=part, shape=shape)
                elif section.parameter.name.split(".")[-2] != "gate_up":
                    yield section

        return of

    return replaced(orthogonalization, "_sections", joined)


def copies_of_key_value_heads_are_rows_of_their_own() -> AbstractContextManager[None]:
    def repeated(sections: Callable[..., Iterator[Section]]) -> Callable[..., Iterator[Section]]:
        def of(*args: Any) -> Iterator[Section]:
            for section in sections(*args):
                _, rows, columns = section.shape
                shape = (1, rows * section.copies, columns)
                yield dataclasses.replace(section, copies=1, shape=shape)

        return of

    return replaced(orthogonalization, "_sections", repeated)


def the_factor_is_that_of_a_padded_shape() -> AbstractContextManager[None]:
    return replaced(
        muon, "shape_factor", lambda of: lambda how, rows, columns: of(how, rows + 16, columns)
    )


def momentum_is_of_gradients_that_are_not_clipped() -> AbstractContextManager[None]:
    return replaced(MuonUpdates, "compute", lambda compute: lambda self, _scale: compute(self, 1.0))


def momentum_advances_in_each_micro_batch() -> AbstractContextManager[None]:
    def twice(advance: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (advance(*args), advance(*args))[1]

    return replaced(MuonUpdates, "_momentum_updates", twice)


def all_groups_have_one_rate() -> AbstractContextManager[None]:
    def alike(groups: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
        return lambda *args: [{**group, "lr_ratio": 1.0} for group in groups(*args)]

    return replaced(worker, "parameter_groups", alike)


def sgd_updates_the_matrices() -> AbstractContextManager[None]:
    return replaced(muon, "orthogonalized", lambda _: lambda matrices, _how: matrices)


def adamw_updates_the_matrices() -> AbstractContextManager[None]:
    return replaced(Parameter, "is_block_matrix", lambda _: property(lambda _parameter: False))


def the_results_of_another_replica_are_lost() -> AbstractContextManager[None]:
    def own(back: Callable[..., None]) -> Callable[..., None]:
        def take(self: MuonUpdates, own: Any, message: Any, updates: Any) -> None:
            results = [*own.results[:1], *([] for _ in own.results[1:])]
            back(self, dataclasses.replace(own, results=results), message, updates)

        return take

    return replaced(MuonUpdates, "_take_back", own)


MUTATIONS: dict[Callable[[], AbstractContextManager[None]], dict[str, Any]] = {
    a_shard_is_orthogonalized_by_itself: {},
    gate_and_up_are_one_matrix: {},
    copies_of_key_value_heads_are_rows_of_their_own: {"tp": 4},
    the_factor_is_that_of_a_padded_shape: {},
    momentum_is_of_gradients_that_are_not_clipped: {},
    momentum_advances_in_each_micro_batch: {},
    all_groups_have_one_rate: {},
    sgd_updates_the_matrices: {},
    adamw_updates_the_matrices: {},
    the_results_of_another_replica_are_lost: {"dp": 2},
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_comparison_fails_when(
    mutation: Callable[[], AbstractContextManager[None]], pool: RankPool, text: Path, cache: Path
) -> None:
    run = muon_run(text, **MUTATIONS[mutation])
    corpus = tiny_corpus(run, cache)
    ranks = run.grid.world_size
    results = pool.run(ranks, weights_of_rank_0, run, corpus, mutation.__name__)
    error, _ = largest_error(run, results[0][0], weights_of_reference(run, corpus))
    assert error > 100 * 5e-5, "more than rounding"


# --- steps that are skipped, rates, copies --------------------------------------------------------


def states_around_a_skipped_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[list[Tensor], list[Tensor], list[Tensor], bool]:
    """Return all states before a step that is skipped, after it, and after the next step."""
    with one_rank(launch, run, corpus) as rank:

        def states() -> list[Tensor]:
            fragments = rank.engine.state_fragments()
            return [each.clone() for one in fragments for each in one.tensors.values()]

        rank.train_step(0)
        before = states()
        look = functools.partial(put_an_infinity, rank) if rank.context.rank == 1 else lambda: None
        skipped = rank.train_step(1, look=look).skipped
        after = states()
        rank.train_step(1)
        return before, after, states(), skipped


@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_step_changes_no_momentum(
    stage: int, pool: RankPool, text: Path, cache: Path
) -> None:
    run = muon_run(text, dp=2, zero_optimization={"stage": stage})
    results = pool.run(2, states_around_a_skipped_step, run, tiny_corpus(run, cache))
    for before, after, later, skipped in results:
        assert skipped and all(map(torch.equal, before, after))
        assert not any(map(torch.equal, after, later))


def momentum_of_four_steps(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss scale of each step, and what this rank has of the momentum in the end."""
    CPU_Accelerator.is_fp16_supported = lambda self: True
    with one_rank(launch, run, corpus) as rank:
        scales = []
        for step in range(4):
            scales.append(float(rank.optimizer.loss_scale))
            assert not rank.train_step(step, 1e-7).skipped  # nearly the same weights in all steps
        states = rank.engine.state_fragments()
        kind = "momentum"
        return scales, {s.name: s.tensors[kind].clone() for s in states if kind in s.tensors}


@pytest.mark.parametrize("clipping", [0.0, 0.3])
def test_the_loss_scale_of_fp16_does_not_change_momentum(
    clipping: float, pool: RankPool, text: Path, cache: Path
) -> None:
    dynamic = {"initial_scale_power": 6, "loss_scale_window": 1}
    runs = [
        muon_run(
            text,
            dp=2,
            device_type="cuda",
            gradient_clipping=clipping,
            zero_optimization={"stage": 1},
            fp16={"enabled": True, **scale},
        )
        for scale in (dynamic, {"loss_scale": 1024.0})
    ]
    corpus = tiny_corpus(runs[0], cache)
    (scales, changing), (_, constant) = (
        pool.run(2, momentum_of_four_steps, run, corpus)[0] for run in runs
    )
    assert scales == [64, 64, 128, 256]
    for name, momentum in changing.items():
        assert float((momentum - constant[name]).norm() / constant[name].norm()) < 2e-3, name


def rates_of_groups(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> list[dict[bool, set[float]]]:
    """Return the learning rates of each step: of what Muon updates (True), and of the rest."""
    config, found = run.config, []
    with one_rank(launch, run, corpus) as rank:
        for step in range(run.steps):
            rate = learning_rate(config.optimizer, config.scheduler, step=step, steps=run.steps)
            rank.train_step(step, rate)
            rates: dict[bool, set[float]] = {True: set(), False: set()}
            for group in rank.optimizer.param_groups:
                rates[group["is_orthogonalized"]].add(round(group["lr"], 9))
            found.append(rates)
    return found


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("scheduler", "fractions"),
    [
        ({"type": "constant", "params": {"warmup_num_steps": 4}}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        (
            {
                "type": "wsd",
                "params": {
                    "warmup_num_steps": 2,
                    "decay_num_steps": 2,
                    "decay_shape": "linear",
                    "min_ratio": 0.0,
                },
            },
            [0.5, 1.0, 1.0, 0.5, 0.0],
        ),
    ],
    ids=["warmup", "wsd"],
)
def test_both_learning_rates_follow_the_schedule(
    scheduler: dict[str, Any],
    fractions: list[float],
    stage: int,
    pool: RankPool,
    text: Path,
    cache: Path,
) -> None:
    """DeepSpeed 0.19.8 overwrites ``muon_lr`` with the scheduled rate."""
    run = muon_run(
        text,
        scheduler=scheduler,
        optimizer={"params": {"lr": 0.01, "muon_lr": 0.02, "adam_lr": 0.004}},
        training={"steps": 5},
        zero_optimization={"stage": stage},
    )
    (found,) = pool.run(1, rates_of_groups, run, tiny_corpus(run, cache))
    assert found == [
        {True: {round(0.02 * part, 9)}, False: {round(0.004 * part, 9)}} for part in fractions
    ]


def check_copies_of_three_steps(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> None:
    with one_rank(launch, run, corpus) as rank:
        replicas = Replicas(rank.worker, 0)
        for step, rate in enumerate(RATES):
            rank.train_step(step, rate)
            replicas.check(step)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 4, "dp": 2, "zero_optimization": {"stage": 1}},
        {"tp": 4, "dp": 2, "zero_optimization": {"stage": 0}},
        {"dp": 4, "parallel": {"replicate": 2}, "zero_optimization": {"stage": 3}},
    ],
    ids=str,
)
def test_copies_are_bitwise_equal_in_bf16(
    layout: dict[str, Any], pool: RankPool, text: Path, cache: Path
) -> None:
    run = muon_run(text, **BF16_IN_FP32, **layout)
    assert run.muon_dtype == "bf16"
    pool.run(run.grid.world_size, check_copies_of_three_steps, run, tiny_corpus(run, cache))


# --- Newton-Schulz steps --------------------------------------------------------------------------


def gradients(rows: int, columns: int, count: int = 3) -> Tensor:
    """Return matrices whose singular values fall by orders of magnitude, as those of gradients."""
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator)
    return draw(count, rows, 8) @ draw(count, 8, columns) + 0.05 * draw(count, rows, columns)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)], ids=str)
def test_bf16_equals_torch(shape: tuple[int, int]) -> None:
    """The gradient is rounded to bf16 in both. torch has its own code for one matrix."""
    matrices, params = gradients(*shape), MuonParams()
    ours = orthogonalized(matrices.bfloat16(), coefficients_of(params))
    for own, matrix in zip(ours, matrices, strict=True):
        theirs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert float((own - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_the_factor_of_a_shape_is_that_of_torch(adjust: Any) -> None:
    params = MuonParams(adjust_lr_fn=adjust)
    for shape in ((48, 32), (32, 48), (7, 7)):
        assert shape_factor(params, *shape) == _adjust_lr(1.0, adjust, torch.Size(shape))


@pytest.mark.parametrize(("steps", "error"), [(5, 0.16), (8, 1e-4)])
def test_polar_express_ends_near_the_orthogonal_matrix(steps: int, error: float) -> None:
    """From singular values of 0.001 to 1 (Amsel et al. 2025). Jordan's coefficients end within
    0.47 and 1.2.
    """
    values = torch.logspace(-3, 0, 60, dtype=torch.float64)
    for a, b, c in coefficients_of(MuonParams(ns_coefficients="polar_express", ns_steps=steps)):
        values = a * values + b * values**3 + c * values**5
    assert float((values - 1).abs().max()) < error
    assert coefficients_of(MuonParams(ns_coefficients="polar_express"))[0][0] < 8.2873 / 1.009


@contextmanager
def torchs_muon() -> Iterator[None]:
    """The reference updates matrices with torch's own optimizer within the context."""
    parts: dict[str, list[nn.Parameter]] = {}
    optimizers: list[torch.optim.Optimizer] = []

    def step(run: Run, masters: dict[str, nn.Parameter], _momentum: object, rate: float) -> None:
        params = run.muon
        assert params is not None
        for name, weight in masters.items():
            row = parameter_named(run.config.model, name)
            if not row.is_block_matrix:
                continue
            sizes = [*row.row.sections.values()]
            own = parts.setdefault(name, [nn.Parameter(each) for each in weight.data.split(sizes)])
            assert weight.grad is not None
            for part, gradient in zip(own, weight.grad.split(sizes), strict=True):
                part.grad = gradient.contiguous()
        if not optimizers:
            sections = [each for own in parts.values() for each in own]
            optimizers.append(
                torch.optim.Muon(
                    sections, weight_decay=params.weight_decay, momentum=params.momentum
                )
            )
        optimizers[0].param_groups[0]["lr"] = rate * (params.muon_lr or params.lr) / params.lr
        optimizers[0].step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_muon_step", step)
        yield


def test_it_trains_as_torchs_muon_in_bf16(pool: RankPool, text: Path, cache: Path) -> None:
    """torch has a parameter for each section. Updates differ by a third (docs/optimizers.md)."""
    run = muon_run(text, **BF16_IN_FP32, tp=2, dp=2, zero_optimization={"stage": 1})
    corpus = tiny_corpus(run, cache)
    found, *_ = pool.run(4, train_rank, run, corpus, 10)
    assert found is not None
    with torchs_muon():
        expected = train_reference(run, functools.partial(whole_batch, run, corpus), 10)
    comparison = compare(run, found, expected)
    assert max(comparison.losses, key=lambda each: each.relative).equal
    falls = expected.losses[0] - expected.losses[-1]
    assert falls > 100 * abs(found.losses[-1] - expected.losses[-1])
