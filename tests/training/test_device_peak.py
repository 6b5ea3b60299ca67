"""A device's peak rate comes from the data sheet. It is unknown rather than guessed."""

import pytest
import torch

from megaspeed.topology.devices import peak_by_name
from megaspeed.training.metrics import peak_flops_per_second


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 311.8),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_by_name(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA RTX A4000",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H20",
        "AMD Instinct MI300A",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_a_name_that_only_resembles_a_known_one_has_no_peak(name: str) -> None:
    assert peak_by_name(name) is None


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops_per_second(torch.device("cpu"), "bf16") is None


def test_an_fp32_run_has_no_peak_because_it_may_use_tf32_or_not() -> None:
    assert peak_flops_per_second(torch.device("cuda"), "fp32") is None
