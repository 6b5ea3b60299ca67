"""The error of bad data."""

from __future__ import annotations

from megaspeed.config.errors import MOST_LISTED, shortened


class DataError(ValueError):
    """The corpus, the tokenizer or the token files cannot be trained on.

    Attributes:
        problems: each states the rule, the numbers and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: tuple[str, ...] = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        numbers = (f"{i}. {problem}" for i, problem in enumerate(self.problems, start=1))
        return "\n".join(shortened(numbers, MOST_LISTED))
