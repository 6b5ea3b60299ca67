"""One number for the bits of many tensors, which differs if a bit or the order of elements does.

    elements, in order:    e0 e1 e2 e3 ...           8 bytes of them are one word
    a word w:              m = w + factor (w >> 32)  so the highest bits change many bits, too
    a batch of words:      b = m0 weight0 + m1 weight1 + ...                  modulo 2^64
    all batches:           (...(b0 factor + b1) factor + b2 ...)              modulo 2^64

The weights are odd and look random. So two changes, or two elements that are exchanged, do not
cancel out, except by chance, which is about as probable as guessing 50 bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 22
_WORD_BYTES = 8
_FACTOR = 0x5851F42D4C957F2D
# The multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed integers.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_LOW_BITS = 12  # the other 52 are exact in fp64


def fingerprint(tensors: Sequence[Tensor], elements_at_once: int = _ELEMENTS_AT_ONCE) -> Tensor:
    """The number of the tensors' elements, one tensor after the other.

    It takes a few kernels for each batch of elements, however many tensors there are.

    Args:
        tensors: at least one; flat, of one type and on one device.
        elements_at_once: size of a batch, a multiple of 8; it bounds the memory used.

    Returns:
        A whole number as an fp64 scalar, on the tensors' device.
    """
    total = tensors[0].new_zeros((), dtype=torch.int64)
    weights = total
    for batch in _batches(tensors, elements_at_once):
        padding = -sum(map(len, batch)) % _WORD_BYTES
        words = torch.cat([*batch, batch[0].new_zeros(padding)]).view(torch.int64)
        if not weights.dim():
            weights = _weights(len(words), words.device)
        words.add_(words >> 32, alpha=_FACTOR).mul_(weights[: len(words)])
        total = total * _FACTOR + words.sum()
    return (total >> _LOW_BITS).to(torch.float64)


def _weights(count: int, device: torch.device) -> Tensor:
    """The weights of the first words, the same on every device."""
    weights = torch.arange(1, count + 1, device=device).mul_(_MIX[0])
    for shift, multiplier in ((30, _MIX[1]), (27, _MIX[2])):
        weights.bitwise_xor_(weights >> shift).mul_(multiplier)
    return weights.bitwise_or_(1)


def _batches(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The elements in batches of `size`; the last one may be smaller. Only views."""
    batch: list[Tensor] = []
    room = size
    for tensor in tensors:
        rest = tensor
        while len(rest):
            part, rest = rest[:room], rest[room:]
            batch.append(part)
            room -= len(part)
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch
