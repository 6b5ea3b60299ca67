"""Which checkpoints a run may resume from, and where its data resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.run_state import LossScale, Progress, RunState
from megaspeed.config.resolve import Run
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.resumed_run import (
    config_changes,
    model_changes,
    resumed_progress,
)
from megaspeed.training.worker import Worker
from megaspeed.zero.engine import Counters
from tests.checkpoint.saved_runs import (
    SavedRun,
    Stretch,
    only_checkpoint,
    save_and_continue,
    save_only,
    started,
)
from tests.checkpoint.written import run_state
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, MUON, tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
OTHER_TEXT = Path(__file__)
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6}}


def load(
    launch: LaunchEnvironment, run: Run, cache: Path, checkpoint: Path, allow_data_change: bool
) -> Progress | str:
    """Return the progress at which the run would resume, or the error message."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, tiny_corpus(run, cache), context)
        try:
            return rank.checkpointing.load(checkpoint, allow_data_change=allow_data_change)
        except CheckpointError as error:
            return str(error)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = small_run(TEXT, dp=2, training={"run_dir": str(folder)})
    pool.run(2, save_only, run, tiny_corpus(run, cache))
    return only_checkpoint(folder)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "heads": (
        {"model": {"num_attention_heads": 2}},
        ["model.num_attention_heads was 4 and is 2; set it back, or start a new run"],
    ),
    "width": (
        {"model": {"intermediate_size": 64}},
        [
            "blocks.0.mlp.up.weight is 128 x 32 in the checkpoint, but 64 x 32 in the model",
            "(saved at pp 1 x dp 2 x tp 1, ZeRO-0, fp32) does not match this run (at pp 1 x dp",
        ],
    ),
    "depth": (
        {"model": {"num_hidden_layers": 4}},
        [
            "model.num_hidden_layers was 3 and is 4",
            "blocks.3.mlp.up.weight (128 x 32) is missing in the checkpoint",
        ],
    ),
    "untied": (
        {"model": {"tie_word_embeddings": False}},
        ["head.output.weight (301 x 32) is missing in the checkpoint"],
    ),
    "text": (
        {"data": {"train": [str(OTHER_TEXT)]}},
        ["the training text (data.train) was ", "with --allow-data-change"],
    ),
    "sequence length": (
        {"data": {"sequence_length": 8}},
        ["data.sequence_length was 16 and is 8; set it back, or resume with --allow-data-change"],
    ),
    "seed": ({"data": {"seed": 5}}, ["data.seed was 1234 and is 5"]),
    "optimizer": (
        {"optimizer": MUON},
        [
            "optimizer.type was AdamW and is Muon, which would drop exp_avg and exp_avg_sq of 12 "
            "matrices; set it back, or resume with --allow-optimizer-change"
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_match_is_refused_by_name(
    pool: RankPool, saved: Path, cache: Path, name: str
) -> None:
    changes, message = REFUSED[name]
    run = small_run(TEXT, tp=2, **changes)
    answers = pool.run(2, load, run, cache, saved, False)
    assert answers[0] == answers[1] and isinstance(answers[0], str)
    for part in message:
        assert part in answers[0]


def test_other_data_is_used_if_the_user_allows_it(pool: RankPool, saved: Path, cache: Path) -> None:
    """24 samples of 16 tokens were used. These are as many tokens as 48 samples of 8."""
    changes: dict[str, Any] = {"data": {"sequence_length": 8, "train": [str(OTHER_TEXT)]}}
    (progress,) = pool.run(1, load, small_run(TEXT, **changes), cache, saved, True)
    assert isinstance(progress, Progress)
    assert (progress.step, progress.samples, progress.tokens) == (1, 48, 24 * 16)


def load_with_another_optimizer(
    launch: LaunchEnvironment, run: Run, cache: Path, checkpoint: Path
) -> tuple[str, Stretch, set[float]]:
    """Return the refusal, then the state that is loaded if it is allowed, and AdamW's step counts.

    The engine has trained a step, so state that is not loaded would not be zero by itself.
    """
    with started(launch, run) as context:
        rank = SavedRun.start(run, tiny_corpus(run, cache), context)
        rank.train_step()
        with pytest.raises(CheckpointError) as refusal:
            rank.checkpointing.load(checkpoint, allow_data_change=True)
        rank.progress = rank.checkpointing.load(checkpoint, allow_optimizer_change=True)
        states = rank.worker.engine.optimizer.optimizer.state.values()
        counts = {float(state["step"]) for state in states if "step" in state}
        return str(refusal.value), rank.stretch(1), counts


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, MUON, "was AdamW and is Muon, which would drop exp_avg and exp_avg_sq of 12 matrices"),
        (MUON, {}, "was Muon and is AdamW, which would drop momentum of 12 matrices"),
    ],
    ids=["AdamW to Muon", "Muon to AdamW"],
)
def test_another_optimizer_starts_with_what_both_have_if_the_user_allows_it(
    pool: RankPool,
    tmp_path: Path,
    cache: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    message: str,
) -> None:
    run = small_run(TEXT, dp=2, optimizer=before, training={"run_dir": str(tmp_path)})
    saved = pool.run(2, save_and_continue, run, tiny_corpus(run, cache), 2, 0)[0]
    other = small_run(TEXT, tp=2, optimizer=after, zero_optimization={"stage": 1})
    arguments = (other, cache, only_checkpoint(tmp_path))
    refusal, loaded, counts = pool.run(2, load_with_another_optimizer, *arguments)[0]
    assert message in refusal and counts == {2.0}
    kept = dropped = 0
    for kind, tensors in loaded.state.items():
        for name, value in tensors.items():
            if (there := saved.state.get(kind, {}).get(name)) is not None:
                assert torch.equal(value, there), (kind, name)
                kept += kind != "weights"
            else:
                assert not value.any(), (kind, name)
                dropped += 1
    vectors_and_embeddings = len(saved.state["weights"]) - 12
    assert (kept, dropped) == (2 * vectors_and_embeddings, 12 if after else 24)


