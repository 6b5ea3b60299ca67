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
    CPU             calls of torch's FlashAttention kernel for each document
    otherwise       a mask (B, 1, S, S) that is added to the scores (``attention.py``)

``attends_without_mask`` decides between them. The first form is also used for a sliding window if
each row is one document, because other fused kernels need a mask for a window. Both first forms are
also used if keys are gathered over the context axis.

The first two forms are operators that torch's compiler does not trace into. The number of documents
changes from one micro-batch to the next, and so does the length of the longest one. Only sizes in
``Segments`` depend on them. So a block is compiled once.

A rank of the context axis may attend with a part of the queries (``sequence_part.py``). Then each
run of queries attends to a run of keys that ends with the same token, but may begin earlier. If two
ranks share the row above, the second one has the tokens ". d" and "e f":

    queries   .  d | e  f              .   x
    keys      .  d | .  d  e  f        d   x  x
                                       e         x  x  x
                                       f         x  x  x  x

FlashAttention aligns the causal mask of a run to its last query and key. torch's kernel for CPUs
aligns it to the first ones. So there, a run attends to earlier keys without a mask, and to its own
keys with one, and both results are merged.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaspeed.config.model import ModelConfig
from megaspeed.model.sequence_part import WHOLE, SequencePart

_OLDEST_FLASH_GPU = (8, 0)


class Segments(NamedTuple):
    """N runs of a rank's queries, and the run of keys to which each attends causally."""

    cu_seqlens: Tensor
    """(N + 1,) int32; where each run of queries begins among the rank's tokens of all rows, and the
    end. FlashAttention uses this name, for "cumulative sequence lengths"."""
    longest: int
    """Tokens of the longest run, in host memory. FlashAttention starts thread blocks for this many
    tokens of each run. At least 2, because FlashAttention and the compiler treat 1 differently."""
    keys: Tensor | None = None
    """(n,) int32; the indices of each run's keys among the gathered ones (``gathered_rows``), one
    run after another; None if each run attends to its own tokens."""
    cu_keys: Tensor | None = None
    """(N + 1,) int32; where each run begins in ``keys``, and the end."""
    longest_keys: int = 0
    """Keys of the longest run, in host memory."""

    @classmethod
    def of(cls, positions: Tensor, part: SequencePart) -> "Segments":
        """The segments of rows with these positions (B, S), for the queries of ``part``."""
        sequence, own = positions.shape[1], part.ranges(positions.shape[1])
        places = places_in(own)
        own_positions = take(positions, own)  # (B, t)
        begins = own_positions == 0  # a copy
        begins[:, [0, *(len(each) for each in own[:-1])]] = True
        first = begins.flatten().nonzero().flatten()
        cu_seqlens, longest = _cumulative(first.diff(append=torch.tensor([begins.numel()])))
        if part.size == 1:
            return cls(cu_seqlens, longest)
        # The places in the row of the first and the last key of each run.
        start = (places - own_positions).flatten()[first]
        ends = places.repeat(len(positions))[cu_seqlens[1:] - 1] + 1
        lengths = ends - start
        cu_keys, longest_keys = _cumulative(lengths)
        offsets = (start + first // len(places) * sequence - cu_keys[:-1]).repeat_interleave(
            lengths
        )
        keys = gathered_rows(len(positions), sequence, part)[torch.arange(len(offsets)) + offsets]
        return cls(cu_seqlens, longest, keys, cu_keys, longest_keys)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Segments":
        """A copy, with ``move`` applied to each tensor."""
        keys = None if self.keys is None else move(self.keys)
        cu_keys = None if self.cu_keys is None else move(self.cu_keys)
        return self._replace(cu_seqlens=move(self.cu_seqlens), keys=keys, cu_keys=cu_keys)


def _cumulative(lengths: Tensor) -> tuple[Tensor, int]:
    """The cumulative sums (N + 1,) of N lengths, from 0; and the largest length, at least 2."""
    sums = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return sums.to(torch.int32), max(2, int(lengths.max()))


def places_in(ranges: Iterable[range], device: torch.device | None = None) -> Tensor:
    """The numbers in these ranges, in order: (S,) int64."""
    return _joined([torch.arange(each.start, each.stop, device=device) for each in ranges])


