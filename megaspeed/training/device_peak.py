"""Dense peak rates of accelerators, for model FLOPs utilisation (MFU)."""

import re

import torch

from megaspeed.config.resolve import Precision

# Dense tensor-core TFLOP/s in bf16 (fp16 is the same), without 2:4 sparsity, from NVIDIA's data
# sheets; of the SXM part where the name does not say. The first whose words stand in the device's
# name counts, so longer names stand first. A $ ends the name: an RTX 4090 Laptop GPU is another.
_BF16_TFLOPS = {
    r"GB200": 2500.0,
    r"B200": 2250.0,
    r"GH200": 989.4,
    r"H200 NVL": 835.0,
    r"H200": 989.4,
    r"H100 PCIe": 756.0,
    r"H100 NVL": 835.0,
    r"H100": 989.4,
    r"H800 PCIe": 756.0,
    r"H800": 989.4,
    r"A100": 311.8,
    r"A800": 311.8,
    r"L40S": 362.0,
    r"L4": 121.0,
    r"A40": 149.7,
    r"A10": 125.0,
    r"RTX 4090$": 165.2,
    r"RTX 3090$": 71.0,
    r"V100-PCIE": 112.0,
    r"V100": 125.0,
}


def peak_flops_per_second(device: torch.device, precision: Precision) -> float | None:
    """The device's dense peak in a run's precision.

    None where it is not known (in fp32 it depends on whether TF32 is used), which makes the MFU
    "n/a" and never a guess.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(device_name: str) -> float | None:
    """The same by the name that the driver gives, such as "NVIDIA H100 80GB HBM3"."""
    found = (
        rate * 1e12
        for pattern, rate in _BF16_TFLOPS.items()
        if re.search(rf"\b{pattern}(?!\w)", device_name)
    )
    return next(found, None)
