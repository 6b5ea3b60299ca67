"""Several documents packed into one row: each token attends only to its own document.

With "." for end-of-text, which starts a document:

    tokens       b  c  .  d  e  f  .  g
    positions    0  1  0  1  2  3  0  1     of each token in its document
    cu_seqlens   0     2           6     8  where each document of all rows begins, and the end

    b   x                          A token's prediction is the same as if its document (or the part
    c   x  x                       of it that is in the row) were alone in the row.
    .         x
    d         x  x
    e         x  x  x
    f         x  x  x  x
    .                     x
    g                     x  x

The loader of each pipeline stage computes ``positions`` and ``cu_seqlens`` on the host. So stages
do not send them to each other, and the host never waits to read them from a GPU. Attention has
three forms:

    GPU, 16 bits    one FlashAttention kernel for all documents (``torch.nn.attention.varlen``)
    CPU             one call of torch's FlashAttention kernel for each document
    otherwise       a mask (B, 1, S, S) that is added to the scores (``attention.py``)

``attends_without_mask`` decides between them. The first form is also used for a sliding window if
each row is one document, because other fused kernels need a mask for a window.

The first two forms are operators that torch's compiler does not trace into. The number of documents
changes from one micro-batch to the next, and so does the length of the longest one. Only the size
of ``cu_seqlens`` and the number ``longest`` depend on them. So a block is compiled once.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from megaspeed.config.model import ModelConfig

_OLDEST_FLASH_GPU = (8, 0)


@dataclass(frozen=True)
class Documents:
    """The documents of the rows of a micro-batch. Each is contiguous in its row."""

    positions: Tensor
    """(B, S) int32; the position of each token in its document."""
    cu_seqlens: Tensor
    """(N + 1,) int32; where each of the N documents begins among the B S tokens of all rows, and at
    the end B S. FlashAttention uses this name, for "cumulative sequence lengths"."""
    longest: int
    """Tokens of the longest document, in host memory. FlashAttention starts thread blocks for this
    many tokens of each document. At least 2, because FlashAttention and the compiler treat 1
    differently."""

    @classmethod
    def beginning_at(cls, begins: Tensor) -> "Documents":
        """Make documents from the tokens at which they begin.

        Args:
            begins: (B, S) bool in host memory, true if a token is the first of a document. The
                first token of a row always counts as true.
        """
        begins = begins.clone()
        begins[:, 0] = True
        places = torch.arange(begins.shape[1])
        positions = places - torch.where(begins, places, 0).cummax(dim=1).values
        first = begins.flatten().nonzero().flatten()
        cu_seqlens = torch.cat((first, torch.tensor([begins.numel()])))
        longest = max(2, int(cu_seqlens.diff().max()))
        return cls(positions.to(torch.int32), cu_seqlens.to(torch.int32), longest)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Documents":
        """A copy, with ``move`` applied to each tensor."""
        return Documents(move(self.positions), move(self.cu_seqlens), self.longest)


def attends_without_mask(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """``ModelConfig.attends_without_mask``, if this GPU and this torch support it."""
    if not config.attends_without_mask(device.type, dtype.itemsize):
        return False
    return device.type != "cuda" or _has_flash_attention(device)


@cache
def _has_flash_attention(device: torch.device) -> bool:
    from torch.nn.attention.varlen import varlen_attn

    shares_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.13 has it
    return shares_heads and torch.cuda.get_device_capability(device) >= _OLDEST_FLASH_GPU


@lru_cache(maxsize=1)
def boundaries_of_rows(rows: int, sequence: int, device: torch.device) -> Tensor:
    """``cu_seqlens`` if each row is one document. Cached, because all micro-batches use it."""
    # A later step saves it for backward, and torch cannot save an inference tensor.
    with torch.inference_mode(False):
        return sequence * torch.arange(rows + 1, dtype=torch.int32, device=device)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int | None, window: int | None
) -> Tensor:
    """Causal attention within each document.

    Args:
        q: (B, S, H, K); like ``k`` and ``v``, it may be a part of a larger tensor.
        k: (B, S, H_kv, K)
        v: (B, S, H_kv, K)
        cu_seqlens: see ``Documents``.
        longest: see ``Documents``; S if None.
        window: how many tokens a query attends to, including itself; None for all earlier ones.
            Always None on a CPU.

    Returns:
        (B, S, H K)
    """
    packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if _is_on_cpu(q):
        assert window is None
        mixed, _ = torch.ops.megaspeed.document_attention(*packed, cu_seqlens)
    else:
        # Imported here because it imports torch's compiler, which takes two seconds.
        from torch.nn.attention.varlen import varlen_attn

        longest = q.shape[1] if longest is None else longest
        mixed = varlen_attn(
            *packed,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return mixed.view(*q.shape[:2], -1)


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


_OPERATOR, _BACKWARD = "megaspeed::document_attention", "megaspeed::document_attention_backward"
_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NO_DROPOUT, _CAUSAL = 0.0, True

# Not ``torch.library.custom_op``, whose first call imports torch's compiler.
torch.library.define(
    _OPERATOR,
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    _BACKWARD,
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor mixed, Tensor sums)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(_OPERATOR, "cpu")
def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B S, H, K), and the logarithm of each softmax's sum (H, B S), in fp32."""
    lengths = cu_seqlens.diff().tolist()
    of_documents = zip(*(_split(x, lengths) for x in (q, k, v)), strict=True)
    results = [_flash_forward(*qkv, _NO_DROPOUT, _CAUSAL) for qkv in of_documents]
    mixed, sums = zip(*results, strict=True)
    return _joined(mixed), torch.cat(sums, dim=2)[0]


@torch.library.impl(_BACKWARD, "cpu")
def _attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    mixed: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``q``, ``k`` and ``v``."""
    lengths = cu_seqlens.diff().tolist()
    of_documents = zip(
        *(_split(x, lengths) for x in (gradient, q, k, v, mixed)),
        sums.unsqueeze(0).split(lengths, dim=2),
        strict=True,
    )
    results = [_flash_backward(*each, _NO_DROPOUT, _CAUSAL) for each in of_documents]
    of_q, of_k, of_v = zip(*results, strict=True)
    return _joined(of_q), _joined(of_k), _joined(of_v)


@torch.library.register_fake(_OPERATOR)
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.register_fake(_BACKWARD)
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.megaspeed.document_attention_backward
    return (*backward(gradient, *ctx.saved_tensors), None)


torch.library.register_autograd(_OPERATOR, _differentiate, setup_context=_save)


def _split(x: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """``x`` (B S, heads, K), split into one (1, heads, length, K) for each document."""
    return x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of ``_split``."""
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1)[0]