def take(x: Tensor, ranges: Iterable[range]) -> Tensor:
    """The columns of ``x`` (B, S, ...) in these ranges; a view if there is one."""
    return _joined([x[:, each.start : each.stop] for each in ranges], dim=1)


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gathered_rows(rows: int, sequence: int, part: SequencePart) -> Tensor:
    """Where each token of B rows (B S,) is after an all-gather over the context axis. int32.

    A rank sends its tokens of all rows, (B, S / cp).
    """
    tokens = sequence // part.size
    found = torch.empty(rows, sequence, dtype=torch.int32)
    for rank in range(part.size):
        sent = rows * tokens * rank + torch.arange(rows * tokens, dtype=torch.int32)
        start = 0
        for own in replace(part, rank=rank).ranges(sequence):
            end = start + len(own)
            found[:, own.start : own.stop] = sent.view(rows, tokens)[:, start:end]
            start = end
    return found.flatten()


@dataclass(frozen=True)
class Documents:
    """The documents of the rows of a micro-batch. Each is contiguous in its row."""

    positions: Tensor
    """(B, S) int32; the position of each token in its document."""
    segments: Segments
    """Of the queries that a rank has in its attention."""

    @classmethod
    def beginning_at(cls, begins: Tensor, part: SequencePart = WHOLE) -> "Documents":
        """Make documents from the tokens at which they begin. ``part`` has the rank's queries.

        ``begins`` is (B, S) bool in host memory, true if a token is the first of a document. The
        first token of a row always counts as true.
        """
        begins = begins.clone()
        begins[:, 0] = True
        places = torch.arange(begins.shape[1])
        positions = places - torch.where(begins, places, 0).cummax(dim=1).values
        return cls(positions.to(torch.int32), Segments.of(positions, part))

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Documents":
        return Documents(move(self.positions), self.segments.moved(move))


