"""A corpus that is ready to train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.errors import DataError
from megaspeed.data.sampler import count_sequences
from megaspeed.data.tokens import TokenFile


@dataclass(frozen=True)
class PreparedCorpus:
    """Everything training needs to know of its data; small, and can be sent between processes.

    Attributes:
        train: tokens of the training documents.
        validation: tokens of the validation documents; None where nothing is held out.
        tokenizer: a tokenizer.json in the cache.
        sequence_length: S, tokens.
        seed: `data.seed`.
    """

    train: TokenFile
    validation: TokenFile | None
    tokenizer: Path
    sequence_length: int
    seed: int

    @property
    def fingerprint(self) -> str:
        """Of the training documents: the one in "sample i = f(seed, fingerprint, i)"."""
        return self.train.index.corpus_fingerprint

    @property
    def training_sequences(self) -> int:
        """Sequences of one epoch."""
        return count_sequences(self.train.index.tokens, self.sequence_length)

    @property
    def validation_sequences(self) -> int:
        """Sequences held out; 0 where nothing is."""
        if self.validation is None:
            return 0
        return count_sequences(self.validation.index.tokens, self.sequence_length)

    def check(self, vocab_size: int) -> None:
        """Raises DataError if an id is beyond the model's vocabulary or a side has no sequence."""
        problems: list[str] = []
        sides = [("data.train", self.train, "")]
        if self.validation is not None:
            sides.append(("data.validation", self.validation, "raise data.validation_fraction, "))
        for setting, file, mend in sides:
            try:
                file.check_vocabulary(vocab_size)
            except DataError as error:
                problems.extend(error.problems)
            if count_sequences(file.index.tokens, self.sequence_length) == 0:
                problems.append(
                    f"{setting} must fill at least one sequence of data.sequence_length + 1 = "
                    f"{self.sequence_length + 1} tokens, and has {file.index.tokens} tokens in "
                    f"{file.index.documents} documents; add text, {mend}"
                    "or shorten data.sequence_length"
                )
        if problems:
            raise DataError(*problems)