@pytest.mark.parametrize(("length", "samples"), [(16, 24), (32, 12), (24, 16), (23, 17), (7, 55)])
def test_samples_of_another_length_are_counted_by_their_tokens(
    pool: RankPool, saved: Path, length: int, samples: int
) -> None:
    state = RunState.read(saved)
    assert state.data is not None
    data = state.data.model_copy(update={"sequence_length": length})
    assert resumed_progress(state, data).samples == samples


def test_layout_precision_dropout_optimizer_and_batch_may_change(
    pool: RankPool, saved: Path, cache: Path
) -> None:
    changes: dict[str, Any] = {
        "model": {"residual_dropout": 0.1},
        "bf16": {"enabled": True},
        "optimizer": {"params": {"lr": 5e-4}},
        "train_batch_size": 12,
        "zero_optimization": {"stage": 3},
    }
    (progress,) = pool.run(1, load, small_run(TEXT, **changes), cache, saved, False)
    assert isinstance(progress, Progress) and progress.samples == 24


def test_changes_of_the_configuration_are_reported(saved: Path) -> None:
    run = small_run(TEXT, tp=2, optimizer={"params": {"lr": 5e-4}}, train_batch_size=12)
    assert config_changes(RunState.read(saved), run) == [
        "optimizer.params.lr: 0.001 -> 0.0005",
        "parallel.data: 2 -> 1",
        "parallel.tensor: 1 -> 2",
        "train_batch_size: 24 -> 12",
    ]
    scheduled = small_run(TEXT, dp=2, scheduler=WARMUP)
    message = config_changes(RunState.read(saved), scheduled)
    assert 'scheduler.type: none -> "WarmupLR"' in message


def test_a_change_within_a_list_or_an_object_is_named_alone() -> None:
    """An earlier version printed the complete mixture and rope_scaling, before and after."""
    rope: dict[str, Any] = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    sources = [{"path": f"{n}.txt", "weight": n} for n in (1, 2)]

    def run_with(**changes: Any) -> Run:
        return small_run(TEXT, **changes, data={"train": sources})

    saved = run_state(5, config=run_with(model={**LLAMA, "rope_scaling": rope}).as_json())
    rope["factor"], sources[1]["weight"] = 4.0, 3
    changed = run_with(model={**LLAMA, "rope_scaling": rope}, optimizer={"params": {"lr": 3e-4}})
    assert config_changes(saved, changed) == [
        "data.train[1].weight: 2.0 -> 3.0",
        "model.rope_scaling.factor: 2.0 -> 4.0",
        "optimizer.params.lr: 0.001 -> 0.0003",
    ]
    (problem,) = model_changes(saved, changed)
    assert problem.startswith("model.rope_scaling.factor was 2.0 and is 4.0; ")


