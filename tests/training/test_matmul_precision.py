"""torch's switches for matrix products on a GPU have the values of the JSON, not torch's defaults.

A build without CUDA has these switches, too, and stores their values. So the test reads them back.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megaspeed.config.run import TrainingConfig
from megaspeed.training.rank_model import set_matmul_precision
from tests.support.tiny import tiny_run

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SWITCHES = (
    "allow_tf32",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


def switches() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda.matmul, name) for name in SWITCHES)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = switches()
    yield
    for name, value in zip(SWITCHES, before, strict=True):
        setattr(torch.backends.cuda.matmul, name, value)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_gpu_gets_what_the_json_says(tf32: bool, reduced: bool) -> None:
    training = TrainingConfig(steps=1, allow_tf32=tf32, allow_reduced_precision_reduction=reduced)
    set_matmul_precision(training, CUDA)
    assert switches() == (tf32, reduced, reduced)


def test_sums_are_exact_unless_the_json_says_otherwise() -> None:
    assert switches()[1:] == (True, True), "torch's default is inexact"
    set_matmul_precision(TrainingConfig(steps=1), CUDA)
    assert switches() == (False, False, False)


def test_a_cpu_is_left_as_it_is() -> None:
    before = switches()
    set_matmul_precision(TrainingConfig(steps=1, allow_tf32=True), CPU)
    assert switches() == before


def test_the_resolved_config_records_both() -> None:
    training = tiny_run(Path("text"), training={"allow_tf32": True}).as_json()["training"]
    assert training["allow_tf32"] is True
    assert training["allow_reduced_precision_reduction"] is False
