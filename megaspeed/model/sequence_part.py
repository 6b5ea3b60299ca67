"""The tokens of each sequence that one rank of the context axis holds.

    ulysses       part 0 | part 1 | part 2 | part 3        one run of tokens on each rank
    all_gather    0 | 1 | 2 | 3 | 3 | 2 | 1 | 0            one from each half

With ``ulysses``, attention has all tokens of some heads, so any parts would do. With
``all_gather``, it has all heads of the rank's own tokens. A later token attends to more tokens, so
each rank has an early and a late run. Then all ranks attend to equally many tokens ("The Llama 3
herd of models", 2024, section 3.3.2).
"""

from dataclasses import dataclass

from megaspeed.config.model import ContextMethod


@dataclass(frozen=True)
class SequencePart:
    """Part ``rank`` of ``size`` of each sequence. By default, this is the complete sequence."""

    method: ContextMethod = "ulysses"
    rank: int = 0
    size: int = 1

    @property
    def attention(self) -> "SequencePart":
        """The tokens whose queries the rank has in its attention."""
        return self if self.method == "all_gather" else WHOLE

    def ranges(self, sequence: int) -> tuple[range, ...]:
        """The places of the rank's tokens in a sequence of ``sequence`` tokens, in order."""
        if self.size == 1 or self.method == "ulysses":
            length = sequence // self.size
            return (range(self.rank * length, (self.rank + 1) * length),)
        length, tail = sequence // (2 * self.size), 2 * self.size - 1 - self.rank
        head = range(self.rank * length, (self.rank + 1) * length)
        return head, range(tail * length, (tail + 1) * length)


WHOLE = SequencePart()
