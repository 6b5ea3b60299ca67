"""Compares a run with the run whose checkpoint it resumes from.

Layout, ZeRO stage, schedule, precision, batch, parameters of the optimizer and dropout may change.
The function that the model computes must not change. The data may change only if the user allows
it. Otherwise losses before and after the resume could not be compared. The optimizer may change
only if the user allows it, because the other one cannot use all of the state.

A schedule without ``total_num_steps`` ends at the last step. If a resumed run has more steps, its
schedule is longer, so the learning rate jumps. This is reported as a warning.
"""

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megaspeed.checkpoint.run_state import DataIdentity, Progress, RunState
from megaspeed.checkpoint.tensors import kinds_of
from megaspeed.config.deepspeed_keys import OptimizerConfig, SchedulerConfig
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.section import Section
from megaspeed.files.json_values import leaves
from megaspeed.model.parameters import parameters_of
from megaspeed.training.learning_rate import learning_rate

_DATA_KEYS = {
    "corpus": "the training text (data.train)",
    "tokenizer": "the tokenizer (data.tokenizer)",
    "sequence_length": "data.sequence_length",
    "seed": "data.seed",
}

# These keys do not change the result of training.
_FOLLOWING_KEYS = (
    "training.run_dir",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.overlap_comm",
    "zero_optimization.stage3_",
)

# What determines the weights after a given number of steps. training.steps is not among them: if it
# determines the schedule, the resolved total_num_steps differs, or the decay of wsd starts later.
_TRAINING_KEYS = (
    *("model.", "data.", "optimizer.", "scheduler", "gradient_clipping", "train_batch_size"),
    *("bf16.", "fp16.", "data_types.", "training.seed"),
    *("training.z_loss", "training.skip_spikes"),
    *("training.allow_tf32", "training.allow_reduced_precision_reduction"),
)

# Dropout and the balance of experts may change, and initial weights are not drawn again. If
# positions are learned, their number is part of a shape; if they are rotary, it is only a limit.
_FREE_MODEL_KEYS = {
    "preset",
    "embedding_dropout",
    "attention_dropout",
    "residual_dropout",
    "initializer_range",
    "max_position_embeddings",
    "router_aux_loss_coef",
}


def model_changes(saved: RunState, run: Run) -> list[str]:
    """The differences between this run's model and the saved one, a sentence for each.

    Shapes are not enough: 4 heads of size 8 have the same matrices as 8 heads of size 4.
    """
    # Parsed, so fields that did not exist in the saved version have their defaults.
    parsed = ModelConfig.model_validate(saved.config["model"])
    before, now = (dict(leaves(m.model_dump(mode="json"))) for m in (parsed, run.config.model))
    if now["router_bias_rate"]:  # another rate keeps the bias; with rate 0 it would be lost
        now["router_bias_rate"] = before["router_bias_rate"]
    return [
        f"model.{name} was {before.get(name)} and is {now.get(name)}; set it back, or start a new "
        "run"
        for name in sorted(before.keys() | now.keys())
        if name not in _FREE_MODEL_KEYS and before.get(name) != now.get(name)
    ]


def config_changes(saved: RunState, run: Run) -> list[str]:
    """The changes of the configuration for the console, as "key: before -> now".

    For an imported model, only the model section is compared, because it has no other.
    """
    before = dict(leaves(saved.config))
    compared = saved.config if saved.imported_from is not None else run.as_json()
    now = dict(leaves({key: value for key, value in run.as_json().items() if key in compared}))
    return [
        f"{key}: {_text(old, key)} -> {_text(new, key)}"
        for name in sorted(before.keys() | now.keys())
        if not name.startswith(_FOLLOWING_KEYS) and before.get(name) != now.get(name)
        if name != "training.steps" or "training.tokens" not in now  # otherwise it is computed
        for old, new in [(_elements(before, name), _elements(now, name))]
        for key in dict.fromkeys([*old, *new])
        if _text(old, key) != _text(new, key)
    ]


def training_changes(saved: RunState, run: Run) -> list[str]:
    """The changes of the configuration that change the trained weights by more than rounding.

    Changes of layout, ZeRO, reports and saves are not included.
    """
    return [
        change
        for change in config_changes(saved, run)
        if change.startswith(_TRAINING_KEYS) and not change.startswith("model.preset")
    ]


