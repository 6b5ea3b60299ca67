"""Tiny runs for comparing layouts with one process."""

import json
from pathlib import Path
from typing import Any

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus

GPT2 = {
    "architecture": "gpt2",
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
LLAMA = {
    "architecture": "llama",
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
MOE: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 24,
}
"""A mixture of experts."""
OLMOE = {**LLAMA, "architecture": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}

MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3}}

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
BF16_IN_FP32 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
"""Compute in bf16, and add up gradients in fp32."""


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def short_documents(text: Path, folder: Path) -> Path:
    """Write the words of ``text`` as documents of 1 to 7 words in JSON lines. Most rows contain
    several.
    """
    documents: list[str] = []
    words, start = text.read_text().split(), 0
    while start < len(words):
        length = 1 + len(documents) * 3 % 7
        documents.append(" ".join(words[start : start + length]))
        start += length
    file = folder / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return file


def tiny_run(
    text: Path,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    device_type: str = "cpu",
    **changes: Any,
) -> Run:
    """Return a run of 24 samples a step on ``text``. ``changes`` are top-level keys of the JSON."""
    values = {
        "model": GPT2,
        "parallel": {"pipeline": pp, "context": cp, "tensor": tp},
        "data": {"train": [str(text)], "validation_fraction": 0.0, "sequence_length": 16},
        "training": {"steps": 10},
        "train_batch_size": 24,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "zero_optimization": {
            "stage": 0,
            "stage3_param_persistence_threshold": 0,
            # About the size of a block, so there are several buckets.
            "reduce_bucket_size": 12 * 32**2,
            "stage3_prefetch_bucket_size": 12 * 32**2,  # each block is gathered by itself
        },
    }
    config = parse_config(merge(values, changes))
    return resolve_run(config, World(pp * dp * cp * tp, "test", device_type), name="tiny")


def tiny_corpus(run: Run, cache: Path) -> PreparedCorpus:
    """Prepare the corpus of the run."""
    return prepare_corpus(run.config.data, run.config.model.vocab_size, cache_dir=cache)
