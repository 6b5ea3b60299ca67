"""What models of other families have and megaspeed's lacks, so that an error can name it.

The families are those of transformers 5.23, and their features are from its modeling files.
"""

import re
from collections.abc import Mapping
from typing import Any

_EXPERTS = "num_(local_)?experts|n_routed_experts|num_experts_per_tok|moe_intermediate_size"
_GEMMA2 = "gemma2 gemma3 gemma3_text "
# (feature, model_type of families that have it, keys of a config.json that state it)
_LACKED = (
    ("a draft head", "", "draft_vocab_size|(eagle|dflash)_config|num_target_layers"),
    ("attention to later tokens", "albert bert deberta-v2 distilbert electra roberta", ""),
    ("cross-attention", "bart mt5 pegasus t5 whisper", "is_encoder_decoder|add_cross_attention"),
    ("mixture of experts", "deepseek_v3 llama4 mixtral phimoe qwen2_moe qwen3_moe", _EXPERTS),
    ("multi-head latent attention", "deepseek_v2 deepseek_v3", "kv_lora_rank"),
    ("state-space layers", "falcon_h1 jamba mamba mamba2 nemotron_h", "mamba_.*|ssm_.*"),
    ("linear attention", "qwen3_5 qwen3_next", "linear_num_key_heads"),
    ("soft-capping", "gemma2", "(attn|final)_logit_softcapping"),
    ("alternating windows", _GEMMA2 + "cohere2 exaone4 gpt_neo gpt_oss ministral olmo3", ""),
    ("attention sinks", "gpt_oss", ""),
    ("ALiBi positions", "bloom mpt", "(use_)?alibi"),
    ("partly rotated heads", "codegen glm glm4 gpt_neox gptj nemotron phi qwen3_5 stablelm", ""),
    ("rotated neighbours", "codegen cohere cohere2 deepseek_v3 ernie4_5 glm glm4 gptj llama4", ""),
    ("layers without rotation", "cohere2 exaone4 llama4 nemotron_h smollm3", "no_rope_layers"),
    ("two rotary bases", "gemma3 gemma3_text", "rope_local_base_freq"),
    ("attention beside the MLP", "codegen cohere cohere2 falcon gpt_neox gptj phi", ""),
    ("norms after attention and MLP", _GEMMA2 + "exaone4 glm4 olmo2 olmo3", ""),
    ("norms after additions", "openai-gpt", ""),
    ("norms without a weight", "olmo", ""),
    ("norms without a bias", "cohere cohere2 mpt", ""),
    ("norms over all heads", "olmo2 olmo3", ""),
    ("a norm after the embedding", "bloom", ""),
    ("layer norms beside SwiGLU", "phimoe stablelm", ""),
    ("GeGLU, scaled embeddings, norms that scale by 1 + weight", _GEMMA2 + "gemma", ""),
    ("ReLU, positions that begin at 2", "opt", ""),
    ("squared ReLU", "arcee nemotron nemotron_h", ""),
    ("the exact GELU", "falcon gpt_neox mpt", ""),
    ("scaled logits", "cohere cohere2", ""),
    ("scaled embeddings and residuals", "granite granitemoe", "(embedding|residual)_multiplier"),
    ("a bias of the head", "gptj phi", ""),
    ("a fused multi-query matrix", "gpt_bigcode", "multi_query"),
    ("a vision or audio tower", "", "vision_config|audio_config"),
    ("layers of different shapes", "", "per_layer_config|block_configs"),
    ("its own code", "baichuan chatglm internlm2 qwen", ""),
)


def lacked_features(keys: Mapping[str, Any]) -> dict[str, str | None]:
    """Feature -> the key of a config.json that states it; None if its ``model_type`` does.

    A key that is null, false, 0, 1 or empty states no feature.
    """
    stated = [k for k, v in keys.items() if v is True or v not in (None, False, 0, 1, "", [], {})]
    found = {}
    for feature, families, names in _LACKED:
        key = next((key for key in stated if re.fullmatch(names, key)), None)
        if key is not None or keys.get("model_type") in families.split():
            found[feature] = key
    return found
