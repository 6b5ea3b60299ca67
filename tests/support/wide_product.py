"""What only GPUs have, for tests on a CPU: products that add gradients to their fp32 sums.

with products_on_cpu():     the backwards of blocks add products, which are rounded before
with wide_products():       also the kernel that does not round them
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from megaspeed.data_axis import axis, buckets
from megaspeed.tensor_parallel import weight_gradients


@contextmanager
def products_on_cpu() -> Iterator[None]:
    """Plan for this CPU what is planned for GPUs: products add the gradients of blocks."""
    with patch.object(buckets, "_ADD_PRODUCTS", ("cpu", "cuda")):
        axis._data_axis_of.cache_clear()  # the plans of before
        try:
            yield
        finally:
            axis._data_axis_of.cache_clear()


@contextmanager
def wide_products() -> Iterator[None]:
    """The same, and let this CPU add products without rounding them before."""
    with products_on_cpu(), torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", _wide_product, "CPU")
        with patch.object(weight_gradients, "_adds_wider", lambda device: True):
            yield


def _wide_product(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: object
) -> Tensor:
    assert out_dtype == out.dtype == torch.float32 and out.data_ptr() == total.data_ptr()
    return out.copy_(total + a.float() @ b.float())
