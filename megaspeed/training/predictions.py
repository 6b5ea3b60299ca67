"""Predictions of ``analysis``, which imports this folder; so the script passes them in."""

from collections.abc import Callable
from dataclasses import dataclass

from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.training.banner import PredictPeaks
from megaspeed.zero.engine import ZeroEngine


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Functions that a run may ask.

    Attributes:
        peaks: for the banner; None if nobody predicts them.
        out_of_memory: what a rank says if its memory has run out; the engine is None while it is
            built.
    """

    peaks: PredictPeaks | None = None
    out_of_memory: Callable[[Run, ParallelContext, ZeroEngine | None], str] = (
        lambda run, context, engine: ""
    )