def attends_without_mask(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether attention needs no mask with this model, GPU and torch."""
    if config.why_mask(device.type, dtype.itemsize) is not None:
        return False
    shares_heads = config.num_key_value_heads < config.num_attention_heads
    return device.type != "cuda" or _has_flash_attention(device, shares_heads)


@cache
def _has_flash_attention(device: torch.device, shares_heads: bool) -> bool:
    if torch.cuda.get_device_capability(device) < _OLDEST_FLASH_GPU:
        return False
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.13 it does not support shared key/value heads.
    return not shares_heads or "enable_gqa" in inspect.signature(varlen_attn).parameters


@lru_cache(maxsize=1)
def segments_of_rows(
    rows: int, sequence: int, part: SequencePart, device: torch.device
) -> Segments:
    """The segments if each row is one document. Cached, because all micro-batches use them."""
    # A later step saves them for backward, and torch cannot save an inference tensor.
    with torch.inference_mode(False):
        positions = torch.arange(sequence).expand(rows, sequence)
        return Segments.of(positions, part).moved(lambda tensor: tensor.to(device))


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention of each run of queries to its run of keys.

    Args:
        q: (B, t, H, K); like ``k`` and ``v``, it may be a part of a larger tensor.
        k: (B, t, H_kv, K), or (1, n, H_kv, K) if there are ``segments.keys``.
        v: as ``k``.
        window: how many tokens a query attends to, including itself; None for all earlier ones.
            Always None on a CPU.
        scale: multiplies the scores; None for 1 / sqrt(K).

    Returns:
        (B, t, H K)
    """
    packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    cu_keys, longest_keys = segments.cu_seqlens, segments.longest
    if segments.cu_keys is not None:
        cu_keys, longest_keys = segments.cu_keys, segments.longest_keys
    if _is_on_cpu(q):
        assert window is None
        runs = segments.cu_seqlens, cu_keys
        mixed, _ = torch.ops.megaspeed.document_attention(*packed, *runs, scale)
    else:
        # Imported here because it imports torch's compiler, which takes two seconds.
        from torch.nn.attention.varlen import varlen_attn

        sharing: Any = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
        mixed = varlen_attn(
            *packed,
            segments.cu_seqlens,
            cu_keys,
            segments.longest,
            longest_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **sharing,
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
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_keys, float? scale)"
    " -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    _BACKWARD,
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_keys,"
    " Tensor mixed, Tensor sums, float? scale) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(_OPERATOR, "cpu")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output (B t, H, K), and the logarithm of each softmax's sum (H, B t), in fp32."""
    mixed = torch.empty(q.shape, dtype=q.dtype)
    sums = torch.empty((1, q.shape[1], len(q)), dtype=torch.float32)
    lengths, key_lengths = cu_seqlens.diff().tolist(), cu_keys.diff().tolist()
    runs = zip(_split(q, lengths), _split(k, key_lengths), _split(v, key_lengths), strict=True)
    results = zip(_split(mixed, lengths), sums.split(lengths, dim=2), strict=True)
    for run, own_results in zip(runs, results, strict=True):
        for result, value in zip(own_results, _attend(*run, scale), strict=True):
            result.copy_(value)
    return mixed, sums[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of a run of queries to a run of keys that has the same last token."""
    earlier = k.shape[2] - q.shape[2]
    forward = partial(_flash_forward, q, scale=scale)
    mixed, sums = forward(k[:, :, earlier:], v[:, :, earlier:], _NO_DROPOUT, _CAUSAL)
    if earlier == 0:
        return mixed, sums
    before = forward(k[:, :, :earlier], v[:, :, :earlier], _NO_DROPOUT, not _CAUSAL)
    # Each result is a mean of values. Its weight is its part of the softmax's sum.
    joint_sums = torch.logaddexp(sums, before[1])
    weights = [(part - joint_sums).exp_().unsqueeze(3) for part in (sums, before[1])]
    return (mixed * weights[0] + before[0] * weights[1]).to(q.dtype), joint_sums


@torch.library.impl(_BACKWARD, "cpu")
def _attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    mixed: Tensor,
    sums: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``q``, ``k`` and ``v``."""
    q_gradient, k_gradient, v_gradient = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    lengths, key_lengths = cu_seqlens.diff().tolist(), cu_keys.diff().tolist()
    runs = zip(
        *(_split(x, lengths) for x in (gradient, q)),
        *(_split(x, key_lengths) for x in (k, v)),
        _split(mixed, lengths),
        sums.unsqueeze(0).split(lengths, dim=2),
        strict=True,
    )
    results = zip(
        _split(q_gradient, lengths),
        _split(k_gradient, key_lengths),
        _split(v_gradient, key_lengths),
        strict=True,
    )
    for run, own_results in zip(runs, results, strict=True):
        _add_attend_backward(run, own_results, scale)
    return q_gradient, k_gradient, v_gradient


def _add_attend_backward(
    run: Sequence[Tensor], results: Sequence[Tensor], scale: float | None
) -> None:
    """Add the gradients of ``_attend`` to ``results``, those of ``q``, ``k`` and ``v``.

    With the output and the sums of all keys, the backward of each part of the keys computes its
    part of the gradients (Dao 2023, FlashAttention-2, section 3.1.2).
    """
    (gradient, q, k, v, mixed, sums), (q_gradient, k_gradient, v_gradient) = run, results
    earlier = k.shape[2] - q.shape[2]
    for keys, is_causal in ((slice(earlier, None), _CAUSAL), (slice(earlier), not _CAUSAL)):
        if k[:, :, keys].shape[2] > 0:
            own = gradient, q, k[:, :, keys], v[:, :, keys], mixed, sums
            added = _flash_backward(*own, _NO_DROPOUT, is_causal, scale=scale)
            totals = q_gradient, k_gradient[:, :, keys], v_gradient[:, :, keys]
            for total, value in zip(totals, added, strict=True):
                total.add_(value)


@torch.library.register_fake(_OPERATOR)
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.register_fake(_BACKWARD)
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.megaspeed.document_attention_backward
    return (*backward(gradient, *ctx.saved_tensors, ctx.scale), None, None, None)


torch.library.register_autograd(_OPERATOR, _differentiate, setup_context=_save)


def _split(x: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """``x`` (B S, heads, K) as one view (1, heads, length, K) of each run."""
    return x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2)
