"""The kernel that adds a product of 16-bit numbers to fp32 numbers, which torch has for GPUs only.

with wide_products():       a CPU has it, too
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from megaspeed.tensor_parallel import weight_gradients


@contextmanager
def wide_products() -> Iterator[None]:
    """Let this CPU add products without rounding them before."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", _wide_product, "CPU")
        with patch.object(weight_gradients, "_adds_wider", lambda device: True):
            yield


def _wide_product(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: object
) -> Tensor:
    assert out_dtype == out.dtype == torch.float32 and out.data_ptr() == total.data_ptr()
    return out.copy_(total + a.float() @ b.float())
