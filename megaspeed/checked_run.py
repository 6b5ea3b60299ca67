"""Load the configuration of a run, and find the problems with its data without reading the corpus.

All mistakes are listed at once: those of the JSON, and of the files that its data section names.
"""

import logging
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from threading import Thread

from megaspeed.config.document import read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document, load_run
from megaspeed.config.resolve import Run
from megaspeed.config.run import DataConfig, RunConfig, TrainingConfig
from megaspeed.data.errors import DataError
from megaspeed.data.prompts import read_prompts
from megaspeed.data.selection import find_problems
from megaspeed.data.tokenizer import TRAIN
from megaspeed.files.paths import expand_home

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 2.5
"""A glob over a large tree may take hours."""


def load_checked_run(path: str | PathLike[str], overrides: Sequence[str], world: World) -> Run:
    """Load as ``load_run``. If the configuration has mistakes, list problems with its data, too.

    Raises ConfigError with all problems.
    """
    try:
        return load_run(path, overrides, world)
    except ConfigError as error:
        correct = check_document(read_document(Path(path), overrides), world).correct
        others = find_data_problems(correct)
        raise ConfigError([*error.problems, *others], error.where) from error


def find_data_problems(correct: RunConfig) -> list[str]:
    """Find problems with the data of a configuration, even if its other sections have mistakes.

    Find nothing if the ``data`` section itself has mistakes. After 2.5 seconds, return the problems
    found so far, and log a warning.

    Args:
        correct: the config, without keys that are wrong.
    """
    data, model, training = (vars(correct).get(name) for name in ("data", "model", "training"))
    if data is None or vars(data).keys() != DataConfig.model_fields.keys():
        return []
    # No tokenizer exceeds the size that stands for one which is not known.
    vocab_size = getattr(model, "vocab_size", sys.maxsize)
    problems: list[str] = []

    def find() -> None:
        try:
            problems.extend(find_problems(data, vocab_size))
            if training is None or vars(training).keys() != TrainingConfig.model_fields.keys():
                return
            if data.tokenizer != TRAIN:
                read_prompts(training, expand_home(data.tokenizer), data.sequence_length)
        except DataError as error:
            problems.extend(problem for problem in error.problems if problem not in problems)
        except OSError as error:  # would end only this thread
            path, why = error.filename or "a file", error.strerror or error
            problems.append(f"data: {path} cannot be read: {why}; name what this user may read")

    search = Thread(target=find, daemon=True)
    search.start()
    search.join(_LONGEST_SECONDS)
    if search.is_alive():
        logger.warning(
            "data: after %g s, some files are not examined yet, because they are many or slow to "
            "find; a run examines all of them when it starts",
            _LONGEST_SECONDS,
        )
    return problems
