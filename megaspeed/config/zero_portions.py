"""ZeRO's portions if the JSON omits them: they follow the size of the model.

DeepSpeed's fixed defaults (5e8 elements a bucket, parameters under 1e5 elements kept whole) suit
one size of model. With a smaller model a bucket holds the complete gradient, every parameter is
kept, and a higher stage saves nothing. Here

    reduce_bucket_size                    one block, 12 hidden_size^2 / tp
    stage3_param_persistence_threshold    10 x hidden_size: norms and biases stay whole
"""

from megaspeed.config.model import ModelConfig
from megaspeed.config.zero_optimization import ZeroConfig

_MATRICES = 12
"""Squares of the hidden size in a block: 4 in the attention, about 8 in the feed-forward layer."""

_HIDDEN_SIZES_THAT_STAY_WHOLE = 10


def definite_zero(zero: ZeroConfig, model: ModelConfig, tp: int) -> ZeroConfig:
    """``zero`` with every portion stated."""
    portions = {
        "reduce_bucket_size": _MATRICES * model.hidden_size**2 // tp,
        "stage3_param_persistence_threshold": _HIDDEN_SIZES_THAT_STAY_WHOLE * model.hidden_size,
    }
    return zero.model_copy(
        update={name: value for name, value in portions.items() if getattr(zero, name) is None}
    )
