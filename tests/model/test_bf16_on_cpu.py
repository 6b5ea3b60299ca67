"""If a CPU is slow in bf16, a run in bf16 prints a warning with the measured factor.

The tests disable oneDNN, so torch is slow on every CPU.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megaspeed.config.run import RunConfig
from megaspeed.model import bf16_on_cpu
from megaspeed.model.bf16_on_cpu import bf16_warning
from megaspeed.model.gpt import GPT
from tests.support.machine import limit
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


def config(bf16: bool = True) -> RunConfig:
    return tiny_run(TEXT, bf16={"enabled": bf16}).config


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the processor seconds of the faster of two calls."""
    times = []
    for _ in range(2):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def block_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of the forward and backward of a GPT's block for 1,024 tokens."""
    shape = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 128}
    model = tiny_run(TEXT, model=shape, data={"sequence_length": 128}).config.model
    block = GPT(model, chunks=[range(1, 2)]).to(dtype)
    x, samples = torch.randn(8, 128, 128).to(dtype), torch.arange(8)
    return cpu_seconds(lambda: block(x, samples).sum().backward())


def test_slow_bf16_is_a_warning_with_the_factor_of_real_products_and_a_fix(
    without_onednn: None,
) -> None:
    (warning,) = bf16_warning(config(), "cpu")
    real = block_seconds(torch.bfloat16) / block_seconds(torch.float32)
    assert "as in fp32 on this CPU" in warning and "--set bf16.enabled=false" in warning
    (factor,) = re.findall(r"take (\d+) times as long as in fp32", warning)
    assert real > 2, "a block is slow, too; its other operations are not"
    assert real / 2 < int(factor) < 100


def test_the_measurement_is_short_and_keeps_the_number_of_threads(
    without_onednn: None, two_threads: None
) -> None:
    run = config()
    assert cpu_seconds(lambda: list(bf16_warning(run, "cpu"))) < limit(1)
    assert torch.get_num_threads() == 2


def test_products_that_are_as_fast_as_in_fp32_cause_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    assert list(bf16_warning(config(), "cpu")) == []


@pytest.mark.parametrize(
    ("bf16", "device"), [(True, "NVIDIA H100"), (True, "cuda"), (False, "cpu")]
)
def test_other_runs_are_not_measured(
    bf16: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16_on_cpu, "_product_seconds", pytest.fail)
    assert list(bf16_warning(config(bf16), device)) == []
