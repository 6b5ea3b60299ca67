"""ZeRO's portions if the JSON omits them: they follow the size of the model.

DeepSpeed's fixed defaults (5e8 elements a bucket, 5e7 fetched ahead, parameters under 1e5 elements
kept whole) suit one size of model. With a smaller model a bucket holds the complete gradient,
everything is fetched at once, and a higher stage saves nothing. Here

    reduce_bucket_size, stage3_prefetch_bucket_size    one block, 12 hidden_size^2 / tp
    stage3_max_live_parameters                         two blocks: the current one and the next
    stage3_param_persistence_threshold                 10 x hidden_size: norms and biases stay whole

DeepSpeed fetches another prefetch bucket ahead at every module, so it is the number of live
parameters that bounds what a rank has gathered.
"""

from megaspeed.config.model import ModelConfig
from megaspeed.config.zero_optimization import ZeroConfig

_MATRICES = 12
"""Squares of the hidden size in a block: 4 in the attention, about 8 in the feed-forward layer."""

_HIDDEN_SIZES_THAT_STAY_WHOLE = 10


def definite_zero(zero: ZeroConfig, model: ModelConfig, tp: int) -> ZeroConfig:
    """``zero`` with every portion stated."""
    block = _MATRICES * model.hidden_size**2 // tp
    portions = {
        "reduce_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_param_persistence_threshold": _HIDDEN_SIZES_THAT_STAY_WHOLE * model.hidden_size,
    }
    return zero.model_copy(
        update={name: value for name, value in portions.items() if getattr(zero, name) is None}
    )
