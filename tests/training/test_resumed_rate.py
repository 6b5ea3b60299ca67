"""If the next learning rate of a resumed run differs from the saved schedule, both are reported."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.training.learning_rate import learning_rate
from megaspeed.training.resumed_run import rate_change
from tests.checkpoint.written import run_state
from tests.support.command import lacking
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
COSINE: dict[str, Any] = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}}
STEPS, SAVED = 100, 60
SAVED_COSINE = (
    """'scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, """
    '"warmup_type": "log", "total_num_steps": 100, "warmup_min_ratio": 0.0, '
    """"cos_min_ratio": 0.0001}}'"""
)


def run_for(steps: int = STEPS, scheduler: Any = COSINE, **changes: Any) -> Run:
    return tiny_run(TEXT, training={"steps": steps}, scheduler=scheduler, **changes)


def saved_by(run: Run) -> RunState:
    """Return the state of step 60. One of the steps was skipped."""
    return run_state(SAVED, config=run.as_json())


def next_rate(run: Run) -> float:
    config = run.config
    return learning_rate(config.optimizer, config.scheduler, step=SAVED - 1, steps=-1)


def test_the_same_configuration_continues_the_rate() -> None:
    assert rate_change(saved_by(run_for()), run_for()) is None


def test_more_steps_stretch_the_cosine_and_both_rates_are_named() -> None:
    before, now = run_for(), run_for(200)
    change = rate_change(saved_by(before), now)
    rates = f"step 61 is {next_rate(now):.3e}", f"{next_rate(before):.3e}"
    mend = f"--set optimizer.params.lr=0.001 scheduler=null {SAVED_COSINE}"
    assert lacking(change, *rates, mend) == []
    assert next_rate(now) > 1.5 * next_rate(before)


def test_keys_of_a_later_version_do_not_hide_the_change() -> None:
    saved = saved_by(run_for())
    training = {**saved.config["training"], "key_of_a_later_version": 1}
    of_later = saved.model_copy(update={"config": {**saved.config, "training": training}})
    assert rate_change(of_later, run_for(200)) == rate_change(saved, run_for(200)) is not None


def test_the_settings_of_the_warning_keep_the_rate() -> None:
    params = {**COSINE["params"], "total_num_steps": 100}
    kept = run_for(200, {**COSINE, "params": params})
    assert rate_change(saved_by(run_for()), kept) is None


LR_2E_3: dict[str, Any] = {"optimizer": {"params": {"lr": 2e-3}}}


@pytest.mark.parametrize(
    ("now", "mend"),
    [
        (run_for(**LR_2E_3), f"optimizer.params.lr=0.001 scheduler=null {SAVED_COSINE}"),
        (
            run_for(scheduler={"type": "cosine", "params": {"warmup_num_steps": 10}}),
            f"optimizer.params.lr=0.001 scheduler=null {SAVED_COSINE}",
        ),
        (run_for(scheduler=None), f"optimizer.params.lr=0.001 {SAVED_COSINE}"),
    ],
)
def test_the_saved_rate_and_schedule_are_named(now: Run, mend: str) -> None:
    change = rate_change(saved_by(run_for()), now)
    assert change is not None and change.endswith(f"pass --set {mend}")


def test_a_new_schedule_can_be_removed() -> None:
    change = rate_change(saved_by(run_for(scheduler=None)), run_for())
    assert change is not None and change.endswith(
        "pass --set optimizer.params.lr=0.001 scheduler=null"
    )


def muon(lr: float, muon_lr: float, adam_lr: float) -> Run:
    params = {"lr": lr, "muon_lr": muon_lr, "adam_lr": adam_lr}
    return run_for(scheduler=None, optimizer={"type": "Muon", "params": params})


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (muon(0.02, 0.01, 3e-3), "step 61 is 1.000e-02, but the saved schedule has 2.000e-02"),
        (muon(0.02, 0.02, 1.0), "step 61 is 1.000e+00, but the saved schedule has 3.000e-03"),
        (muon(0.01, 0.02, 3e-3), None),  # neither rate changes
    ],
)
def test_both_rates_of_muon_are_compared_and_kept(now: Run, named: str | None) -> None:
    """An earlier version compared ``lr`` alone, and its advice kept no rate of Muon."""
    change = rate_change(saved_by(muon(0.02, 0.02, 3e-3)), now)
    mend = "optimizer.params.lr=0.02 optimizer.params.muon_lr=0.02 optimizer.params.adam_lr=0.003"
    assert (change is None) if named is None else lacking(change, named, mend) == []


