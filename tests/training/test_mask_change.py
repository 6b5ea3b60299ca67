"""Version 0.2 draws other dropout masks than 0.1; a run that is affected prints a line."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed import __version__
from megaspeed.checkpoint.run_state import RunState
from megaspeed.training.console import describe_start
from megaspeed.training.resume import Start
from megaspeed.training.resumed_run import mask_changes
from tests.checkpoint.written import CONFIG, run_state
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
DROPPING = {"attention_dropout": 0.1}
LINE = (
    f"dropout masks: of version 0.1.0 -> of version {__version__}, which drops different "
    "elements with the same probabilities"
)


def saved_by(version: str | None, model: dict[str, Any], **changes: Any) -> RunState:
    config = CONFIG.to_json()
    software = {"torch": "2.13.0"} if version is None else {"megaspeed": version}
    config = {**config, "model": {**config["model"], **model}}
    return run_state(100, software=software, config=config, **changes)


def test_a_run_of_version_0_1_with_dropout_reports_that_masks_differ() -> None:
    run = tiny_run(TEXT, model=DROPPING)
    changes = mask_changes(saved_by("0.1.0", DROPPING), run)
    assert changes == [LINE]
    checkpoint = Path("run/checkpoints/step-00000100")
    start = Start(checkpoint=checkpoint, step=100, changes=tuple(changes))
    run = tiny_run(TEXT, model=DROPPING, training={"steps": 200})
    assert describe_start(start, run) == [
        f"resuming from {checkpoint}",
        f"  changed since: {LINE}",
    ]


UNAFFECTED = {
    "saved by this version": (saved_by(__version__, DROPPING), DROPPING),
    "nothing was dropped": (saved_by("0.1.0", {}), DROPPING),
    "nothing is dropped": (saved_by("0.1.0", DROPPING), {}),
    "no version is stated": (saved_by(None, DROPPING), DROPPING),
    "imported weights": (saved_by("0.1.0", DROPPING, imported_from="gpt2"), DROPPING),
}


@pytest.mark.parametrize("name", UNAFFECTED)
def test_other_runs_report_nothing(name: str) -> None:
    saved, model = UNAFFECTED[name]
    assert mask_changes(saved, tiny_run(TEXT, model=model)) == []