def test_a_folder_that_is_not_a_checkpoint_is_an_error_on_all_ranks(
    pool: RankPool, tmp_path: Path, cache: Path
) -> None:
    answers = pool.run(2, load, small_run(TEXT, dp=2), cache, tmp_path, False)
    assert answers[0] == answers[1]
    assert answers[0] == f"{tmp_path}/run_state.json cannot be read (No such file or directory)"


def test_the_run_state_describes_the_run(saved: Path) -> None:
    state = RunState.read(saved)
    assert str(state.layout) == "pp 1 x dp 2 x tp 1, ZeRO-0, fp32"
    assert (state.progress.step, state.progress.steps_taken, state.progress.samples) == (1, 1, 24)
    assert state.progress.tokens == 24 * 16 and state.progress.loss is not None
    assert state.config["train_batch_size"] == 24 and state.loss_scale is None
    assert state.software.keys() == {"megaspeed", "torch", "deepspeed"}


def scaler(scale: float = 2**16) -> Any:
    """Create DeepSpeed's loss scaler, as fp16 runs do."""
    return CreateLossScaler(
        dtype=torch.half,
        static_loss_scale=0,
        dynamic_scaling=True,
        dynamic_loss_args={
            "init_scale": scale,
            "scale_window": 4,
            "min_scale": 1,
            "delayed_shift": 1,
            "consecutive_hysteresis": False,
        },
    )


def scales(scaler: Any, steps: range) -> list[float]:
    """Return the scale after each step. Steps 2 and 9 overflow."""
    found = []
    for step in steps:
        scaler.update_scale(step in (2, 9))
        found.append(float(scaler.cur_scale))
    return found


def scales_of_both(launch: LaunchEnvironment) -> tuple[list[float], list[float]]:
    """Return the scales of steps 6 to 30: from a scaler that saw the steps before, and from one
    that has loaded its state.
    """
    run = small_run(TEXT)
    with started(launch, run) as context:
        engine = Worker(run, context).engine
        uninterrupted, resumed = scaler(), scaler()
        scales(uninterrupted, range(6))
        engine.optimizer.loss_scaler = uninterrupted
        state = engine.loss_scale()
        assert state is not None
        engine.optimizer.loss_scaler = resumed
        engine.load_loss_scale(state)
        return scales(uninterrupted, range(6, 30)), scales(resumed, range(6, 30))


def test_a_dynamic_loss_scale_continues_where_it_was(pool: RankPool) -> None:
    ((uninterrupted, resumed),) = pool.run(1, scales_of_both)
    assert resumed == uninterrupted
    assert len(set(resumed)) > 3


SCALE = LossScale(scale=512.0, iteration=7, last_overflow_iteration=5, hysteresis=3)


def save_with_scale(launch: LaunchEnvironment, run: Run, cache: Path) -> None:
    """Save a checkpoint as an fp16 run with SCALE does, because a CPU run has no fp16."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, tiny_corpus(run, cache), context)
        of_run = scaler(SCALE.scale)
        of_run.cur_iter = SCALE.iteration
        of_run.last_overflow_iter = SCALE.last_overflow_iteration
        of_run.cur_hysteresis = SCALE.hysteresis
        rank.worker.engine.optimizer.loss_scaler = of_run
        rank.checkpointing.save(rank.progress)
        (report,) = rank.checkpointing.close()
        assert report.error is None, report.error


def loss_scale_after_load(
    launch: LaunchEnvironment, run: Run, cache: Path, checkpoint: Path
) -> tuple[Counters | None, Counters | None]:
    """Return the counters of a new run's scaler, before and after it loads a checkpoint."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, tiny_corpus(run, cache), context)
        engine = rank.worker.engine
        engine.optimizer.loss_scaler = scaler()
        before = engine.loss_scale()
        rank.checkpointing.load(checkpoint)
        return before, engine.loss_scale()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_dynamic_loss_scale_is_saved_and_loaded(
    pool: RankPool, tmp_path: Path, cache: Path, stage: int
) -> None:
    training = {"run_dir": str(tmp_path)}
    run = small_run(TEXT, dp=2, zero_optimization={"stage": stage}, training=training)
    pool.run(2, save_with_scale, run, cache)
    checkpoint = only_checkpoint(tmp_path)
    assert RunState.read(checkpoint).loss_scale == SCALE
    for before, after in pool.run(2, loss_scale_after_load, run, cache, checkpoint):
        assert before is not None and before["scale"] == 2**16
        assert after == SCALE.model_dump()
