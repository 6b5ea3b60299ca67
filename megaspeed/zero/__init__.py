"""The fence round DeepSpeed: the only package that imports it."""

from megaspeed.zero.workarounds.process_environment import name_the_accelerator

name_the_accelerator()

# ruff: noqa: E402  these import deepspeed, which looks for its accelerator as it is imported
from megaspeed.zero.build import DTYPES, build_engine
from megaspeed.zero.engine import StepOutcome, ZeroEngine
from megaspeed.zero.fragments import GradientFragment
from megaspeed.zero.whole_parameters import whole_parameters

__all__ = [
    "DTYPES",
    "GradientFragment",
    "StepOutcome",
    "ZeroEngine",
    "build_engine",
    "whole_parameters",
]
