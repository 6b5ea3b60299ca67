"""The one error of bad data: what is wrong, in numbers, and how to mend it."""

from __future__ import annotations

from megaspeed.config.errors import MOST_LISTED, shortened


class DataError(ValueError):
    """The corpus, the tokenizer or the token files cannot be trained on.

    Attributes:
        problems: one sentence a problem; each states the law, the numbers and the mend.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: tuple[str, ...] = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        numbers = (f"{i}. {problem}" for i, problem in enumerate(self.problems, start=1))
        return "\n".join(shortened(numbers, MOST_LISTED))
