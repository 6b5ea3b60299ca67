"""Load the configuration of a run, and find the problems with its data without reading the corpus.

All mistakes are listed at once: those of the JSON, and of the files that its data section names.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspeed.config.data import DataConfig
from megaspeed.config.document import read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.data.selection import find_problems
from megaspeed.files.reading import at_most

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 2.5
"""A glob over a large tree may take hours."""


def load_checked_run(path: str | PathLike[str], overrides: Sequence[str], world: World) -> Run:
    """Load as ``load_run``. If the configuration has mistakes, list problems with its data, too.

    Raises:
        ConfigError: with all problems.
    """
    try:
        return load_run(path, overrides, world)
    except ConfigError as error:
        others = find_data_problems(path, overrides)
        raise ConfigError([*error.problems, *others], error.where) from error


def find_data_problems(path: str | PathLike[str], overrides: Sequence[str] = ()) -> list[str]:
    """Find problems with the data of a configuration, even if its other sections have mistakes.

    Find nothing if the ``data`` section itself has mistakes. After 2.5 seconds, return the problems
    found so far, and log a warning.

    Args:
        path: the config file.
        overrides: ``key.path=value`` texts.
    """
    values = read_document(Path(path), overrides).values
    try:
        data = DataConfig.model_validate(values.get("data"))
    except ValidationError:
        return []
    problems: list[str] = []
    is_complete = False
    with at_most(_LONGEST_SECONDS):
        problems.extend(find_problems(data, _vocab_size(values)))
        is_complete = True
    if not is_complete:
        logger.warning(
            "data: after %g s, some files are not examined yet, because they are many or slow to "
            "find; a run examines all of them when it starts",
            _LONGEST_SECONDS,
        )
    return problems


def _vocab_size(values: Mapping[str, Any]) -> int:
    """Return ``model.vocab_size``; a number that no tokenizer exceeds if the model has mistakes."""
    filled = fill_from_hugging_face(values)
    if filled.problems:
        return sys.maxsize
    try:
        return ModelConfig.model_validate(filled.values.get("model")).vocab_size
    except ValidationError:
        return sys.maxsize
