"""Grouped products: each group of rows times a matrix of its own. One operator for the compiler.

In torch 2.13, the compiler refuses these products in fp32 (_meta_registrations.py,
_meta_grouped_mm_common), although the kernel for CPUs has them. The compiler also sees forward and
backward as one graph. If the backward repeats a gather or a conversion of the forward, the compiler
would keep the forward's result for it. It cannot see what happens inside an operator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """Multiply each group of ``a`` by its part of ``b``. Groups end at ``offsets`` (E,), int32.

        a (n, in), b (E, in, out)    returns (n, out): each group of rows of a, times its matrix
        a (out, n), b (n, in)        returns (E, out, in): for each group, its columns of a times
                                     its rows of b; 0 if the group is empty

    Rows after the last offset belong to no group: torch does not set their results. If ``rows``
    (n,), int64, is given, ``b[rows]`` is used instead of ``b``.
    """
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.megaspeed.grouped_product(a, b, offsets, rows)
        return product
    return _grouped_product(a, b, offsets, rows)


def converting_product(a: Tensor, b: Tensor) -> Tensor:
    """The product a b in the type of ``a``. The converted ``b`` is not kept for the backward."""
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.megaspeed.converting_product(a, b)
        return product
    return _converting_product(a, b)


_library = torch.library.Library("megaspeed", "FRAGMENT")
_library.define("grouped_product(Tensor a, Tensor b, Tensor offsets, Tensor? rows) -> Tensor")
_library.define("converting_product(Tensor a, Tensor b) -> Tensor")


@torch.library.impl(_library, "grouped_product", "CompositeExplicitAutograd")
def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor, rows: Tensor | None) -> Tensor:
    b = b if rows is None else b[rows]
    if a.dtype != torch.float64:
        return F.grouped_mm(a, b, offs=offsets)
    # torch's kernels refuse fp64, in which models are compared with transformers.
    ends, is_by_row = offsets.tolist(), b.dim() == 3
    *parts, rest = a.tensor_split(ends, dim=0 if is_by_row else 1)
    others = b if is_by_row else b.tensor_split(ends)[:-1]
    products = [x @ y for x, y in zip(parts, others, strict=True)]
    unset = a.new_empty(len(rest), b.shape[2]) if is_by_row else None
    return torch.stack(products) if unset is None else torch.cat((*products, unset))


@torch.library.register_fake("megaspeed::grouped_product", lib=_library)
def _(a: Tensor, b: Tensor, offsets: Tensor, rows: Tensor | None) -> Tensor:
    if b.dim() == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(len(offsets), a.shape[0], b.shape[1])


@torch.library.impl(_library, "converting_product", "CompositeExplicitAutograd")
def _converting_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.to(a.dtype)


@torch.library.register_fake("megaspeed::converting_product", lib=_library)
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
