"""ZeRO's portions where the JSON leaves them out: made to the measure of the model.

DeepSpeed's fixed defaults (5e8 elements a bucket, 5e7 fetched ahead, parameters under 1e5 elements
kept whole) suit one size of model: with a smaller one a bucket holds the whole gradient, everything
is fetched at once, and a higher stage saves nothing. Here

    reduce_bucket_size, stage3_prefetch_bucket_size    the matrices of one block, 1/tp of them
    stage3_max_live_parameters                         two blocks: the one at work and the next
    stage3_param_persistence_threshold                 10 x hidden_size: norms and biases stay whole

DeepSpeed fetches another prefetch bucket ahead at every module, so it is the number of live
parameters that bounds what a rank has gathered.
"""

from megaspeed.config.model import ModelConfig
from megaspeed.config.zero_optimization import ZeroConfig

_HIDDEN_SIZES_THAT_STAY_WHOLE = 10


def definite_zero(zero: ZeroConfig, model: ModelConfig, tp: int) -> ZeroConfig:
    """``zero`` with every portion stated."""
    block = block_elements(model) // tp
    portions = {
        "reduce_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_param_persistence_threshold": _HIDDEN_SIZES_THAT_STAY_WHOLE * model.hidden_size,
    }
    return zero.model_copy(
        update={name: value for name, value in portions.items() if getattr(zero, name) is None}
    )


def block_elements(model: ModelConfig) -> int:
    """Elements of the matrices of one transformer block."""
    hidden = model.hidden_size
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    attention = heads * model.head_dim * hidden + hidden * hidden
    matrices = 2 if model.architecture == "gpt2" else 3
    return attention + matrices * hidden * model.intermediate_size