def rate_change(saved: RunState, run: Run) -> str | None:
    """A warning with both rates of the next step and the settings that keep the saved schedule.

    Returns None if the rates are equal, or if the checkpoint was imported.
    """
    if saved.imported_from is not None:
        return None
    try:
        before = _Schedule.model_validate(
            {name: saved.config[name] for name in _Schedule.model_fields if name in saved.config}
        )
    except ValidationError:  # saved by a version whose schedules this version cannot read
        return None
    now = _Schedule(optimizer=run.config.optimizer, scheduler=run.config.scheduler)
    taken, end = saved.progress.steps_taken, saved.progress.last_step(saved.config)

    def rates(step: int) -> list[tuple[float, float]]:
        """Return the saved and the present rates, of matrices of blocks and of the rest."""
        due = learning_rate(before.optimizer, before.scheduler, step=step, steps=end)
        rate = learning_rate(now.optimizer, now.scheduler, step=step, steps=run.steps)
        old, new = before.optimizer.params, now.optimizer.params
        both = zip(old.rates, new.rates, strict=True)
        return [(due * a / old.lr, rate * b / new.lr) for a, b in both]

    def differing(step: int) -> list[tuple[float, float]]:
        return [pair for pair in rates(step) if not math.isclose(*pair)]

    # If the decay of wsd starts here, the next rate differs, but it does not jump.
    decays = now.scheduler is not None and now.scheduler.type == "wsd" and taken > 0
    if not differing(taken) or (decays and not differing(taken - 1)):
        return None
    if dropped_state(saved, run) is not None:
        return None  # rates of two optimizers cannot be compared
    due, rate = differing(taken)[0]
    return (
        f"the learning rate of step {saved.progress.step + 1} is {rate:.3e}, but the saved "
        f"schedule has {due:.3e}; {_rate_mend(before, now, run, end)}"
    )


def data_changes(saved: DataIdentity, own: DataIdentity) -> list[str]:
    """The differences between this run's data and the saved run's, a sentence for each."""
    before, now = saved.model_dump(), own.model_dump()
    return [
        f"{described} was {_short(before[name])} and is {_short(now[name])}; set it back, or "
        "resume with --allow-data-change"
        for name, described in _DATA_KEYS.items()
        if before[name] != now[name]
    ]


def dropped_state(saved: RunState, run: Run) -> str | None:
    """The optimizer state in a checkpoint that this run does not load, for messages; None if it
    loads all.
    """
    now = run.config.optimizer.type
    dropped = [
        unused
        for parameter in parameters_of(run.config.model).values()
        if (unused := set(kinds_of(parameter, saved.optimizer)) - set(kinds_of(parameter, now)))
    ]
    return f"{' and '.join(sorted(dropped[0]))} of {len(dropped)} matrices" if dropped else None


def optimizer_changes(saved: RunState, run: Run) -> list[str]:
    """A sentence if a change of the optimizer would drop state in the checkpoint."""
    dropped, now = dropped_state(saved, run), run.config.optimizer.type
    sentence = (
        f"optimizer.type was {saved.optimizer} and is {now}, which would drop {dropped}; set it "
        "back, or resume with --allow-optimizer-change"
    )
    return [] if dropped is None else [sentence]


def resumed_progress(saved: RunState, own: DataIdentity) -> Progress:
    """The counters at which training continues in this run's data.

    If the sequence length has changed, the number of samples changes so that the number of tokens
    stays the same.
    """
    progress = saved.progress
    if saved.data is None or saved.data.sequence_length == own.sequence_length:
        return progress
    samples = math.ceil(progress.samples * saved.data.sequence_length / own.sequence_length)
    return progress.model_copy(update={"samples": samples})


def _elements(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The value of a key; for a list, such as the sources of a mixture, its elements by key."""
    if not isinstance(values.get(name), list):
        return {name: values[name]} if name in values else {}
    return dict(leaves({f"{name}[{i}]": value for i, value in enumerate(values[name])}))


def _text(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "none"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else f"{text[:16]}..."


class _Schedule(Section):
    """The sections of a configuration that determine the learning rate."""

    optimizer: OptimizerConfig
    scheduler: SchedulerConfig | None = None


def _rate_mend(before: _Schedule, now: _Schedule, run: Run, end: int) -> str:
    """The end of the warning: how to keep the saved learning rates with ``--set``."""
    params = before.optimizer.params.model_dump()
    names = ("lr", "muon_lr", "adam_lr")
    words = [f"optimizer.params.{name}={params[name]}" for name in names if name in params]
    if run.config.training.lr_scaling != "none":  # the saved rates are scaled already
        words = ["training.lr_scaling=none", "training.base_batch_size=null", *words]
    words += ["scheduler=null"] if now.scheduler else []  # otherwise its keys would be kept, too
    if before.scheduler is not None:
        saved = before.scheduler.model_dump(mode="json", exclude_none=True)
        if end != run.steps and "total_num_steps" in type(before.scheduler.params).model_fields:
            saved["params"].setdefault("total_num_steps", end)
        words.append(shlex.quote(f"scheduler={json.dumps(saved)}"))
    return f"to keep the saved schedule, pass --set {' '.join(words)}"
