"""Documents packed into one row: where each token stands in its own, and which tokens it sees.

With "." for end-of-text, which opens the document that follows it, the row

    tokens       b  c  .  d  e  f  .  g
    documents    0  0  1  1  1  1  2  2
    positions    0  1  0  1  2  3  0  1

is attended to in one triangle for each document instead of one for the row:

    b   x
    c   x  x
    .         x
    d         x  x
    e         x  x  x
    f         x  x  x  x
    .                     x
    g                     x  x

So each token's prediction is what it would be if its document, or the part of it that is in the
row, stood there alone.
"""

from functools import lru_cache

import torch
from torch import Tensor


def positions_in(documents: Tensor) -> Tensor:
    """How many tokens of its own document stand before each token in its row.

    Args:
        documents: (B, S), the number of each token's document; equal ones are neighbours.

    Returns:
        (B, S) int64.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def attention_mask(documents: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """What is added to the attention scores: 0 where a query sees a key, -inf where it does not.

    Made in the scores' dtype, once for all blocks: of a boolean mask every block would make, and
    keep for its backward, such a one for itself.

    Args:
        documents: (B, S), the number of each token's document.
        dtype: of queries and keys.
        window: how many tokens a query sees, itself included; None for all earlier ones.

    Returns:
        (B, 1, S, S), the same for all heads; dim 2 is the query's, dim 3 the key's place.
    """
    seen = documents.unsqueeze(2) == documents.unsqueeze(1)  # (B, S, S)
    seen.tril_()  # and not later
    if window is not None:
        seen.triu_(1 - window)
    return _added(seen, dtype).unsqueeze(1)


@lru_cache(maxsize=1)
def window_mask(sequence: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for one document a row: (S, S), made once and kept for all blocks and steps."""
    # A later step saves the mask for backward. An inference tensor cannot be saved.
    with torch.inference_mode(False):
        seen = torch.ones(sequence, sequence, dtype=torch.bool, device=device)
        return _added(seen.tril_().triu_(1 - window), dtype)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.full(seen.shape, float("-inf"), dtype=dtype, device=seen.device)
    return mask.masked_fill_(seen, 0.0)
