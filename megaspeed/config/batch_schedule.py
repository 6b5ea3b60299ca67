"""The batch of each step, if it changes during a run (``train_batch_size_schedule``).

    "0:512 20B:1024 80B:2048"    512 samples a step; 1,024 when 20B tokens are trained, ...
    "0:512 1000:1024"            512 samples in steps 1 to 1,000, then 1,024

The batch is a function of the steps taken and of the tokens trained so far, so a run that resumes
within a phase needs no other state. A run with one batch has a schedule of one phase.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from megaspeed.config.section import LARGEST_BATCH, TokenCount

_TOKENS: TypeAdapter[int] = TypeAdapter(TokenCount)


class Phase(NamedTuple):
    """A part of a schedule."""

    start: int  # the number of steps, or of tokens, after which it begins
    batch: int  # samples of each step


class Stretch(NamedTuple):
    """Equal steps of a run, one after the other."""

    step: int  # steps before them
    tokens: int  # tokens before them
    steps: int
    batch: int  # samples of each step


@dataclass(frozen=True)
class BatchSchedule:
    """The phases, in order. The first one starts at 0."""

    phases: tuple[Phase, ...]
    counts_tokens: bool  # whether ``start`` counts tokens, and not steps

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, schedule: str | None, batch: int | None) -> "BatchSchedule":
        """Read a schedule; without one, every step has ``batch`` samples.

        Raises ValueError with what is wanted instead.
        """
        if schedule is None:
            assert batch is not None, "the batch or its schedule is stated"
            return cls((Phase(0, batch),), counts_tokens=False)
        words = schedule.replace(",", " ").split()
        found = [re.fullmatch("([^:]{1,40}):([0-9]{1,9})", word) for word in words]
        if not found or None in found:
            raise ValueError('pairs of start and batch, such as "0:512 20B:1024 80B:2048"')
        pairs = [match.groups() for match in found if match is not None]
        units = {not start.isdecimal() for start, _ in pairs if start != "0"}
        if len(units) > 1:
            raise ValueError('starts that are all tokens ("20B") or all steps ("1000")')
        phases = tuple(Phase(_start(start), int(batch)) for start, batch in pairs)
        starts, batches = zip(*phases, strict=True)
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError("starts that begin with 0 and become larger")
        if not all(0 < batch <= LARGEST_BATCH for batch in batches):
            raise ValueError(f"batches from 1 to {LARGEST_BATCH:,}")
        return cls(phases, counts_tokens=True in units)

    @property
    def batches(self) -> list[int]:
        """The different batches, the smallest first."""
        return sorted({phase.batch for phase in self.phases})

    def batch(self, step: int, tokens: int) -> int:
        """Return the samples of the step after ``step`` steps and ``tokens`` tokens."""
        return self.phases[self._phase(step, tokens)].batch

    def stretches(
        self,
        length: int,
        *,
        step: int = 0,
        tokens: int = 0,
        last_step: int | None = None,
        all_tokens: int | None = None,
    ) -> Iterator[Stretch]:
        """Yield the rest of a run, after ``step`` steps and ``tokens`` tokens.

        It ends after ``last_step``, or with the step that reaches ``all_tokens``.

        >>> list(BatchSchedule.of("0:2 3:4", None).stretches(length=10, last_step=5))
        [Stretch(step=0, tokens=0, steps=3, batch=2), Stretch(step=3, tokens=60, steps=2, batch=4)]
        """
        while True:
            phase = self._phase(step, tokens)
            following, batch = self.phases[phase + 1 : phase + 2], self.phases[phase].batch
            ends = [] if last_step is None else [last_step - step]
            limits = [] if all_tokens is None else [all_tokens]
            if self.counts_tokens:
                limits += [next_phase.start for next_phase in following]
            else:
                ends += [next_phase.start - step for next_phase in following]
            ends += [-(-(limit - tokens) // (batch * length)) for limit in limits]
            steps = min(ends)
            if steps <= 0:
                return
            yield Stretch(step, tokens, steps, batch)
            step, tokens = step + steps, tokens + steps * batch * length

    def first_steps(self, length: int, steps: int) -> Iterator[tuple[int, int]]:
        """Yield the samples before each of the first steps of a run, and those of the step."""
        for stretch in self.stretches(length, last_step=steps):
            first = stretch.tokens // length
            for start in range(first, first + stretch.steps * stretch.batch, stretch.batch):
                yield start, stretch.batch

    def _phase(self, step: int, tokens: int) -> int:
        reached = tokens if self.counts_tokens else step
        return sum(phase.start <= reached for phase in self.phases) - 1


def _start(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else _TOKENS.validate_python(text)
    except ValidationError as error:
        raise ValueError('starts that are steps ("1000"), or tokens such as "20B"') from error
