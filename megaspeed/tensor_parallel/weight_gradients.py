"""Adds the gradient of a matrix to its sum in the product that computes it.

    weights in 16 bits, their sum in fp32                   bytes moved for an element
    product, then add     product written and read (2 + 2), sum read and written (4 + 4)    12
    one kernel                                              sum read and written (4 + 4)     8

The forward of the loss does this for the head (``loss.py``). In a block it is an operator, because
torch's compiler would write a product of another type to memory before it is added. The compiler
must see only tensors, so an empty tensor stands for the layer whose sum it is.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

AddProduct = Callable[[Tensor, Tensor], None]
"""Adds gradient^T inputs to a sum, of an output's gradient (n, out) and of inputs (n, in)."""


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b to ``total``. If a product of 16-bit numbers is added in fp32, it is rounded first,
    and takes memory, unless one kernel multiplies and adds.
    """
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    elif _adds_wider(total.device):
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.t() @ b)


@lru_cache
def _adds_wider(device: torch.device) -> bool:
    """Whether torch can add a product of 16-bit numbers to fp32 numbers in one kernel.

    torch has this only for GPUs. Earlier versions refuse a sum of another type than the factors
    (aten/src/ATen/native/cuda/Blas.cpp, ``_addmm_dtype_out_cuda``), so it is tried once.
    """
    if device.type != "cuda":
        return False
    total = torch.zeros(16, 16, device=device)
    factor = total.bfloat16()
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


class MatrixLayer(nn.Module):
    """A linear layer. Autograd adds the gradient of its weight, or a product does."""

    weight: nn.Parameter
    _add: AddProduct
    key: Tensor | None = None
    """What stands for the layer in a graph; None if autograd adds the gradient."""

    def add_products_by(self, add: AddProduct) -> None:
        """Let every backward call ``add``. Autograd then computes no gradient of the weight."""
        self._add, self.key = add, torch.empty(0, device=self.weight.device)
        _LAYERS[_id(self.key)] = self


_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _id(key: Tensor) -> int:
    """What a saved or traced key has in common with the layer's: its memory."""
    return key.untyped_storage()._cdata


# Declared as a change of the key, so that the compiler neither drops nor repeats it.
_library = torch.library.Library("megaspeed", "DEF")
_library.define("add_product(Tensor(a!) key, Tensor gradient, Tensor inputs) -> ()")


@torch.library.impl(_library, "add_product", "CompositeExplicitAutograd")
def _add_product(key: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    _LAYERS[_id(key)]._add(gradient, inputs)


@torch.library.register_fake("megaspeed::add_product", lib=_library)
def _(key: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """The compiler needs the shapes of the results. There are none."""


def weight_gradient(gradient: Tensor, inputs: Tensor, key: Tensor | None) -> Tensor | None:
    """Return the gradient (out, in) of a weight; None if a product adds it to its sum.

    Args:
        gradient: (n, out), of the output.
        inputs: (n, in).
        key: that of the layer.
    """
    if key is None:
        return gradient.t() @ inputs
    # What watches the operations of an uncompiled step sees only those outside of another one.
    add = torch.ops.megaspeed.add_product if torch.compiler.is_compiling() else _add_product
    add(key, gradient, inputs)
    return None
