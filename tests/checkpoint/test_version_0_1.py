"""Checkpoints that version 0.1 wrote load, and training continues as it did in version 0.1.

`version_0_1/README.md` states how the checkpoints were written. Each folder there holds one run of
six steps: its configuration, its metrics, and the checkpoint of step 3.
"""

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import KINDS, expected_tensors
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.loader import ValidationLoader
from megaspeed.measurement.verification.comparison import TOLERANCES
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.resume import ResumeOptions, find_start
from tests.checkpoint.saved_runs import SavedRun, Stretch, only_checkpoint, started
from tests.support.rank_pool import RankPool

FOLDER = Path(__file__).with_name("version_0_1")
NAMES = sorted(folder.name for folder in FOLDER.iterdir() if (folder / "config.json").exists())
SAVED_STEP, LAST_STEP = 3, 6
ROWS_PER_MICRO_BATCH = 4

# torch reads a checkpoint in a process without groups here, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# With dropout, the masks of two seeds move a loss of steps 4 to 6 by at most 0.15 %. A moment that
# was not loaded moves the loss of step 6 by 1.5 % or more (measured without dropout).
NEAR = 0.004

AXES = ("data", "pipeline", "tensor")
OWN_LAYOUT: dict[str, Any] = {}
ONE_PROCESS = {"parallel.data": 1, "parallel.pipeline": 1, "parallel.tensor": 1}
OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2-zero1-fp32": {**ONE_PROCESS, "parallel.tensor": 2, "zero_optimization.stage": 3},
    "gpt2-zero3-fp32-dropout": {**ONE_PROCESS, "zero_optimization.stage": 0},
    "llama-zero1-bf16": {**ONE_PROCESS, "parallel.data": 2, "zero_optimization.stage": 2},
    "llama-zero3-fp32": {**ONE_PROCESS, "parallel.tensor": 2, "zero_optimization.stage": 1},
}


@dataclass(frozen=True)
class Continued:
    """A run that started from a checkpoint.

    Attributes:
        start_step: the step of the checkpoint.
        validation_loss: of the loaded model, before the first step.
        stretch: the loaded state, and the steps up to the run's last.
    """

    start_step: int
    validation_loss: float
    stretch: Stretch


def continue_from(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, checkpoint: Path
) -> Continued:
    """Checks and loads the checkpoint as `--resume` does, then trains to the run's last step."""
    with started(launch, run) as context:
        start = find_start(ResumeOptions(source=str(checkpoint)), run, context)
        assert start.checkpoint is not None
        rank = SavedRun.start(run, corpus, context)
        rank.progress = rank.checkpointing.load(start.checkpoint)
        held_out = ValidationLoader(
            corpus, rank.inputs.shape, eval_batches=run.config.training.eval_batches
        )
        validation_loss = rank.worker.evaluate(
            held_out.micro_batch, len(held_out), held_out.predicted_tokens
        )
        stretch = rank.stretch(run.config.training.steps - start.step)
        return Continued(start.step, validation_loss, stretch)


