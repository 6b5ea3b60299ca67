"""The run of a row: its settings as keys of the JSON, and a model and a batch that fit them."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from megaspeed.config.resolve import Run
from tests.parallel.covering import Row
from tests.support.tiny import BF16_IN_FP32, GPT2, LLAMA, MOE, MUON, tiny_run

_PLACES = {
    "tied": ("model", "tie_word_embeddings"),
    "key_value_heads": ("model", "num_key_value_heads"),
    "reset_at_documents": ("data", "reset_at_documents"),
    "schedule": ("parallel", "schedule"),
    "chunks": ("parallel", "virtual_stages"),
    "groups": ("parallel", "micro_batch_groups"),
    "method": ("parallel", "context_method"),
    "expert": ("parallel", "expert"),
    "exchange": ("parallel", "expert_exchange"),
    "replicate": ("parallel", "replicate"),
    "gradient_reduction": ("parallel", "gradient_reduction"),
    "sequence_parallel": ("parallel", "sequence_parallel"),
    "activation_checkpointing": ("parallel", "activation_checkpointing"),
    "active": ("model", "num_experts_per_tok"),
    "normalized": ("model", "norm_topk_prob"),
    "auxiliary": ("model", "router_aux_loss_coef"),
    "bias_rate": ("model", "router_bias_rate"),
    "z_loss": ("training", "z_loss"),
    "zero_stage": ("zero_optimization", "stage"),
    "overlap_comm": ("zero_optimization", "overlap_comm"),
    "persistent": ("zero_optimization", "stage3_param_persistence_threshold"),
}
"""Setting -> (section, key) of the JSON. ``run_of`` translates the other settings itself."""

_MODELS: dict[str, dict[str, Any]] = {"gpt2": GPT2, "llama": LLAMA, "qwen3_moe": MOE}


def run_of(row: Row, text: Path) -> Run:
    """Return the run of a row of any table. A setting that the table lacks has its default."""
    pp, *data, tp = row["layout"]
    keys: dict[str, Any] = defaultdict(dict)
    for setting, (section, key) in _PLACES.items():
        if setting in row:
            keys[section][key] = row[setting]
    model, parallel, zero = (keys[name] for name in ("model", "parallel", "zero_optimization"))
    model |= {**_MODELS[row.get("architecture", "gpt2")], **model}
    for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
        model[name] = row.get("dropout", 0.0)
    if "key_value_heads" in row:
        model["num_attention_heads"] = 8
    if row.get("schedule") == "interleaved":
        parallel |= {"schedule": "1f1b", "virtual_stages": 2}
    if len(data) == 2:
        parallel["replicate"] = data[0]
    if not row.get("gathers_ahead", True):
        zero["stage3_prefetch_bucket_size"] = 0
    if row.get("reduced_in") == "bf16":
        keys |= {"communication_data_type": "bf16", **BF16_IN_FP32}
    if row.get("optimizer") == "Muon":
        keys["optimizer"] = MUON
    model["num_hidden_layers"] = _layers_of(row)
    keys["gradient_accumulation_steps"] = row.get("micro_batches", 2)
    keys["train_batch_size"] = _samples_of(row)
    return tiny_run(text, pp=pp, dp=math.prod(data), cp=row.get("context", 1), tp=tp, **keys)


def _layers_of(row: Row) -> int:
    """Return the number of blocks. Where possible, stages and chunks have different lengths."""
    if "context" in row or len(row["layout"]) == 4:
        return 4 if row["schedule"] == "interleaved" else 3
    pp: int = row["layout"][0]
    return pp * row.get("chunks", 1) + 1


def _samples_of(row: Row) -> int:
    """Return the samples of a step. Each data rank has at least one in each micro-batch."""
    if "chunks" in row:  # their numbers of micro-batches have no small common multiple
        dp: int = row["layout"][1]
        return dp * row["micro_batches"]
    if "expert" in row and row["layout"][-1] > 1:  # tensor ranks share one of three sequences
        return 3 * int(row["layout"][1]) * int(row["micro_batches"])
    if "context" in row:
        return 4 * row.get("micro_batches", 2)
    return 48 if len(row["layout"]) == 4 else 24
