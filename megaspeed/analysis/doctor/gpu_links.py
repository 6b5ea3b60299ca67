"""NVLinks between the GPUs of a machine, from the matrix that `nvidia-smi topo -m` prints.

        GPU0    GPU1    CPU Affinity
GPU0     X      NV18    0-55            NV18: 18 NVLinks; SYS, NODE, PHB, PIX: over PCIe
GPU1    NV18     X      0-55
"""

import re
from typing import NamedTuple


class NvLinks(NamedTuple):
    """How many pairs of GPUs there are, and how many of them have NVLink."""

    pairs: int
    linked: int


def nvlinks(matrix: str) -> NvLinks:
    """The pairs of GPUs in the matrix; (0, 0) if there is one GPU, or if it cannot be read."""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [row[1 + column] for at, row in enumerate(rows) for column in range(at)]
    return NvLinks(len(cells), sum(cell.startswith("NV") for cell in cells))
