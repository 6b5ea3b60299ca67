"""The recorded metrics of steps, for tests of code that uses the records."""

from typing import Any

from megaspeed.training.metrics import StepMetrics

STEP_KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "train_batch_size",
    "step_time_seconds",
    "tokens_per_second",
    "tflops_per_rank",
    "mfu",
    "peak_memory_bytes",
    "skipped",
    "spike",
    "z_loss",
]
"""The keys of every step's record, in their order."""

VALIDATION_KEYS = ["step", "validation_loss", "validation_perplexity"]
"""The keys of every evaluation's record, in their order."""


def step_metrics(**values: Any) -> StepMetrics:
    """Return the metrics of a step with ordinary numbers, some of them replaced."""
    ordinary: dict[str, Any] = {
        "step": 7,
        "loss": 3.25,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens": 1344,
        "train_batch_size": 12,
        "step_time_seconds": 0.125,
        "tokens_per_second": 1536.0,
        "tflops_per_rank": 0.002,
        "mfu": None,
        "peak_memory_bytes": [2**20, 3 * 2**20],
        "skipped": False,
        "spike": None,
        "z_loss": None,
    }
    return StepMetrics(**{**ordinary, **values})
