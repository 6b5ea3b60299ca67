"""Names and shapes of the model's parameters, without making any. Pure arithmetic, no torch.

They are those of ``GPT`` (``gpt.py``), in the order of its ``named_parameters``.
"""

from collections.abc import Iterator

from megaspeed.config import ModelConfig

Shape = tuple[int, ...]

EMBEDDING_WEIGHT = "embedding.tokens.weight"
HEAD_WEIGHT = "head.output.weight"


def layer_count(config: ModelConfig) -> int:
    """Length of the flat list of layers: the blocks, the embedding and the head."""
    return config.num_hidden_layers + 2


def logical_name(config: ModelConfig, name: str) -> str:
    """The name under which a parameter exists once: a tied head is the token embedding."""
    return EMBEDDING_WEIGHT if config.tie_word_embeddings and name == HEAD_WEIGHT else name


def decays(name: str) -> bool:
    """Whether the parameter ``name`` is subject to weight decay: matrices and embeddings are."""
    return name.endswith(".weight") and "norm" not in name


def parameter_shapes(config: ModelConfig, layers: range) -> dict[str, Shape]:
    """Full name -> full shape of each parameter of the flat layers ``layers``.

    A tied head stands here only where ``layers`` leave the embedding out, as in ``GPT``.
    """
    last = config.num_hidden_layers + 1
    shapes: dict[str, Shape] = {}
    for layer in layers:
        if layer == 0:
            shapes.update(_embedding(config))
        elif layer < last:
            shapes.update(_block(config, f"blocks.{layer - 1}"))
        else:
            shapes.update(_head(config, shares_embedding=0 in layers))
    return shapes


def _embedding(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield "embedding.tokens.weight", (config.vocab_size, config.hidden_size)
    if config.architecture == "gpt2":
        yield (
            "embedding.positions.weight",
            (config.max_position_embeddings, config.hidden_size),
        )


def _block(config: ModelConfig, name: str) -> Iterator[tuple[str, Shape]]:
    hidden, width = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    mixed = config.num_attention_heads * config.head_dim
    yield from _norm(config, f"{name}.attention_norm")
    yield from _linear(config, f"{name}.attention.qkv", heads * config.head_dim, hidden)
    yield from _linear(config, f"{name}.attention.output", hidden, mixed)
    yield from _norm(config, f"{name}.mlp_norm")
    if config.architecture == "gpt2":
        yield from _linear(config, f"{name}.mlp.up", width, hidden)
    else:
        yield from _linear(config, f"{name}.mlp.gate_up", 2 * width, hidden)
    yield from _linear(config, f"{name}.mlp.down", hidden, width)


def _head(config: ModelConfig, *, shares_embedding: bool) -> Iterator[tuple[str, Shape]]:
    yield from _norm(config, "head.norm")
    if not (config.tie_word_embeddings and shares_embedding):
        yield "head.output.weight", (config.vocab_size, config.hidden_size)


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.architecture == "gpt2":
        yield f"{name}.bias", (config.hidden_size,)


def _linear(config: ModelConfig, name: str, rows: int, columns: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if config.architecture == "gpt2":
        yield f"{name}.bias", (rows,)