def test_rates_of_two_optimizers_are_not_compared() -> None:
    assert rate_change(saved_by(run_for(scheduler=None)), muon(0.02, 0.02, 3e-3)) is None


def test_an_imported_model_had_no_rate() -> None:
    imported = run_state(1, imported_from="gpt2", config={"model": run_for().as_json()["model"]})
    assert rate_change(imported, run_for()) is None


DECAY = {"warmup_num_steps": 10, "min_ratio": 0.2}
CONSTANT = {"warmup_num_steps": 10}
WARMUP = {"warmup_num_steps": 10, "warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3}
SCHEDULERS: dict[str | None, Any] = {
    None: None,
    "cosine": {"type": "cosine", "params": DECAY},
    "linear": {"type": "linear", "params": DECAY},
    "constant": {"type": "constant", "params": CONSTANT},
    "wsd": {"type": "wsd", "params": {**DECAY, "decay_num_steps": 20}},
    "WarmupLR": {"type": "WarmupLR", "params": WARMUP},
    "WarmupDecayLR": {"type": "WarmupDecayLR", "params": WARMUP},
    "WarmupCosineLR": COSINE,
}
SCALED = {"lr_scaling": "linear", "base_batch_size": 8}


def wsd(decay: int, steps: int = STEPS, **params: Any) -> Run:
    return run_for(steps, {"type": "wsd", "params": {**DECAY, "decay_num_steps": decay, **params}})


@pytest.mark.parametrize(
    ("before", "now", "jumps"),
    [
        (wsd(20), wsd(20, 79), False),  # the next step is the first of the decay
        (wsd(20), wsd(10, 200, decay_shape="linear"), False),
        (run_for(scheduler=SCHEDULERS["constant"]), wsd(20, 79), False),
        (wsd(20), wsd(20, 78), True),  # the decay would have begun a step earlier
        (wsd(42), wsd(42, 101), True),  # the checkpoint is in the decay of the saved run
        (wsd(42), wsd(42), False),
        (wsd(20), run_for(79, COSINE), True),
    ],
)
def test_a_decay_that_starts_at_a_checkpoint_is_no_jump(before: Run, now: Run, jumps: bool) -> None:
    """59 steps of the checkpoint count, because one of its 60 was skipped."""
    assert (rate_change(saved_by(before), now) is not None) is jumps


def test_the_warning_names_the_end_of_a_schedule_without_one() -> None:
    change = rate_change(saved_by(wsd(42)), wsd(42, 101))
    assert change is not None and '"total_num_steps": 100}' in change
    # 60 steps of 256 tokens are trained, and 24 x 16 tokens a step are left to step 117.
    training = {"steps": None, "tokens": 60 * 256 + 57 * 384 - 5}
    tokens = tiny_run(TEXT, training=training, scheduler=COSINE)
    change = rate_change(saved_by(tokens), run_for(scheduler=None))
    assert tokens.steps == 97 and change is not None and '"total_num_steps": 117' in change


@pytest.mark.parametrize("scaling", [{}, SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize("before", SCHEDULERS)
@pytest.mark.parametrize("now", SCHEDULERS)
def test_the_command_of_the_warning_gives_the_saved_rates_again(
    tmp_path: Path, before: str | None, now: str | None, scaling: dict[str, Any]
) -> None:
    """A user appends the command's part to other changes in a shell, with the same file."""
    file = tmp_path / "run.json"
    values = {**run_for(scheduler=SCHEDULERS[before]).as_json(), "scheduler": SCHEDULERS[before]}
    values["training"] |= scaling
    file.write_text(json.dumps(values))

    def load(*overrides: str) -> Run:
        return load_run(file, overrides, World(1, "x"))

    changed = ["optimizer.params.lr=0.003"]
    if now != before:
        changed += ["scheduler=null", f"scheduler={json.dumps(SCHEDULERS[now])}"]
    saved, resumed = load(), load(*changed)
    change = rate_change(saved_by(saved), resumed)
    if now == before and now in ("WarmupLR", "WarmupDecayLR"):
        assert change is None, "warmup_max_lr alone determines its rates"
        return
    assert change is not None
    command = change.partition("pass --set ")[2]
    kept = load(*changed, *shlex.split(command)).config
    assert kept.optimizer == saved.config.optimizer
    assert kept.scheduler == saved.config.scheduler
