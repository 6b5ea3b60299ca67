"""Encodes ``training.sample_prompts``, and refuses those that are too long."""

from pathlib import Path

from megaspeed.config.run import TrainingConfig
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer

Prompts = tuple[TextTokenizer, list[list[int]]]
"""The run's tokenizer, and the ids of each prompt."""


def read_prompts(
    training: TrainingConfig, tokenizer: Path | str | None, sequence_length: int
) -> Prompts | None:
    """Encode the prompts; None if there are none. ``tokenizer`` is the path of the run's tokenizer.

    Raises DataError if there is no tokenizer, or a prompt and its continuation do not fit.
    """
    prompts, more = training.sample_prompts, training.sample_tokens
    if not prompts:
        return None
    if tokenizer is None:
        raise DataError(
            "training.sample_prompts are texts, but the data are token ids without a tokenizer; "
            "name it in data.tokenizer, or remove training.sample_prompts"
        )
    loaded = load_tokenizer(str(tokenizer))
    rows = [[loaded.end_of_text, *ids] for ids in loaded.encode(prompts)]
    raise_any(
        f"training.sample_prompts[{number}] has {len(row)} tokens with the end-of-text before it. "
        f"{len(row)} + training.sample_tokens {more} must be at most data.sequence_length "
        f"{sequence_length}; shorten the prompt, or lower training.sample_tokens"
        for number, row in enumerate(rows)
        if len(row) + more > sequence_length
    )
    return loaded, rows
