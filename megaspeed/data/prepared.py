"""A corpus that is ready to train on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.errors import DataError
from megaspeed.data.stream.mixture import Component, Mixture
from megaspeed.data.tokens.token_file import TokenFile


@dataclass(frozen=True)
class PreparedCorpus:
    """Everything training needs to know of its data; small, and can be sent between processes.

    Attributes:
        train: what the training samples are drawn from.
        validation: what is held out; None where nothing is.
        tokenizer: a folder with tokenizer.json and tokenizer_config.json in the cache; None where
            only foreign token files are trained on and no tokenizer is named.
        sequence_length: S, tokens.
        seed: `data.seed`.
        reset_at_documents: whether attention and positions begin anew with every document.
    """

    train: Mixture
    validation: Mixture | None
    tokenizer: Path | None
    sequence_length: int
    seed: int
    reset_at_documents: bool = False

    @property
    def fingerprint(self) -> str:
        """Of the training data: the one in "sample i = f(seed, fingerprint, i)"."""
        return self.train.fingerprint

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Of the tokenizer that the ids are of; None where no file says."""
        stated = (file.index.tokenizer_fingerprint for file in self._files())
        return next((fingerprint for fingerprint in stated if fingerprint is not None), None)

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document; None where no file says."""
        stated = (file.index.end_of_text for file in self._files())
        return next((end_of_text for end_of_text in stated if end_of_text is not None), None)

    @property
    def training_sequences(self) -> int:
        """Sequences of the training data, each counted once."""
        return self.train.sequences(self.sequence_length)

    @property
    def validation_sequences(self) -> int:
        """Sequences held out, each counted once; 0 where nothing is."""
        return 0 if self.validation is None else self.validation.sequences(self.sequence_length)

    def check(self, vocab_size: int) -> None:
        """Raises DataError with everything that keeps the corpus from being trained on.

        An id beyond the model's vocabulary, a component without a sequence, files of different
        tokenizers, and, where attention is to begin anew with every document, a file that does not
        say how documents end.
        """
        problems: list[str] = []
        told: set[Path] = set()
        for file in self._files():
            try:
                if file.path not in told:
                    file.check_vocabulary(vocab_size)
            except DataError as error:
                told.add(file.path)
                problems.extend(error.problems)
        problems.extend(self._short_components("data.train", self.train, ""))
        if self.validation is not None:
            mend = "raise data.validation_fraction, "
            problems.extend(self._short_components("data.validation", self.validation, mend))
        problems.extend(self._other_tokenizers())
        if self.reset_at_documents:
            problems.extend(self._other_ends())
        if problems:
            # The two stretches of a file that is held out in part have the same problem.
            raise DataError(*dict.fromkeys(problems))

    def _files(self) -> tuple[TokenFile, ...]:
        return self.train.files + (() if self.validation is None else self.validation.files)

    def _short_components(self, setting: str, mixture: Mixture, mend: str) -> Iterator[str]:
        for component in mixture.components:
            if component.sequences(self.sequence_length) == 0:
                source = "" if len(mixture.components) == 1 else f", in its source {component.name}"
                yield (
                    f"{setting} must fill at least one sequence of data.sequence_length + 1 = "
                    f"{self.sequence_length + 1} tokens{source}, and has {_extent(component)}; "
                    f"add text, {mend}or shorten data.sequence_length"
                )

    def _other_tokenizers(self) -> Iterator[str]:
        """Ids of two tokenizers mean two things, and nothing but the loss would tell."""
        first: TokenFile | None = None
        for file in self._files():
            own = file.index.tokenizer_fingerprint
            if own is None:
                continue
            if first is None:
                first = file
            expected = first.index.tokenizer_fingerprint
            assert expected is not None
            if own != expected:
                yield (
                    "all token files must be of one tokenizer, and "
                    f"{first.path} is of {expected[:16]}... while {file.path} is of {own[:16]}...; "
                    "tokenize one of the two again with the other's tokenizer"
                )

    def _other_ends(self) -> Iterator[str]:
        expected = self.end_of_text
        for file in self._files():
            own = file.index.end_of_text
            if own is None:
                yield (
                    "data.reset_at_documents needs to know the token that ends a document, and "
                    f"{file.path} does not say; make it with `megaspeed tokenize`, or set "
                    "data.reset_at_documents to false"
                )
            elif own != expected:
                yield (
                    "data.reset_at_documents needs one token that ends a document, and it is "
                    f"{expected} elsewhere and {own} in {file.path}; tokenize that again, or set "
                    "data.reset_at_documents to false"
                )


def _extent(component: Component) -> str:
    """How much there is of a component that is too short."""
    documents = [file.index.documents for file in component.files]
    counted = sum(count for count in documents if count is not None)
    known = f" in {counted} documents" if None not in documents else ""
    files = f" in {len(component.files)} files" if len(component.files) > 1 else ""
    return f"{component.tokens} tokens{known}{files}"
