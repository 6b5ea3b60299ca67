"""Causal self-attention with a fused query/key/value projection and grouped key/value heads.

    x (B, S, D) -> qkv (B, S, (H + 2 H_kv) K) -> softmax(q k^T / sqrt(K)) v -> output (B, S, D)

If the model has a norm of each head (Henry et al. 2020) or of all heads together, it is applied to
q and k first. If it has rotary positions, q and k are rotated after that, or a part of each head.

The rows of ``qkv.weight`` are all query heads, then all key heads, then all value heads, so that a
tensor split takes consecutive heads from each of the three sections. With H_kv < H, H / H_kv query
heads share one key/value head (Ainslie et al. 2023, GQA).

Several documents may be packed into one row. Then attention and positions may restart at each
document (``documents.py``).

Ranks of a context axis share the sequence. ``share_sequences`` sets what they exchange: either the
complete attention has all tokens of some heads, or its keys and values are gathered.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from megaspeed.model.documents import Segments, gathered_rows, places_in, varlen_attention
from megaspeed.model.dropout import SampleDropout
from megaspeed.model.recomputation import Compose, keeping
from megaspeed.model.sequence_part import WHOLE, SequencePart


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Frequencies theta^(-2i/K) of rotary position embedding (Su et al. 2021, RoFormer, 3.2.2).

    K is ``rotary_dim``. One for each pair i in [0, K/2) of dims: (K/2,), fp32.
    """
    # Models are built within torch.device("meta"), where these numbers would have no values.
    even_dims = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu")
    exponents = even_dims / config.rotary_dim
    periods = config.rope_theta**exponents
    frequencies = 1.0 / periods
    match config.rope_scaling:
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3_scaled(frequencies, scaling)
        case YarnScaling() as scaling:
            # Not `frequencies / factor`, so that each bit is as in transformers.
            stretched = 1.0 / (scaling.factor * periods)
            kept = _kept_by_yarn(config, scaling)
            return stretched * (1 - kept) + frequencies * kept
    return frequencies


def _llama3_scaled(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3's scaling for long contexts ("The Llama 3 herd of models", 2024; its reference code).

    Wavelengths longer than the original context are stretched by ``factor``, short ones are kept,
    and those between are interpolated.
    """
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    longest_kept = original / scaling.high_freq_factor
    shortest_stretched = original / scaling.low_freq_factor
    blend = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def _kept_by_yarn(config: ModelConfig, scaling: YarnScaling) -> Tensor:
    """How much of each frequency YaRN keeps, from 1 to 0 (Peng et al. 2023, section 3.2): (K/2,).

    It is linear in the number i of the pair, as in the authors' code.
    """
    original = scaling.original_max_position_embeddings

    def pair_with(turns: float) -> float:
        """The i, not rounded, whose frequency has this many turns in the original context."""
        logarithm = math.log(original / (turns * 2 * math.pi))
        return config.rotary_dim * logarithm / (2 * math.log(config.rope_theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    if first == last:
        last += 0.001  # a step, without a division by 0
    pairs = torch.arange(config.rotary_dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def attention_factor(config: ModelConfig) -> float:
    """Number by which cosines and sines are multiplied (Peng et al. 2023, section 3.4, YaRN).

    Queries and keys are both rotated by them, so attention scores are multiplied by its square.
    """
    scaling = config.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    scales = scaling.mscale, scaling.mscale_all_dim
    above, below = (scale or 0.0 for scale in scales) if all(scales) else (1.0, 0.0)
    logarithm = math.log(scaling.factor)
    return (0.1 * above * logarithm + 1.0) / (0.1 * below * logarithm + 1.0)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines by which queries and keys are rotated: two of (S, 1, K/2) or (B, S, 1, K/2),
for K rotated elements of a head."""


class RotaryAngles:
    """The angles of a model with rotary positions. All blocks of a rank share them.

    Those of rows that are one document are computed once and kept, because they depend only on the
    places of the tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config)
        self._factor = attention_factor(config)
        self._kept: tuple[object, Angles] | None = None

    def of(
        self,
        positions: Tensor | None,
        sequence: int,
        dtype: torch.dtype,
        device: torch.device,
        part: SequencePart = WHOLE,
    ) -> Angles:
        """Cosines and sines in ``dtype``.

        Args:
            positions: (B, t) of the tokens of ``part``; if None, their places in the sequence.
            sequence: tokens of a complete sequence.
            dtype: of queries and keys.
            device: where they are.
            part: the tokens that are rotated.
        """
        self._frequencies = self._frequencies.to(device)
        if positions is not None:
            return cos_sin(positions, self._frequencies, self._factor, dtype)
        key = (sequence, part, dtype, device)
        if self._kept is None or self._kept[0] != key:
            # A later step saves them for backward. An inference tensor cannot be saved.
            with torch.inference_mode(False):
                places = places_in(part.ranges(sequence), device).float()
                self._kept = key, cos_sin(places, self._frequencies, self._factor, dtype)
        return self._kept[1]


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Angles:
    """Cosine and sine of the angle position x frequency, each x factor, computed in fp32.

    Args:
        positions: (S,), the same for every row, or (B, S).
        frequencies: (K/2,), fp32.
        factor: of ``attention_factor``.
        dtype: of the result.

    Returns:
        Two of (S, 1, K/2) or (B, S, 1, K/2), the same for all heads.
    """
    # In fp32, because bf16 has no odd positions above 256.
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    return angles.cos().mul_(factor).to(dtype), angles.sin().mul_(factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + n) of ``x`` (B, S, heads, K) by the i-th of n angles of ``cos_sin``.

    Elements from 2 n on are not rotated. Hugging Face's Llama weights pair the same dims.
    """
    pairs = cos.shape[-1]
    others = x.shape[-1] - 2 * pairs
    first, second, *rest = x.split([pairs, pairs, others] if others else pairs, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *rest), dim=-1)


