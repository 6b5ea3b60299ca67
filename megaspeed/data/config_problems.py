"""What is wrong with the files that a configuration names, even where its other keys are wrong."""

import logging
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspeed.config.data import DataConfig
from megaspeed.config.document import read_document
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.model import ModelConfig
from megaspeed.data.selection import each_problem
from megaspeed.files.time_limit import at_most

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 2.5
"""A glob over a large tree, or over links in a circle, may take hours."""


def find_problems_in_file(path: str | PathLike[str], overrides: Sequence[str] = ()) -> list[str]:
    """Every problem with the corpus and the tokenizer that shows without reading the corpus.

    So that they are told together with the problems of the JSON, only its `data` and `model` are
    looked at; nothing is found where `data` cannot be understood. After 2.5 seconds, those
    found so far are returned, and a warning is logged.

    Args:
        path: the config file.
        overrides: `key.path=value` texts.
    """
    values = read_document(Path(path), overrides).values
    try:
        data = DataConfig.model_validate(values.get("data"))
    except ValidationError:
        return []
    problems: list[str] = []
    is_complete = False
    with at_most(_LONGEST_SECONDS):
        problems.extend(each_problem(data, _vocab_size(values)))
        is_complete = True
    if not is_complete:
        logger.warning(
            "data: the files were examined for %g s, and not completely, because they are many or "
            "slow to find; a run examines all of them when it starts",
            _LONGEST_SECONDS,
        )
    return problems


def _vocab_size(values: Mapping[str, Any]) -> int:
    """`model.vocab_size`, or, where the model is wrong, a number that no tokenizer exceeds."""
    filled = fill_from_hugging_face(values)
    if filled.problems:
        return sys.maxsize
    try:
        return ModelConfig.model_validate(filled.values.get("model")).vocab_size
    except ValidationError:
        return sys.maxsize
