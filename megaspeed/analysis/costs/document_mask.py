"""Where attention begins anew with every document: what a pipeline stage makes for all its blocks.

    positions   (B, S)         8 bytes each
    mask        (B, 1, S, S)   in the model's precision, the same for all heads

Every rank makes both from its own micro-batch (``model/documents.py``), complete on every tensor
rank, and keeps them until the backward of its first block is done.

If each row is one document and the sliding window is shorter than the row, all micro-batches and
steps share one mask (S, S).
"""

from dataclasses import replace

from megaspeed.analysis.costs.layer_memory import LayerMemory, Shapes, block_memory
from megaspeed.config.resolve import Run

_INT64 = 8


def first_block_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """The first block of a pipeline stage, with the mask and the positions if there are any."""
    block = block_memory(run, shapes)
    if not run.config.data.reset_at_documents:
        return block
    sequence = run.config.data.sequence_length
    pairs = shapes.whole_tokens * sequence
    made = pairs * shapes.element_bytes + shapes.whole_tokens * _INT64
    return replace(
        block,
        kept=block.kept + made,
        # Which pairs are of one document, a byte each, while nothing of the block is there yet.
        forward_working=max(block.forward_working, pairs - block.kept),
    )


def window_mask_bytes(run: Run, shapes: Shapes) -> int:
    """The mask of the sliding window that all blocks, micro-batches and steps share."""
    sequence, window = run.config.data.sequence_length, run.config.model.sliding_window
    if run.config.data.reset_at_documents or window is None or window >= sequence:
        return 0
    return sequence**2 * shapes.element_bytes