def run_of(name: str, changes: dict[str, Any], run_dir: Path) -> Run:
    """The run that wrote the checkpoint, in another layout if `changes` state one."""
    settings: dict[str, Any] = {
        "data.train": [str(FOLDER / "train.txt")],
        "data.validation": [str(FOLDER / "validation.txt")],
        "data.tokenizer": str(FOLDER / "tokenizer"),
        "training.run_dir": str(run_dir),
        **changes,
    }
    config = FOLDER / name / "config.json"
    stated = json.loads(config.read_text())["parallel"]
    dp, pp, tp = (changes.get(f"parallel.{axis}", stated[axis]) for axis in AXES)
    if changes:
        settings["train_micro_batch_size_per_gpu"] = ROWS_PER_MICRO_BATCH // dp
        settings["parallel.sequence_parallel"] = False
    return load_run(
        config,
        [f"{key}={json.dumps(value)}" for key, value in settings.items()],
        World(dp * pp * tp, "test"),
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    """The data of all these runs."""
    run = run_of(NAMES[0], OWN_LAYOUT, Path("unused"))
    cache = tmp_path_factory.mktemp("cache")
    return prepare_corpus(run.config.data, run.config.model.vocab_size, cache_dir=cache)


def factors(name: str) -> dict[str, object]:
    """What distinguishes one of the runs from the others, as its checkpoint states it."""
    state = RunState.read(only_checkpoint(FOLDER / name))
    model = state.model_section()
    assert state.layout is not None
    return {
        "architecture": model.architecture,
        "stage": state.layout.zero_stage,
        "precision": state.layout.precision,
        "dropout": model.residual_dropout > 0,
    }


def test_every_two_factors_meet() -> None:
    """GPT-2 or Llama, ZeRO-1 or 3, fp32 or bf16, dropout or none: all pairs of their values."""
    runs = [factors(name) for name in NAMES]
    for one, other in combinations(runs[0], 2):
        assert len({(run[one], run[other]) for run in runs}) == 4, (one, other)


def test_all_were_written_by_version_0_1() -> None:
    for name in NAMES:
        state = RunState.read(only_checkpoint(FOLDER / name))
        assert state.software["megaspeed"].startswith("0.1"), name
        assert state.progress.step == SAVED_STEP, name


@pytest.mark.parametrize("name", NAMES)
def test_it_continues_in_its_own_layout(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, name: str
) -> None:
    check(pool, run_of(name, OWN_LAYOUT, tmp_path), corpus, name)


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_it_continues_in_another_layout(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, name: str
) -> None:
    check(pool, run_of(name, OTHER_LAYOUTS[name], tmp_path), corpus, name)


def check(pool: RankPool, run: Run, corpus: PreparedCorpus, name: str) -> None:
    """Compares a continuation with the one of version 0.1.

    Its steps show that weights, moments and counters were loaded. With dropout, masks may differ
    between versions, so the steps are only near. The validation loss has no dropout and is equal.
    """
    checkpoint = only_checkpoint(FOLDER / name)
    continued = pool.run(run.grid.world_size, continue_from, run, corpus, checkpoint)[0]
    records = [json.loads(line) for line in (FOLDER / name / "metrics.jsonl").open()]
    steps = [r for r in records if r["step"] > continued.start_step and "loss" in r]
    (validation,) = (
        r["validation_loss"] for r in records if "validation_loss" in r and r["step"] == SAVED_STEP
    )
    allowed = TOLERANCES[run.precision]
    assert continued.start_step == SAVED_STEP and len(steps) == LAST_STEP - SAVED_STEP
    assert_same_as_in_the_file(continued.stretch, checkpoint, run)
    assert continued.validation_loss == pytest.approx(validation, rel=allowed.loss)
    losses = [step["loss"] for step in steps]
    if run.config.model.residual_dropout > 0:
        assert continued.stretch.losses == pytest.approx(losses, rel=NEAR)
        return
    norms = [step["grad_norm"] for step in steps]
    assert continued.stretch.losses == pytest.approx(losses, rel=allowed.loss)
    norm_allowed = allowed.loss if run.precision == "fp32" else allowed.grad_norm
    assert continued.stretch.norms == pytest.approx(norms, rel=norm_allowed)
    assert continued.stretch.rates == [step["learning_rate"] for step in steps]


def assert_same_as_in_the_file(loaded: Stretch, checkpoint: Path, run: Run) -> None:
    """Weights and both moments, bit for bit, read from the file by torch alone."""
    expected = expected_tensors(run.config.model)
    tensors: dict[str, Tensor] = {key: torch.zeros(shape) for key, shape in expected.items()}
    dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    assert loaded.copies_differ_by == 0.0
    for kind in KINDS:
        for tensor_name, value in loaded.state[kind].items():
            assert torch.equal(value, tensors.pop(f"{kind}.{tensor_name}")), (kind, tensor_name)
    assert not tensors, "a tensor of the file was not loaded"
