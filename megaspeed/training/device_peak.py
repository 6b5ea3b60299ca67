"""Dense peak rates of accelerators, for model FLOPs utilisation (MFU)."""

import torch

# Dense tensor-core TFLOP/s in bf16 (fp16 is the same), without 2:4 sparsity, from NVIDIA's data sheets. The SXM part of
# each; the first pattern found in the device's name counts, so longer names stand first.
_BF16_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 311.8,
    "A800": 311.8,
    "L40S": 362.0,
    "L4": 121.0,
    "A40": 149.7,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
}


def peak_flops_per_second(device: torch.device) -> float | None:
    """The device's dense bf16/fp16 peak; None where it is not known, which makes MFU "n/a" and never a guess."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = (rate * 1e12 for pattern, rate in _BF16_TFLOPS.items() if pattern in name)
    return next(found, None)
