"""A resumed run keeps the rule by which its validation data was held out.

With another rule, it would train on different text, and resuming would be refused. The corpus is
prepared before the ranks communicate, so each rank reads the rule from the newest checkpoint.
"""

from dataclasses import replace
from typing import Any

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import locate
from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.resolve import Run
from megaspeed.training.restarts import restart_number
from megaspeed.training.resume import AUTO, ResumeOptions
from megaspeed.training.resumed_run import saved_config
from megaspeed.training.run_folder import checkpoint_folder

RULE = "hold_out_by"


def keep_split(options: ResumeOptions, run: Run) -> tuple[Run, str | None]:
    """The run with the rule that its checkpoint was trained by, unless the JSON states one.

    Returns:
        The run, and a line for the console if the rule is not that of a new run.
    """
    data = run.config.data
    rule = None if RULE in data.model_fields_set else _saved_rule(options, run)
    if rule in (None, data.hold_out_by):
        return run, None
    kept = data.model_copy(update={RULE: rule})
    run = replace(run, config=run.config.model_copy(update={"data": kept}))
    if data.validation is not None or data.validation_fraction == 0:
        return run, None
    return run, f'validation data is held out as in the saved run (data.{RULE} "{rule}")'


def _saved_rule(options: ResumeOptions, run: Run) -> Any:
    own = checkpoint_folder(run).newest_first()
    if options.path is not None:
        # A restart continues from its own checkpoints. Then DIR may have been pruned or moved.
        gone = restart_number() > 0 and not options.path.exists()
        candidates = own if gone and own else locate(options.path)
    elif options.source == AUTO and not options.fresh:
        candidates = own
    else:
        candidates = []
    for checkpoint in candidates:
        try:
            saved = RunState.read(checkpoint)
        except CheckpointError:  # reported later, with the reason
            continue
        return saved_config(saved).get("data", {}).get(RULE)
    return None
