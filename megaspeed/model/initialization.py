"""Initial weights as a function of (seed, full parameter name, full shape).

They are initialised as in GPT-2 (Radford et al. 2019, section 2.3, and the released ``model.py``;
its ``initializer_range`` is 0.02). The table in ``parameters.py`` states the values:

    parameter                                       normal with standard deviation
    matrices, token embedding, head                 initializer_range
    the two projections into the residual stream    initializer_range / sqrt(2 x layers)
    learned positions                               initializer_range / 2
    biases, norm weights                            0 and 1, constant

The rows of a matrix are drawn in blocks of about a million elements. Each block has its own
generator, with a seed from (seed, name, block). So a rank draws only the blocks that overlap its
shard, holds one block at a time beside the shard, and gets the same bits as one process.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import logical_name, parameter_named

BLOCK_ELEMENTS = 1 << 20
"""About how many elements of a matrix are drawn together: complete rows."""


def initial_slice(
    config: ModelConfig,
    seed: int,
    name: str,
    shape: torch.Size,
    *,
    rows: Sequence[range] | None = None,
    columns: range | None = None,
) -> Tensor:
    """A slice of the initial value of a parameter, fp32 on the CPU.

    Args:
        config: the shape of the complete model.
        seed: the seed of the run.
        name: the full name of the parameter; for a tied head, that of the token embedding.
        shape: the full shape of the parameter, without padding.
        rows: ranges of dim 0, which are concatenated in this order; all rows if omitted.
        columns: range of dim 1; all columns if omitted.
    """
    row_ranges = [range(shape[0])] if rows is None else list(rows)
    taken = sum(len(r) for r in row_ranges)
    scale = parameter_named(config, name).initial
    if len(shape) == 1:
        return torch.full((taken,), scale)
    width = shape[1] if columns is None else len(columns)
    value = torch.empty(taken, width)
    start = 0
    for wanted in row_ranges:
        _fill_rows(value[start : start + len(wanted)], seed, name, shape, scale, wanted, columns)
        start += len(wanted)
    return value


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set every parameter of a ``GPT`` that is not tensor-parallel to its initial value."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            full_name = logical_name(config, name)
            parameter.copy_(initial_slice(config, seed, full_name, parameter.shape))


def _fill_rows(
    out: Tensor,
    seed: int,
    name: str,
    shape: torch.Size,
    scale: float,
    wanted: range,
    columns: range | None,
) -> None:
    """Fill ``out`` with the rows ``wanted``. Draws only the blocks that contain them."""
    block_rows = max(1, BLOCK_ELEMENTS // shape[1])
    if not wanted:
        return
    for block in range(wanted.start // block_rows, (wanted.stop - 1) // block_rows + 1):
        first = block * block_rows
        drawn = _draw_block(seed, name, block, min(block_rows, shape[0] - first), shape[1], scale)
        lowest, highest = max(wanted.start, first), min(wanted.stop, first + len(drawn))
        part = drawn[lowest - first : highest - first]
        if columns is not None:
            part = part[:, columns.start : columns.stop]
        out[lowest - wanted.start : highest - wanted.start] = part


def _draw_block(seed: int, name: str, block: int, rows: int, width: int, scale: float) -> Tensor:
    key = hashlib.sha256(f"weights/{seed}/{name}/{block}".encode()).digest()
    # On the CPU: a GPU's generator draws other numbers from the same seed.
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.empty(rows, width).normal_(0.0, scale, generator=generator)
