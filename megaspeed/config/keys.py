"""The known keys of the JSON, and the one that an unknown key was probably meant to be."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.config.run import RunConfig

OTHER_NAMES: Mapping[str, str] = {
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "n_positions": "model.max_position_embeddings",
    "n_ctx": "model.max_position_embeddings",
    "n_inner": "model.intermediate_size",
    "ffn_hidden_size": "model.intermediate_size",
    "embd_pdrop": "model.embedding_dropout",
    "attn_pdrop": "model.attention_dropout",
    "resid_pdrop": "model.residual_dropout",
    "model_type": "model.architecture",
    "tp": "parallel.tensor",
    "tensor_parallel": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "pp": "parallel.pipeline",
    "pipeline_parallel": "parallel.pipeline",
    "pipeline_parallel_size": "parallel.pipeline",
    "pp_size": "parallel.pipeline",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "dp": "parallel.data",
    "data_parallel": "parallel.data",
    "data_parallel_size": "parallel.data",
    "dp_size": "parallel.data",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "train_iters": "training.steps",
    "max_steps": "training.steps",
    "global_batch_size": "train_batch_size",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "learning_rate": "optimizer.params.lr",
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
}
"""Names in the configs of GPT-2, Megatron and nanoGPT, and our keys for them."""


def unknown_key(path: KeyPath, siblings: list[str]) -> Problem:
    """The problem of an unknown key, with the nearest known key or the list of known keys.

    If `siblings` is empty, the message has neither.
    """
    name = dotted(path)
    if not siblings:
        return Problem(path, f"{name} is an unknown key")
    if name in all_key_paths():
        return Problem(
            path,
            f"{name} belongs to another {path[0]}.type than the one chosen; remove it (null "
            "removes an inherited key)",
        )
    nearest = _nearest(path, siblings)
    if nearest is not None:
        message = f"{name} is an unknown key; the nearest known key is {nearest}"
        return Problem(path, message, meant=tuple(nearest.split(".")))
    where = dotted(path[:-1]) or "the top level"
    return Problem(path, f"{name} is an unknown key; {where} knows {', '.join(sorted(siblings))}")


def keys_at(path: KeyPath, values: Mapping[str, Any]) -> list[str]:
    """The known keys of the section at `path`; `values` states which scheduler it is."""
    models: tuple[type[BaseModel], ...] = (RunConfig,)
    here: Any = values
    for part in path:
        if isinstance(part, int):  # the sections in a list are those of its field
            here = here[part] if isinstance(here, list) else None
            continue
        here = here.get(part) if isinstance(here, dict) else None
        models = tuple(
            inner
            for model in models
            if part in model.model_fields
            for inner in _sections_in(model.model_fields[part].annotation)
        )
        kind = here.get("type") if isinstance(here, dict) else None
        models = tuple(model for model in models if kind in _types(model)) or models
    return sorted({key for model in models for key in model.model_fields})


@cache
def all_key_paths() -> tuple[str, ...]:
    """Every key of the JSON as a dotted path, containers included."""
    return tuple(dict.fromkeys(_walk(RunConfig, ())))


def _nearest(path: KeyPath, siblings: list[str]) -> str | None:
    section, name = path[:-1], str(path[-1])
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    elsewhere = [known for known in all_key_paths() if known.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if elsewhere and not (close and _differs_by_little(name, close[0])):
        return elsewhere[0]
    if close:
        return dotted((*section, close[0]))
    leaves = {known.rpartition(".")[2]: known for known in reversed(all_key_paths())}
    far = difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)
    return leaves[far[0]] if far else None


def _differs_by_little(name: str, known: str) -> bool:
    return difflib.SequenceMatcher(None, name, known).ratio() > 0.9


def _walk(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield dotted((*path, name))
        for inner in _sections_in(info.annotation):
            yield from _walk(inner, (*path, name))


def _types(model: type[BaseModel]) -> tuple[Any, ...]:
    """The values of `type` that select this section."""
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold: `X`, `X | None`, `Annotated[X | Y, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)