def attention_mask(
    positions: Tensor, dtype: torch.dtype, window: int | None = None, part: SequencePart = WHOLE
) -> Tensor:
    """The mask that is added to the attention scores: 0 if a query attends to a key, else -inf.

    All blocks share it. With a boolean mask, each block would convert it and save its own copy for
    backward.

    Args:
        positions: (B, t) or (1, t), the position of each query in its document.
        dtype: of queries and keys.
        window: how many tokens a query attends to, including itself; None for all earlier ones.
        part: the queries.

    Returns:
        (B or 1, 1, t, S), the same for all heads.
    """
    sequence = positions.shape[1] * part.size
    keys = torch.arange(sequence, device=positions.device)
    places = places_in(part.ranges(sequence), positions.device)
    first = places - (positions if window is None else positions.clamp(max=window - 1))
    seen = (keys >= first.unsqueeze(2)).logical_and_(keys <= places.unsqueeze(1))
    mask = torch.full(seen.shape, float("-inf"), dtype=dtype, device=seen.device)
    return mask.masked_fill_(seen, 0.0).unsqueeze(1)


@lru_cache(maxsize=1)  # S x S numbers: a second mask of another shape must not stay
def mask_of_rows(
    sequence: int,
    dtype: torch.dtype,
    window: int | None,
    part: SequencePart,
    device: torch.device,
) -> Tensor:
    """``attention_mask`` (1, 1, t, S) for rows of one document, as all micro-batches need it."""
    # A later step saves the mask for backward. An inference tensor cannot be saved.
    with torch.inference_mode(False):
        positions = places_in(part.ranges(sequence), device).unsqueeze(0)
        return attention_mask(positions, dtype, window, part)


@lru_cache(maxsize=1)
def keys_of_rows(rows: int, sequence: int, part: SequencePart, device: torch.device) -> Tensor:
    """``gathered_rows`` on ``device``, as all micro-batches need them."""
    with torch.inference_mode(False):
        return gathered_rows(rows, sequence, part).to(device)


