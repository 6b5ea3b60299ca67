"""Functions of ``analysis``. It imports this folder, so the script passes the functions in."""

from collections.abc import Callable
from dataclasses import dataclass

from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.training.banner import PredictPeaks
from megaspeed.zero.engine import ZeroEngine


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Functions that a run calls.

    Attributes:
        peaks: predicts the peak memory for the banner; None: the banner shows no peaks.
        out_of_memory: returns the report of a rank whose memory has run out; its engine argument
            is None while the engine is built.
    """

    peaks: PredictPeaks | None = None
    out_of_memory: Callable[[Run, ParallelContext, ZeroEngine | None], str] = (
        lambda run, context, engine: ""
    )
