"""The table of the model: one row for each module with parameters. Plain arithmetic, no torch.

    module                  weight                 split over tp   only with
    embedding.tokens        (V, D)                 vocabulary
    embedding.positions     (positions, D)         replicated      positions: learned
    blocks.*.attention_norm (D,)                   replicated
    blocks.*.attention.qkv  ((H + 2 H_kv) K, D)    heads
    ..attention.query_norm  (K,) or (H K,)         each head/heads qk_norm true or all_heads
    ..attention.key_norm    (K,) or (H_kv K,)      each head/heads qk_norm true or all_heads
    ..attention.output      (D, H K)               columns
    blocks.*.mlp_norm       (D,)                   replicated
    blocks.*.mlp.up         (F, D)                 rows            mlp: gelu, exact_gelu
    blocks.*.mlp.gate_up    (F + F, D)             rows            mlp: swiglu
    blocks.*.mlp.down       (D, F)                 columns
    blocks.*.mlp.router     (E, D)                 replicated      num_experts E
    blocks.*.mlp.gate_up    (E (F + F), D)         experts         num_experts
    blocks.*.mlp.down       (E D, F)               experts         num_experts
    head.norm               (D,)                   replicated
    head.output             (V, D)                 vocabulary      untied, or on another stage

The modules of ``GPT`` are made from these rows (``gpt.py``). Shards (``tensor_parallel``), initial
values, weight decay, FLOPs, traffic, memory of parameters and Hugging Face's tensors derive from
them. Saved activations and the time of pointwise operations do not (``planning/costs``).
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megaspeed.config.model import ModelConfig

Shape = tuple[int, ...]

Kind = Literal["embedding", "linear", "router", "experts", "layer_norm", "rms_norm"]

Split = Literal["replicated", "each head", "vocabulary", "heads", "rows", "columns", "experts"]
"""How the weight is split along the tensor axis.

    replicated  every rank holds all of it and applies it to the same features
    each head   every rank holds all of it and applies it to its own heads
    vocabulary  rows, padded to the same number on each rank
    heads       rows of this rank's query, key and value heads
    rows        rows of each section (column-parallel; the bias is split like the rows)
    columns     columns (row-parallel; the bias is replicated)
    experts     not over the tensor axis: each rank of the expert axis has some complete experts
