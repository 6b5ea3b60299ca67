"""The order of the training stream: which tokens sample i is.

    n         = number of whole sequences in the token file, (tokens - 1) // S
    epoch     = i // n
    sequence  = permutation_{seed, fingerprint, epoch}(i % n)
    sample i  = tokens[sequence * S : sequence * S + S + 1]

i counts the samples consumed since the first step. Nothing else enters: not the data degree, the
micro-batch, the accumulation or the number of steps. So every layout trains on the same samples
in the same order, and a run resumes at any i without replaying what came before.

The last token of a sequence is the first of the next: in one epoch every token but the first is
predicted exactly once (but for a rest shorter than S at the end of the file).
"""

from __future__ import annotations

from dataclasses import dataclass

from megaspeed.data.permutation import Permutation


def count_sequences(tokens: int, sequence_length: int) -> int:
    """Whole sequences of `sequence_length` inputs, each with its target, among `tokens`."""
    return max(0, (tokens - 1) // sequence_length)


@dataclass(frozen=True)
class Sampler:
    """Sample index -> sequence index.

    Attributes:
        seed: `data.seed`.
        fingerprint: of the training documents.
        sequences: n above, at least 1.
    """

    seed: int
    fingerprint: str
    sequences: int

    def __post_init__(self) -> None:
        assert self.sequences >= 1, self.sequences

    def sequence_of(self, sample: int) -> int:
        """The sequence, in [0, sequences), that sample `sample` >= 0 of the stream is."""
        epoch, position = divmod(sample, self.sequences)
        key = f"{self.seed}:{self.fingerprint}:{epoch}".encode()
        return Permutation.keyed(self.sequences, key)(position)
