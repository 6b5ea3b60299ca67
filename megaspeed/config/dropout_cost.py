"""The cost of dropout. GPT-2's own configuration enables it, often unnoticed."""

from collections.abc import Iterator

from megaspeed.config.resolve import Run

_DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")
_FP32_BYTES, _MIB = 4, 2**20


def dropout_warning(run: Run) -> Iterator[str]:
    """A warning with the rates, the cost and a fix; nothing for a model without dropout."""
    model = run.config.model
    rates = {name: getattr(model, name) for name in _DROPOUTS if getattr(model, name) > 0.0}
    if not rates:
        return
    stated = ", ".join(f"model.{name} {rate:g}" for name, rate in rates.items())
    cost = "each mask is computed again in backward"
    if model.attention_dropout > 0.0:
        elements = (
            run.batch.micro_batch_size
            * (model.num_attention_heads // run.grid.tp)
            * run.config.data.sequence_length**2
        )
        element_bytes = _FP32_BYTES if run.precision == "fp32" else 2
        cost = (
            "attention runs without its fused kernel and keeps two S x S matrices of each head "
            f"({elements * (_FP32_BYTES + element_bytes) / _MIB:,.1f} MiB for each block and "
            "micro-batch)"
        )
    mend = " ".join(f"model.{name}=0" for name in rates)
    yield f"the model has dropout ({stated}), so {cost}; to train without it, --set {mend}"
