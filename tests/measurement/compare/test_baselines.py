"""torch's DDP and FSDP2 train the same as ZeRO-0: the same losses, norms and weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.compare import ComparedRow, baseline_rows
from megaspeed.measurement.verification.comparison import TOLERANCES
from megaspeed.measurement.watched_step import measure
from megaspeed.model.parameters import parameters_of
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.traffic import Traffic
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import StepInputs, StepResult, Worker
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, OLMOE, short_documents, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[3] / "LICENSE"
STEPS = 4
DP = 2
SAMPLES = 24  # in each step

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Trained:
    """The results of one rank."""

    losses: list[float]
    grad_norms: list[float]
    weights: Mapping[str, Tensor]
    states: MemoryBytes | None = None
    peak: MemoryBytes | None = None
    traffic: Traffic | None = None


def train_zero(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> Trained:
    with _context(launch, run) as context:
        worker = Worker(run, context)
        inputs = StepInputs(run, corpus, context)
        results = [_step(worker, inputs, step) for step in range(STEPS)]
        return _trained(results, dict(worker.engine.gather_parameters()))


def train_baseline(launch: LaunchEnvironment, row: ComparedRow, corpus: PreparedCorpus) -> Trained:
    with _context(launch, row.run) as context:
        worker = row.make(row.run, context)
        inputs = StepInputs(row.run, corpus, context)
        results = [_step(worker, inputs, step) for step in range(STEPS - 1)]
        last = STEPS - 1
        result, measured = measure(worker, inputs.load(last * SAMPLES), inputs.learning_rate(last))
        weights = {name: _whole(p) for name, p in worker.model.named_parameters()}
        return _trained(
            [*results, result],
            weights,
            states=measured.states,
            peak=measured.peak,
            traffic=measured.traffic,
        )


def _context(launch: LaunchEnvironment, run: Run) -> ParallelContext:
    grid = run.grid
    return ParallelContext.create(grid, launch, timeout_seconds=limit(60))


def _step(worker: Any, inputs: StepInputs, step: int) -> StepResult:
    return worker.train_step(inputs.load(step * SAMPLES), inputs.learning_rate(step))


def _trained(results: list[StepResult], weights: Mapping[str, Tensor], **rest: Any) -> Trained:
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    return Trained(losses, norms, {name: w.detach().float() for name, w in weights.items()}, **rest)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def averaged(ranks: list[Trained]) -> Trained:
    """Return rank 0's results, with the mean loss of all ranks."""
    losses = zip(*(rank.losses for rank in ranks), strict=True)
    return replace(ranks[0], losses=[sum(each) / len(ranks) for each in losses])


RUNS: dict[str, dict[str, Any]] = {
    "gpt2, tied": {},
    "llama, untied, recomputed, dropout, reset at documents, one micro-batch": {
        "model": {**LLAMA, "tie_word_embeddings": False, "residual_dropout": 0.1},
        "parallel": {"activation_checkpointing": "full"},
        "data": {"reset_at_documents": True},
        "gradient_accumulation_steps": 1,
    },
    "bf16, reset at documents, one micro-batch": {
        "bf16": {"enabled": True},
        "data": {"reset_at_documents": True},
        "gradient_accumulation_steps": 1,
    },
    "experts, recomputed, one micro-batch": {
        "model": OLMOE,
        "parallel": {"activation_checkpointing": "full"},
        "gradient_accumulation_steps": 1,
    },
}


class Trainings:
    """Every baseline and ZeRO-0 of every run, each trained once."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool = pool
        self._cache = folder / "cache"
        self._text = short_documents(TEXT, folder)
        self._known: dict[str, list[Trained]] = {}

    def run(self, name: str) -> Run:
        return tiny_run(self._text, dp=DP, **RUNS[name])

    def zero(self, name: str) -> Trained:
        """Return ZeRO-0's results on rank 0."""
        if f"zero, {name}" not in self._known:
            run = self.run(name)
            trained = self._pool.run(DP, train_zero, run, tiny_corpus(run, self._cache))
            self._known[f"zero, {name}"] = trained
        return self._known[f"zero, {name}"][0]

    def baselines(self, name: str) -> list[Trained]:
        """Return rank 0's results of DDP and FSDP2. If FSDP2 has two settings, the one that reduces
        once comes last.
        """
        if name not in self._known:
            run = self.run(name)
            corpus = tiny_corpus(run, self._cache)
            self._known[name] = [
                averaged(self._pool.run(DP, train_baseline, row, corpus))
                for row in baseline_rows(run, ["ddp", "fsdp"], "cpu")
            ]
        return self._known[name]


