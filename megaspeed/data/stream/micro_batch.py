"""Rows of tokens become the micro-batch that the pipeline stages are fed with."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megaspeed.model.micro_batch import NOT_COUNTED, PADDING_SAMPLE, MicroBatch


def read_micro_batch(
    rows: Sequence[NDArray[np.integer]],
    samples: Sequence[int],
    *,
    micro_batch_size: int,
    sequence_length: int,
    end_of_text: int | None = None,
) -> MicroBatch:
    """The rows of S + 1 tokens, padded with uncounted rows up to `micro_batch_size`.

    The first S tokens of a row are its inputs, its last S the targets.

    With `end_of_text`, the id that stands after each document, attention and positions are to begin
    anew with every document. The end-of-text token after one opens the next: so each token is
    predicted from its own document alone, and a document's first one from end-of-text alone.
    """
    padding = micro_batch_size - len(rows)
    both = torch.zeros(micro_batch_size, sequence_length + 1, dtype=torch.int64)
    for number, row in enumerate(rows):
        both[number] = torch.from_numpy(row.astype(np.int64))
    targets = both[:, 1:].contiguous()
    targets[len(rows) :] = NOT_COUNTED
    tokens = both[:, :-1].contiguous()
    documents = None
    if end_of_text is not None:
        documents = (tokens == end_of_text).cumsum(dim=1, dtype=torch.int32)
    return MicroBatch(
        tokens=tokens,
        targets=targets,
        samples=torch.tensor([*samples, *[PADDING_SAMPLE] * padding], dtype=torch.int64),
        documents=documents,
    )
