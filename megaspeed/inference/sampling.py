"""The next token: a draw from what the model makes likely.

    logits --k largest--> divided by the temperature --softmax--> probabilities --draw--> id

Temperature below 1 prefers what is likely already; at 0 the likeliest id is taken, always.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest.
        top_k: how many of the likeliest are drawn from (Fan et al. 2018, section 5.3); 0 for all.
        max_tokens: where a continuation ends at the latest.
        seed: of all draws.
    """

    temperature: float = 0.8
    top_k: int = 50
    max_tokens: int = 100
    seed: int = 0

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """An id, of logits (V,) on the CPU."""
        if self.temperature == 0:
            return int(logits.argmax())
        candidates = len(logits) if self.top_k == 0 else min(self.top_k, len(logits))
        scores, ids = logits.double().topk(candidates)
        # The largest is 0, so that no temperature, however small, overflows.
        probabilities = ((scores - scores[0]) / self.temperature).softmax(dim=0)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])

    def generator(self, prompt: str, number: int) -> torch.Generator:
        """The random numbers of one sample: a function of seed, prompt and the sample's number."""
        digest = hashlib.sha256(f"sample/{self.seed}/{number}/{prompt}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