"""

EMBEDDING_WEIGHT = "embedding.tokens.weight"
HEAD_WEIGHT = "head.output.weight"

_KINDS: tuple[Literal["weight", "bias"], ...] = ("weight", "bias")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module with parameters: a row of the model's table of modules.

    The weight of a linear module has the shape (rows, columns).
    """

    name: str  # of the module within its layer, such as "attention.qkv"
    # a linear module or a router multiplies (tokens, columns) by (columns, rows); the rows of
    # experts are several matrices, one below the other, and a token is multiplied by some of them
    kind: Kind
    sections: Mapping[str, int]  # name -> number of rows of the weight, in order
    columns: int | None = None  # of the weight; None for a norm, whose weight is a vector
    bias: bool = False  # whether the module has a bias (rows,)
    split: Split  # how the weight is split over the tensor axis
    initial: float = 0.0  # standard deviation of the initial weight; a norm's is the constant 1
    eps: float = 0.0  # of a norm
    experts: int = 1  # number of matrices
    active_experts: int = 1  # how many of them a token is multiplied by

    @property
    def rows(self) -> int:
        return sum(self.sections.values())

    @property
    def is_norm(self) -> bool:
        return self.columns is None

    @property
    def active_rows(self) -> int:
        """Number of rows of the weight by which a token is multiplied."""
        return self.rows // self.experts * self.active_experts


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the complete model, without padding."""

    layer: str  # name of its layer, such as "blocks.3"
    kind: Literal["weight", "bias"]
    row: Row  # of its module

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.row.name}.{self.kind}"

    @property
    def shape(self) -> Shape:
        rows, columns = self.row.rows, self.row.columns
        return (rows,) if self.is_bias or columns is None else (rows, columns)

    @property
    def split(self) -> Split:
        """How it is split. All ranks add the bias of a row-parallel layer, after the sum."""
        is_added_after = self.row.split == "columns" and self.is_bias
        return "replicated" if is_added_after else self.row.split

    @property
    def is_bias(self) -> bool:
        return self.kind == "bias"

    @property
    def is_expert(self) -> bool:
        return self.split == "experts"

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix of a block's attention or feed-forward layer."""
        is_matrix = self.row.kind in ("linear", "experts") and not self.is_bias
        return is_matrix and self.layer.startswith("blocks.")

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: only to matrices and embeddings."""
        return not self.is_bias and not self.row.is_norm

    @property
    def initial(self) -> float:
        """Standard deviation of its initial values; for a vector, the constant value."""
        if self.is_bias:
            return 0.0
        return 1.0 if self.row.is_norm else self.row.initial

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def mlp_parts(rows: int, tokens: int, width: int) -> list[int]:
    """Divide the tokens of an MLP's input (rows, tokens, width). Return how many each part has.

    In all rows together, a part has about ``width`` tokens. So its intermediates are as large as a
    weight (Bekman et al. 2025, "Arctic Long Sequence Training", on tiled computation).
    """
    size = math.ceil(tokens / math.ceil(rows * tokens / width))
    return [min(size, tokens - start) for start in range(0, tokens, size)]


def layer_count(config: ModelConfig) -> int:
    """Length of the flat list of layers: embedding, blocks, head."""
    return config.num_hidden_layers + 2


def logical_name(config: ModelConfig, name: str) -> str:
    """The name under which a parameter is stored. For a tied head, that of the token embedding."""
    return EMBEDDING_WEIGHT if config.tie_word_embeddings and name == HEAD_WEIGHT else name


def parameter_named(config: ModelConfig, name: str) -> Parameter:
    """The parameter with this full name, also for a tied head.

    Raises LookupError if the table has no row for it.
    """
    try:
        return _by_name(config)[name]
    except KeyError:
        raise LookupError(
            f"the parameter {name} has no row in megaspeed/model/parameters.py; add one that "
            "states its shape, its split over tp and its initial values, and make its module from "
            "the row"
        ) from None


@lru_cache(maxsize=8)
def _by_name(config: ModelConfig) -> Mapping[str, Parameter]:
    head = range(layer_count(config) - 1, layer_count(config))
    return {**parameters_of(config), **parameters_of(config, head)}


def layer_name(config: ModelConfig, layer: int) -> str:
    """Name of a layer of the flat list: embedding, blocks.0, blocks.1, ..., head."""
    if layer == 0:
        return "embedding"
    return "head" if layer == layer_count(config) - 1 else f"blocks.{layer - 1}"


def parameters_of(
    config: ModelConfig, layers: Collection[int] | None = None
) -> dict[str, Parameter]:
    """Full name -> parameter, in the order of ``GPT.named_parameters``.

    Args:
        config: the shape of the complete model.
        layers: indices into the flat list of layers; all if omitted. As in ``GPT``, a tied head is
            a parameter of its own only if ``layers`` does not contain the embedding.
    """
    layers = range(layer_count(config)) if layers is None else layers
    rows_of = {"embedding": embedding_rows(config), "head": head_rows(config)}
    rows_of_block = block_rows(config)
    parameters = (
        Parameter(layer=name, kind=kind, row=row)
        for name in (layer_name(config, layer) for layer in layers)
        for row in rows_of.get(name, rows_of_block).values()
        for kind in _KINDS[: 1 + row.bias]
    )
    shares = config.tie_word_embeddings and 0 in layers
    return {p.name: p for p in parameters if not (shares and p.name == HEAD_WEIGHT)}


def active_parameters(config: ModelConfig) -> int:
    """Number of parameters that a token uses: all except those of experts that it does not use."""
    every = parameters_of(config).values()
    return sum(p.elements // p.row.experts * p.row.active_experts for p in every)


def parameters_in_words(config: ModelConfig) -> str:
    """Text with the number of parameters and, if there are experts, of those that a token uses."""
    total = f"{sum(p.elements for p in parameters_of(config).values()):,} parameters"
    return (
        total if config.num_experts is None else f"{total} ({active_parameters(config):,} active)"
    )


def embedding_rows(config: ModelConfig) -> dict[str, Row]:
    """Name within the embedding -> row."""
    rows = [
        Row(
            name="tokens",
            kind="embedding",
            sections={"tokens": config.vocab_size},
            columns=config.hidden_size,
            split="vocabulary",
            initial=config.initializer_range,
        )
    ]
    if config.positions == "learned":
        rows.append(
            Row(
                name="positions",
                kind="embedding",
                sections={"positions": config.max_position_embeddings},
                columns=config.hidden_size,
                split="replicated",
                initial=config.initializer_range / 2,
            )
        )
    return {row.name: row for row in rows}


def block_rows(config: ModelConfig) -> dict[str, Row]:
    """The modules of a block, by name; the same for all blocks."""
    hidden, width, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, shared = config.num_attention_heads * head, config.num_key_value_heads * head
    scale, gated = config.initializer_range, config.is_gated
    # Each block adds twice to the residual stream (Radford et al. 2019, section 2.3).
    residual_scale = scale / math.sqrt(2 * config.num_hidden_layers)
    qkv = Row(
        name="attention.qkv",
        kind="linear",
        sections={"query": queries, "key": shared, "value": shared},
        columns=hidden,
        bias=config.qkv_bias,
        split="heads",
        initial=scale,
    )
    norms_of_heads = [
        Row(
            name=f"attention.{name}_norm",
            kind="rms_norm",
            sections={name: width} if config.qk_norm == "all_heads" else {"head": head},
            split="heads" if config.qk_norm == "all_heads" else "each head",
            eps=config.rms_norm_eps,
        )
        for name, width in (("query", queries), ("key", shared))
        if config.qk_norm
    ]
    output = Row(
        name="attention.output",
        kind="linear",
        sections={"hidden": hidden},
        columns=queries,
        bias=config.attention_output_bias,
        split="columns",
        initial=residual_scale,
    )
    up = Row(
        name="mlp.gate_up" if gated else "mlp.up",
        kind="linear",
        sections={"gate": width, "up": width} if gated else {"up": width},
        columns=hidden,
        bias=config.mlp_bias,
        split="rows",
        initial=scale,
    )
    down = Row(
        name="mlp.down",
        kind="linear",
        sections={"hidden": hidden},
        columns=width,
        bias=config.mlp_bias,
        split="columns",
        initial=residual_scale,
    )
    mlp = [up, down] if config.num_experts is None else _expert_rows(config, residual_scale)
    attention = [_norm(config, "attention_norm"), qkv, *norms_of_heads, output]
    return {row.name: row for row in [*attention, _norm(config, "mlp_norm"), *mlp]}


def _expert_rows(config: ModelConfig, residual_scale: float) -> list[Row]:
    """Return the rows of the router and of the experts of a block.

    ``mlp.gate_up`` has gate and up of the first expert, then those of the second one, and so on.
    """
    count, active = config.num_experts, config.num_experts_per_tok
    assert count is not None and active is not None, "a rule checks that both are stated"
    router = Row(
        name="mlp.router",
        kind="router",
        sections={"experts": count},
        columns=config.hidden_size,
        split="replicated",
        initial=config.initializer_range,
    )
    gate_up = Row(
        name="mlp.gate_up",
        kind="experts",
        sections=dict.fromkeys(
            (f"{expert}.{part}" for expert in range(count) for part in ("gate", "up")),
            config.expert_width,
        ),
        columns=config.hidden_size,
        split="experts",
        initial=config.initializer_range,
        experts=count,
        active_experts=active,
    )
    down = Row(
        name="mlp.down",
        kind="experts",
        sections={f"{e}": config.hidden_size for e in range(count)},
        columns=config.expert_width,
        split="experts",
        initial=residual_scale,
        experts=count,
        active_experts=active,
    )
    return [router, gate_up, down]


def head_rows(config: ModelConfig) -> dict[str, Row]:
    """The modules of the head (final norm and output projection), by name.

    The output projection is included even if its weight is tied to the embedding.
    """
    output = Row(
        name="output",
        kind="linear",
        sections={"tokens": config.vocab_size},
        columns=config.hidden_size,
        split="vocabulary",
        initial=config.initializer_range,
    )
    return {"norm": _norm(config, "norm"), "output": output}


def _norm(config: ModelConfig, name: str) -> Row:
    is_layer_norm = config.norm == "layer_norm"
    return Row(
        name=name,
        kind=config.norm,
        sections={"hidden": config.hidden_size},
        bias=is_layer_norm,
        split="replicated",
        eps=config.layer_norm_epsilon if is_layer_norm else config.rms_norm_eps,
    )


_EMBEDDING_OPERATIONS_PER_ELEMENT = 4
"""An embedding has no matrix product. A look-up and the scatter of its gradient move about this
many elements, which only breaks ties when layers are assigned to pipeline stages."""


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> list[float]:
    """FLOPs a token of the forward pass of each layer: [embedding, block, ..., block, head].

    Only matrix products are counted, 2 m k n for a product of (m, k) by (k, n), and attention over
    the full S x S square, whatever its mask (Narayanan et al. 2021, appendix; Chowdhery et al.
    2022, PaLM, appendix B).
    """
    scores_and_mix = 2 * 2 * sequence_length * config.num_attention_heads * config.head_dim
    block = float(_products(block_rows(config).values()) + scores_and_mix)
    head = float(_products(head_rows(config).values()))
    embedding = float(_EMBEDDING_OPERATIONS_PER_ELEMENT * config.hidden_size)
    return [embedding, *[block] * config.num_hidden_layers, head]


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of forward and backward of the complete model.

    A backward costs twice the forward. Recomputed operations are not counted, so MFU compares
    useful work.
    """
    # Without the embedding, which has no matrix product.
    return 3.0 * sum(forward_flops_per_token(config, sequence_length)[1:])


def _products(rows: Iterable[Row]) -> int:
    """FLOPs a token of the matrix products of the forward pass."""
    matrices = (row for row in rows if row.kind in ("linear", "router", "experts"))
    return sum(2 * row.active_rows * row.columns for row in matrices if row.columns)