@pytest.fixture(scope="module")
def trainings(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(pool, tmp_path_factory.mktemp("trainings"))


@pytest.mark.parametrize("name", RUNS)
def test_baselines_train_what_zero_0_trains(name: str, trainings: Trainings) -> None:
    zero = trainings.zero(name)
    allowed = TOLERANCES[trainings.run(name).precision]
    for baseline in trainings.baselines(name):
        assert baseline.losses == pytest.approx(zero.losses, rel=allowed.loss)
        assert baseline.grad_norms == pytest.approx(zero.grad_norms, rel=allowed.grad_norm)


@pytest.mark.parametrize("name", [name for name in RUNS if "bf16" not in name])
def test_baselines_end_with_the_weights_of_zero_0(name: str, trainings: Trainings) -> None:
    zero = trainings.zero(name)
    for baseline in trainings.baselines(name):
        assert baseline.weights.keys() == zero.weights.keys()
        for parameter, weight in baseline.weights.items():
            expected = zero.weights[parameter][: len(weight)]  # without padding of the vocabulary
            # AdamW's first steps are lr x sign(gradient), so a tiny difference of a gradient
            # matters.
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


def test_ddp_cannot_train_experts_in_bf16_but_fsdp2_can() -> None:
    run = tiny_run(TEXT, dp=DP, model=OLMOE, bf16={"enabled": True})
    assert baseline_rows(run, ["fsdp"], "cpu")
    with pytest.raises(ConfigError, match=r"--baselines ddp fsdp: torch's autocast"):
        baseline_rows(run, ["ddp", "fsdp"], "cpu")


def test_their_states_and_traffic_are_those_of_the_shapes(trainings: Trainings) -> None:
    """In fp32, a parameter and a gradient have 4 bytes each, AdamW's moments 8. FSDP2 has half of
    all.

    If the number of rows is odd, rank 0 has one more, and messages have the size of rank 0's part.
    For a message of S bytes, a rank of two sends S/2 in a gather or a reduce-scatter, and S in an
    all-reduce.
    """
    run = trainings.run("gpt2, tied")
    shapes = {name: p.shape for name, p in parameters_of(run.config.model).items()}
    whole = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    half = {name: 4 * -(-s[0] // 2) * math.prod(s[1:]) for name, s in shapes.items()}
    steps_taken = 4 * len(shapes)  # AdamW counts them with one number for each parameter
    blocks = sum(size for name, size in half.items() if name.startswith("blocks."))
    micro_batches = run.batch.gradient_accumulation_steps
    everything, part = sum(whole.values()), sum(half.values())

    ddp, per_micro_batch, per_step = trainings.baselines("gpt2, tied")
    assert ddp.states == MemoryBytes(
        parameters=everything, gradients=everything, optimizer_states=2 * everything + steps_taken
    )
    assert ddp.peak is not None and ddp.peak.communication_buffers == everything
    assert ddp.traffic == {("dp", "all_reduce"): everything}

    assert per_micro_batch.states == MemoryBytes(
        parameters=part, gradients=part, optimizer_states=2 * part + steps_taken
    )
    assert per_step.states == MemoryBytes(
        parameters=part, gradients=everything, optimizer_states=2 * part + steps_taken
    )
    # All parameters for forward, the blocks again for backward.
    gathered = micro_batches * (part + blocks)
    for trained, reductions in ((per_micro_batch, micro_batches), (per_step, 1)):
        assert trained.traffic == {
            ("dp", "all_gather"): gathered,
            ("dp", "reduce_scatter"): reductions * part,
            ("world", "all_reduce"): 8,  # for the norm
        }


def test_fsdp2_has_the_replicas_of_the_run_and_ddp_has_only_replicas(
    pool: RankPool, tmp_path: Path
) -> None:
    """This is torch's hybrid sharding: a mesh of replicas and shards."""
    run = tiny_run(
        short_documents(TEXT, tmp_path),
        dp=4,
        parallel={"replicate": 2},
        zero_optimization={"stage": 3},
        gradient_accumulation_steps=2,
    )
    corpus = tiny_corpus(run, tmp_path)
    zero = pool.run(4, train_zero, run, corpus)[0]
    rows = baseline_rows(run, ["ddp", "fsdp"], "cpu")
    for row, axes in zip(rows, ({"dp", "world"}, *2 * [{"shard", "replica"}]), strict=True):
        trained = averaged(pool.run(4, train_baseline, row, corpus))
        assert trained.losses == pytest.approx(zero.losses, rel=1e-6)
        assert trained.grad_norms == pytest.approx(zero.grad_norms, rel=1e-5)
        assert trained.traffic is not None and {axis for axis, _ in trained.traffic} <= axes
        if row.label != "DDP":
            assert ("replica", "all_reduce") in trained.traffic
