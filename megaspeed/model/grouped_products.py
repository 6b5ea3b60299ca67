"""Products of groups of rows with a matrix for each group, as one operator for torch's compiler.

In torch 2.13, the compiler refuses these products in fp32 (_meta_registrations.py,
_meta_grouped_mm_common), although the kernel for CPUs has them. It also sees forward and backward
as one graph: if the backward gathered or converted a tensor in plain sight, as the forward has
done, the compiler would keep the forward's result until then.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """Products of the groups of ``a`` and ``b`` that end at ``offsets`` (E,), int32.

        a (n, in), b (E, in, out)    (n, out): each group of rows of a by its matrix of b
        a (out, n), b (n, in)        (E, out, in): the sum over each group of n; 0 if it is empty

    The last offset must be n: torch does not set what comes after it. If ``rows`` (n,), int64, is
    given, these rows of ``b`` are used instead of all.
    """
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.megaspeed.grouped_product(a, b, offsets, rows)
        return product
    return _grouped_product(a, b, offsets, rows)


def converting_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in the type of ``a``. What ``b`` is converted to is not kept."""
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
    # The kernels refuse it. Models are compared with transformers in fp64.
    ends, is_by_row = offsets[:-1].tolist(), b.dim() == 3
    parts = a.tensor_split(ends, dim=0 if is_by_row else 1)
    products = [x @ y for x, y in zip(parts, b if is_by_row else b.tensor_split(ends), strict=True)]
    return torch.cat(products) if is_by_row else torch.stack(products)


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
