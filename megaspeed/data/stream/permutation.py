"""A pseudo-random permutation of [0, n) computed one value at a time, in constant memory.

    i = left . right  (two halves of w bits, 4^w >= n)
    8 times:  left, right = right, left XOR F_key(right)
    until the result is below n, again

A Feistel network is a bijection whatever its round function, and four rounds of a random one are
already indistinguishable from a random permutation (Luby and Rackoff, "How to construct
pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17(2), 1988). Walking the
cycle until it is back in [0, n) restricts it to any n (Black and Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002); 4^w < 4n, so this takes less than four rounds on average.

Nothing is shuffled or stored: position 10^12 of an epoch costs as much as position 0, which is
what makes resuming O(1). Only integer arithmetic, so every platform gives the same order.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """The permutation of [0, `size`) that the bytes `key` select; calling it maps one index."""

    size: int
    half_bits: int
    round_keys: tuple[int, ...]

    @classmethod
    def keyed(cls, size: int, key: bytes) -> Permutation:
        """Any size of at least 1; keys that differ in one bit give unrelated permutations."""
        assert size >= 1, size
        half_bits = ((size - 1).bit_length() + 1) // 2
        digest = hashlib.sha512(key).digest()
        return cls(size, half_bits, struct.unpack(f"<{_ROUNDS}Q", digest))

    def __call__(self, index: int) -> int:
        assert 0 <= index < self.size, (index, self.size)
        index = self._feistel(index)
        while index >= self.size:
            index = self._feistel(index)
        return index

    def _feistel(self, index: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = index >> self.half_bits, index & mask
        for key in self.round_keys:
            left, right = right, left ^ (mix_64(right ^ key) & mask)
        return (left << self.half_bits) | right


def mix_64(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): 64 bits to 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