class Inputs(NamedTuple):
    """What all blocks of a chunk get beside the hidden states."""

    samples: Tensor | None = None
    """(B,) int64, the sample indices, which determine dropout; None if there is none."""
    angles: Angles | None = None
    """Of rotary positions; None if the model has other positions."""
    mask: Tensor | None = None
    """(B or 1, 1, t, S), added to the scores; None if it is not needed."""
    segments: Segments | None = None
    """The runs of queries that attend without a mask; if there is no mask either, each token
    attends to itself and all earlier tokens."""
    keys: Tensor | None = None
    """Which of the gathered keys a rank uses, and in which order; None if it gathers none."""
    gradient_scale: Tensor | None = None
    """Scalar by which the gradient of the auxiliary loss is multiplied; None if experts have no
    auxiliary loss."""


_Heads = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def _unchanged(x: Tensor) -> Tensor:
    return x


class JointNorm:
    """RMSNorm over the queries of all heads together, and another over the keys of all heads.

    ``parallelize`` sets what tensor ranks exchange. All of them have the same number of heads.
    """

    def __init__(self, query_norm: nn.Module | None, key_norm: nn.Module | None, eps: float):
        assert query_norm is not None and key_norm is not None, "the model has both rows"
        self._norms, self._eps = (query_norm, key_norm), eps
        self.mean_of_ranks: Callable[[Tensor], Tensor] = _unchanged
        self.shared: Callable[[Tensor], Tensor] = _unchanged
        """Returns the keys' weights. Backward sums their gradients over ranks with this head."""

    def scales(self, qkv: Tensor) -> Tensor:
        """1 / RMS of the queries and of the keys of each token: (2, B, t, 1), fp32."""
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        means = []
        for x in self._sections(qkv)[:2]:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
            means.append(length.square() / x.shape[-1])
        return (self.mean_of_ranks(torch.stack(means)) + self._eps).rsqrt()

    def normalized(self, qkv: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, t, H K), keys and values (B, t, H_kv K) of ``qkv``, times their scales."""
        q, k, v = self._sections(qkv)
        query_weight, key_weight = self._weights()
        q, k = q * scales[0] * query_weight, k * scales[1] * self.shared(key_weight)  # in fp32
        return q.to(v.dtype), k.to(v.dtype), v

    def joined(self, qkv: Tensor, scales: Tensor) -> Tensor:
        """``normalized``, as one tensor."""
        return torch.cat(self.normalized(qkv, scales), dim=-1)

    def _sections(self, qkv: Tensor) -> tuple[Tensor, ...]:
        widths = [len(weight) for weight in self._weights()]
        return qkv.split([*widths, widths[1]], dim=-1)

    def _weights(self) -> list[Tensor]:
        return [norm.get_parameter("weight") for norm in self._norms]


class Attention(nn.Module):
    """Multi-head attention.

    ``parallelize`` replaces ``qkv`` and ``output`` by column- and row-parallel layers, and sets
    ``query_heads`` and ``key_value_heads`` to those of this rank. The forward pass does not change.
    ``share_sequences`` sets what the ranks of a context axis exchange. With ulysses, it also
    divides the numbers of heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        modules: Mapping[str, nn.Module],
        *,
        name: str,
        seed: int,
        compose: Compose = keeping,
    ) -> None:
        super().__init__()
        self.compose = compose
        self.query_heads = config.num_attention_heads
        self.key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        self.qkv = modules["attention.qkv"]
        self.query_norm = modules.get("attention.query_norm")
        self.key_norm = modules.get("attention.key_norm")
        self.output = modules["attention.output"]
        self.dropout = SampleDropout(
            config.attention_dropout, name=f"{name}.attention.dropout", seed=seed
        )
        number, interval = int(name.rpartition(".")[2]) + 1, config.no_rope_layer_interval
        self.is_rotary = config.positions == "rotary" and not (interval and number % interval == 0)
        self.scale = config.attention_multiplier
        """Multiplies the scores; None for 1 / sqrt(K)."""
        self.joint_norm: JointNorm | None = None
        if config.qk_norm == "all_heads":
            self.joint_norm = JointNorm(self.query_norm, self.key_norm, config.rms_norm_eps)
        self.to_heads: Callable[[Tensor], Tensor] | None = None
        """Own tokens of all heads (B, t, (H + 2 H_kv) K) -> all tokens of some heads; None if
        heads are not exchanged."""
        self.to_tokens: Callable[[Tensor], Tensor] = _unchanged
        """All tokens of some heads (B, S, H K / cp) -> own tokens of all heads (B, t, H K)."""
        self.gather_rows: Callable[[Tensor, Tensor], Tensor] | None = None
        """(own tokens (B t, ...), indices) -> these of all ranks' tokens; None if no keys are
        gathered."""

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Map normalised hidden states ``x`` (B, t, D) of this rank's tokens to (B, t, D)."""
        qkv = self.qkv(x)  # (B, t, (H + 2 H_kv) K)
        scales = None if self.joint_norm is None else self.joint_norm.scales(qkv)
        if self.to_heads is not None and self.joint_norm is not None and scales is not None:
            joined = partial(self.joint_norm.joined, scales=scales)
            qkv, scales = self.compose(joined, self.to_heads, qkv), None
        elif self.to_heads is not None:
            qkv = self.to_heads(qkv)  # (B, S, ...)
        heads = partial(self._heads, inputs=inputs, scales=scales)
        if self.dropout.active:  # a fused kernel would draw masks that depend on the layout
            attend = partial(self._attend_with_dropout, heads=heads, inputs=inputs)
            return self.compose(attend, self._output, qkv)
        return self._output(self.compose(heads, partial(self._attend, inputs=inputs), qkv))

    def _output(self, mixed: Tensor) -> Tensor:
        output: Tensor = self.output(self.to_tokens(mixed))
        return output

    def _heads(
        self, qkv: Tensor, inputs: Inputs, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, t, K), keys and values (B, heads, S, K), normalised and rotated.

        t is S unless keys are gathered. Keys that are gathered for ``segments`` are
        (1, heads, n, K).

        Args:
            qkv: (B, t, features).
            inputs: rotary angles and what attention needs.
            scales: of the norms over all heads; None if they are applied already, or absent.
        """
        batch, kv_width = len(qkv), self.key_value_heads * self.head_dim
        if self.joint_norm is not None and scales is not None:
            parts = self.joint_norm.normalized(qkv, scales)
        else:
            parts = qkv.split([self.query_heads * self.head_dim, kv_width, kv_width], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.joint_norm is None and self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.is_rotary:
            assert inputs.angles is not None, "rotary positions need angles"
            q, k = rotate(q, *inputs.angles), rotate(k, *inputs.angles)
        if self.gather_rows is not None:
            assert inputs.keys is not None, "gathered keys need an order"
            both = torch.cat((k, v), dim=2).flatten(0, 1)  # (B t, 2 H_kv, K)
            both = self.gather_rows(both, inputs.keys)
            rows = 1 if inputs.mask is None else batch
            k, v = both.unflatten(0, (rows, -1)).chunk(2, dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
        if inputs.segments is not None:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return varlen_attention(q, k, v, inputs.segments, self.window, self.scale)
        mask, grouped = inputs.mask, self.query_heads != self.key_value_heads
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return mixed.transpose(1, 2).flatten(2)  # (B, S, H K)

    def _attend_with_dropout(self, qkv: Tensor, heads: _Heads, inputs: Inputs) -> Tensor:
        q, k, v = heads(qkv)
        sequence, mask = q.shape[2], inputs.mask
        # The rows of all query heads that share a key/value head, so that no head is copied:
        # (B, H_kv, (H / H_kv) S, K).
        q = q.unflatten(1, (self.key_value_heads, -1)).flatten(2, 3)
        scores = q @ k.transpose(-2, -1)
        scores = scores * self.scale if self.scale else scores / math.sqrt(self.head_dim)
        scores = scores.view(len(q), self.query_heads, sequence, -1)
        if mask is None:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        else:
            scores = scores + mask
        scores = scores.softmax(dim=-1, dtype=torch.float32)  # frees the scores before dropout
        weights = self.dropout(scores.to(q.dtype), inputs.samples).view(*q.shape[:3], -1)
        mixed = (weights @ v).view(len(q), self.query_heads, sequence, self.head_dim)
        return mixed.transpose(1, 2).flatten(2)  # (B, S, H K)
