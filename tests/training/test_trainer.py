"""The training loop records the same run at every layout, saves it, and stops when it should."""

import functools
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.reference import train_reference
from megaspeed.measurement.verification.verify import whole_batch
from megaspeed.model.gpt import GPT
from megaspeed.supervision.process_end import STOP_SIGNALS
from megaspeed.topology.activity import START_UP_TIMEOUTS
from megaspeed.training.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run
from tests.training.recorded import Record, before_updates, receive, train

TEXT = Path(__file__).parents[2] / "LICENSE"
STEPS = 6
SERIAL = (1, 1, 1)
ZERO_STAGES = {SERIAL: 0, (2, 1, 2): 1, (1, 2, 1): 3}  # by (pp, dp, tp)
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 4, "warmup_min_lr": 5e-4, "warmup_type": "linear"},
}


@pytest.fixture(scope="module")
def validation_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write less text than ``eval_batches`` needs, so all of it is evaluated."""
    file = tmp_path_factory.mktemp("validation") / "validation.txt"
    file.write_text(TEXT.read_text()[2000:3000])
    return file


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Runs:
    """One run at several layouts, each trained once."""

    def __init__(self, pool: RankPool, validation_text: Path, cache: Path) -> None:
        self._pool = pool
        self._validation_text = validation_text
        self._cache = cache
        self._known: dict[tuple[int, int, int], list[Record]] = {}

    def configured(self, layout: tuple[int, int, int]) -> tuple[Run, PreparedCorpus]:
        pp, dp, tp = layout
        run = tiny_run(
            TEXT,
            pp=pp,
            dp=dp,
            tp=tp,
            model={"embedding_dropout": 0.1, "residual_dropout": 0.1},  # evaluation must not use it
            data={"validation": [str(self._validation_text)]},
            training={
                "steps": STEPS,
                "eval_interval": 2,
                "save_interval": 4,
                "run_dir": str(self._cache.with_name(f"run-{pp}-{dp}-{tp}")),
            },
            scheduler=WARMUP,
            zero_optimization={"stage": ZERO_STAGES[layout]},
        )
        return run, tiny_corpus(run, self._cache)

    def trained(self, layout: tuple[int, int, int]) -> list[Record]:
        """Return the records of all ranks."""
        if layout not in self._known:
            run, corpus = self.configured(layout)
            self._known[layout] = self._pool.run(run.grid.world_size, train, run, corpus)
        return self._known[layout]


@pytest.fixture(scope="module")
def runs(pool: RankPool, validation_text: Path, cache: Path) -> Runs:
    return Runs(pool, validation_text, cache)


@pytest.mark.parametrize("layout", list(ZERO_STAGES), ids=str)
def test_every_steps_metrics_are_those_of_one_process(
    layout: tuple[int, int, int], runs: Runs
) -> None:
    serial, records = runs.trained(SERIAL)[0], runs.trained(layout)
    assert [step.step for step in serial.steps] == list(range(1, STEPS + 1))
    for record in records:
        for step, alone in zip(record.steps, serial.steps, strict=True):
            assert step.loss == pytest.approx(alone.loss, rel=1e-6)
            assert step.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
            assert step.learning_rate == alone.learning_rate
            assert step.tokens == alone.tokens == step.step * 24 * 16
            assert not step.skipped and step.mfu is None
            assert len(step.peak_memory_bytes) == layout[0]
            assert min(step.peak_memory_bytes) > 50 * 2**20, "bytes, not pages or KiB"
            rate = step.tokens_per_second * step.step_time_seconds
            assert rate == pytest.approx(24 * 16), "tokens of one step over all ranks"
            work, together = (s.tflops_per_rank * s.step_time_seconds for s in (alone, step))
            assert work == pytest.approx(together * math.prod(layout))


@pytest.mark.parametrize("layout", list(ZERO_STAGES), ids=str)
def test_validation_loss_is_that_of_one_process_though_rows_do_not_divide(
    layout: tuple[int, int, int], runs: Runs
) -> None:
    run, corpus = runs.configured(layout)
    assert corpus.validation_sequences % run.batch.micro_batch_size != 0
    assert (
        corpus.validation_sequences < run.config.training.eval_batches * run.batch.train_batch_size
    )
    serial, records = runs.trained(SERIAL)[0], runs.trained(layout)
    assert [validation.step for validation in serial.validations] == [2, 4, 6]
    for record in records:
        for validation, alone in zip(record.validations, serial.validations, strict=True):
            assert validation.step == alone.step
            assert validation.validation_loss == pytest.approx(alone.validation_loss, rel=1e-6)
            perplexity = math.exp(validation.validation_loss)
            assert validation.validation_perplexity == perplexity


@pytest.mark.parametrize("layout", list(ZERO_STAGES), ids=str)
def test_all_ranks_return_the_same_numbers(layout: tuple[int, int, int], runs: Runs) -> None:
    first, *others = runs.trained(layout)
    for other in others:
        assert [(s.loss, s.grad_norm, s.skipped) for s in other.steps] == [
            (s.loss, s.grad_norm, s.skipped) for s in first.steps
        ]
        assert other.validations == first.validations


@pytest.mark.parametrize("layout", list(ZERO_STAGES), ids=str)
def test_evaluations_between_the_steps_leave_the_training_as_it_is(
    layout: tuple[int, int, int], runs: Runs
) -> None:
    run, corpus = runs.configured(layout)
    reference = train_reference(run, functools.partial(whole_batch, run, corpus), STEPS)
    losses = [step.loss for step in runs.trained(layout)[0].steps]
    assert losses == pytest.approx(reference.losses, rel=1e-6)


def test_the_validation_loss_is_the_mean_over_all_held_out_tokens(runs: Runs) -> None:
    """The expected value comes from plain torch, with the weights at the end of plain training."""
    run, corpus = runs.configured(SERIAL)
    reference = train_reference(run, functools.partial(whole_batch, run, corpus), STEPS)
    model = GPT(run.config.model).eval()
    model.load_state_dict(reference.weights, strict=False)
    assert corpus.validation is not None
    counted = corpus.validation_sequences * 16
    (file,) = corpus.validation.files
    tokens = torch.from_numpy(file.map()[: counted + 1].astype("int64"))
    with torch.no_grad():
        logits = model(tokens[:-1].view(-1, 16))
    loss = float(functional.cross_entropy(logits.flatten(0, 1), tokens[1:]))
    assert runs.trained(SERIAL)[0].validations[-1].validation_loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("layout", list(ZERO_STAGES), ids=str)
def test_a_step_is_recorded_then_validated_then_saved_and_the_last_one_always(
    layout: tuple[int, int, int], runs: Runs
) -> None:
    for record in runs.trained(layout):
        assert record.events == [
            ("step", 1),
            ("step", 2),
            ("validation", 2),
            ("step", 3),
            ("step", 4),
            ("validation", 4),
            ("checkpoint", 4),
            ("step", 5),
            ("step", 6),
            ("validation", 6),
            ("checkpoint", 6),
        ]
        assert [save.error for save in record.saves] == [None, None]
        assert all(save.checkpoint.is_dir() for save in record.saves)


def test_the_summary_is_that_of_the_last_step(runs: Runs) -> None:
    record = runs.trained(SERIAL)[0]
    assert record.summary is not None
    assert record.summary.last_step == record.steps[-1]
    assert record.summary.last_validation == record.validations[-1]
    assert record.summary.skipped_steps == 0
    assert record.summary.tokens == STEPS * 24 * 16
    assert record.summary.last_save == record.saves[-1]
    assert record.summary.seconds >= sum(step.step_time_seconds for step in record.steps)


def poison(
    trainer: Trainer, record: Record, *, rank: int, name: str, steps: tuple[int, ...]
) -> None:
    """Put an infinity into one parameter's reduced gradient, on one rank, in some steps."""
    engine = trainer.worker.engine
    step = 0

    def look() -> None:
        nonlocal step
        step += 1
        if step in steps and trainer.worker.context.rank == rank:
            for fragment in engine.gradients.fragments:
                if fragment.name == name:
                    fragment.values[0] = math.inf

    before_updates(trainer, look)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_an_infinity_on_one_rank_skips_the_step_on_all_and_is_traced_to_it(
    precision: dict[str, Any], pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    name, rank = "blocks.2.mlp.down.weight", 3
    run = tiny_run(
        TEXT,
        pp=2,
        tp=2,
        training={
            "steps": 20,
            "max_skipped_steps": 3,
            "save_interval": 1,
            "keep_last": 20,
            "run_dir": str(tmp_path),
        },
        zero_optimization={"stage": 1},
        **precision,
    )
    prepare = functools.partial(poison, rank=rank, name=name, steps=tuple(range(3, 21)))
    records = pool.run(4, train, run, tiny_corpus(run, cache), prepare)
    for record in records:
        assert [step.skipped for step in record.steps] == [False] * 2 + [True] * 3
        assert record.diverged is not None and record.diverged == records[0].diverged
        said = f"the first gradient that is not finite is {name} on rank {rank}."
        assert said in record.diverged
        assert "3 steps in a row (up to step 5)" in record.diverged
        assert "training.max_skipped_steps (3)" in record.diverged
        assert [save.step for save in record.saves] == [1, 2, 3, 4], "a diverged state is not saved"


def test_a_learning_rate_that_is_far_too_large_ends_the_run(
    pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    run = tiny_run(
        TEXT,
        dp=2,
        training={"steps": 50, "max_skipped_steps": 2, "run_dir": str(tmp_path)},
        optimizer={"params": {"lr": 1e20}},
        zero_optimization={"stage": 2},
    )
    records = pool.run(2, train, run, tiny_corpus(run, cache))
    for record in records:
        assert record.diverged is not None and "on rank 0" in record.diverged
        assert len(record.steps) < 50
        assert [step.skipped for step in record.steps[-2:]] == [True, True]
        assert not math.isfinite(record.steps[-1].grad_norm)


def poison_and_watch(trainer: Trainer, record: Record, *, steps: tuple[int, ...]) -> None:
    """Make ``steps`` skipped steps, and keep the weights before every step."""
    poison(trainer, record, rank=0, name="blocks.0.mlp.up.bias", steps=steps)

    def look() -> None:
        record.weights.append(dict(trainer.worker.engine.gather_parameters()))
        record.timeouts.append(trainer.worker.context.activity.timeouts)

    before_updates(trainer, look)


def test_a_skipped_step_changes_no_weight_and_does_not_advance_the_learning_rate(
    pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    run = tiny_run(
        TEXT,
        dp=2,
        training={"steps": 7, "max_skipped_steps": 2, "run_dir": str(tmp_path)},
        scheduler=WARMUP,
        zero_optimization={"stage": 1},
    )
    prepare = functools.partial(poison_and_watch, steps=(3, 5))
    for record in pool.run(2, train, run, tiny_corpus(run, cache), prepare):
        assert record.diverged is None, "two steps were skipped, but not in a row"
        assert [step.step for step in record.steps if step.skipped] == [3, 5]
        assert record.summary is not None and record.summary.skipped_steps == 2
        assert record.summary.last_validation is None, "there is no validation text"
        # Steps 1 and 2 start DeepSpeed's warmup, both at its lowest rate. Each step taken adds a
        # quarter.
        rates = [step.learning_rate for step in record.steps]
        expected = [5.0e-4, 5.0e-4, 6.25e-4, 6.25e-4, 7.5e-4, 7.5e-4, 8.75e-4]
        assert rates == pytest.approx(expected, rel=1e-12)
        assert [step.tokens for step in record.steps] == [24 * 16 * step for step in range(1, 8)]
        for step in range(1, 7):
            before, after = record.weights[step - 1], record.weights[step]
            same = all(torch.equal(before[name], after[name]) for name in before)
            assert same is (step in (3, 5)), f"weights after step {step}"
        assert record.timeouts == [START_UP_TIMEOUTS] + 6 * [1.0], "the first step also warms up"


def test_a_resumed_run_counts_on_where_the_saved_one_was(
    pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    """Step 3 is skipped, step 4 is saved. So the rate of step 5 follows 3 steps taken, not 4."""
    run = tiny_run(
        TEXT,
        dp=2,
        training={"steps": 7, "save_interval": 4, "run_dir": str(tmp_path)},
        scheduler=WARMUP,
        zero_optimization={"stage": 1},
    )
    corpus = tiny_corpus(run, cache)
    skip = functools.partial(poison, rank=0, name="blocks.0.mlp.up.bias", steps=(3,))
    through = pool.run(2, train, run, corpus, skip)
    saved = through[0].saves[0].checkpoint
    resumed = pool.run(2, train, run, corpus, None, saved)
    for before, after in zip(through, resumed, strict=True):
        assert [step.step for step in after.steps] == [5, 6, 7]
        for name in ("loss", "grad_norm", "learning_rate", "tokens", "skipped"):
            uninterrupted = [getattr(step, name) for step in before.steps[4:]]
            assert [getattr(step, name) for step in after.steps] == uninterrupted, name
        assert after.summary is not None and before.summary is not None
        assert after.summary.skipped_steps == before.summary.skipped_steps == 1
        assert after.summary.tokens == 3 * 24 * 16


def test_skipped_steps_before_a_resume_count_towards_the_limit(
    pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    run = tiny_run(
        TEXT,
        training={"steps": 9, "max_skipped_steps": 3, "save_interval": 4, "run_dir": str(tmp_path)},
    )
    corpus = tiny_corpus(run, cache)
    skip = functools.partial(poison, rank=0, name="blocks.0.mlp.up.bias")
    (before,) = pool.run(1, train, run, corpus, functools.partial(skip, steps=(3, 4)))
    saved = before.saves[0].checkpoint
    (after,) = pool.run(1, train, run, corpus, functools.partial(skip, steps=(1,)), saved)
    assert before.diverged is None, "two skipped steps in a row are allowed"
    assert after.diverged is not None and "3 steps in a row (up to step 5)" in after.diverged


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_one_rank_stops_all_after_the_step_and_saves_it(
    number: signal.Signals, asynchronous: bool, pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    training = {"save_interval": 0, "async_save": asynchronous, "run_dir": str(tmp_path)}
    run = tiny_run(TEXT, pp=2, training=training)
    prepare = functools.partial(receive, number=number, rank=1)
    for record in pool.run(2, train, run, tiny_corpus(run, cache), prepare):
        stop, save = (number.name, 3), ("checkpoint", 3)
        assert record.events == [("step", 1), ("step", 2), ("step", 3), stop, save]
        assert record.summary is not None
        assert record.summary.last_save.error is None
        assert record.summary.last_save.checkpoint == tmp_path / "checkpoints" / "step-00000003"


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_run_continues(
    pool: RankPool, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    training = {"steps": 4, "save_interval": 2, "run_dir": str(tmp_path)}
    run = tiny_run(TEXT, dp=2, training=training)
    for record in pool.run(2, train, run, tiny_corpus(run, cache)):
        assert [step.step for step in record.steps] == [1, 2, 3, 4]
        assert [save.step for save in record.saves] == [2, 4]
        assert all("File exists" in str(save.error) for save in record.saves)
        assert record.summary is not None and record.summary.last_save == record.saves[-1]
