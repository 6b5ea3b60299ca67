"""The table of accelerators: memory, rates of matrix products, bandwidths. Plain numbers, no torch.

The number in a name is the vendor's ("80 GB"). It is the size of the memory chips in GiB. Error
correction and firmware use a part of it. ``memory_bytes`` is the rest, which the driver reports
(``nvidia-smi`` in MiB, ``rocm-smi`` in bytes). An "80 GB" H100 has 81,559 MiB = 79.6 GiB =
85.5 GB. A "48 GB" L40S, whose error correction is in the memory itself, has 46,068 MiB. If driver
releases differ, the table has the smaller total.

Sources:

    memory       the driver's report; of the H100 with 96 GB, torchtitan's log (94.99 GiB)
    peaks        dense tensor-core rates without 2:4 sparsity, accumulated in fp32, of the vendors'
                 data sheets (NVIDIA V100, A100, H100, H200, GH200, DGX B200, GB200, L40S, A40, A10,
                 L4, T4, and the Ampere, Ada and Blackwell papers of GeForce; AMD Instinct MI300X).
                 A name without a variant is the SXM part. fp32 is the rate without tensor cores.
    sustained    measured on large products in training shapes: H100, H200 720 and 1,280 in fp8,
                 MI300X 620 and 990 (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark", December
                 2024); A100 271, GH200 829, B200 1,745 and 3,432, GB200 1,822 and 3,616 (Bekman,
                 "Machine Learning Engineering", table of maximum achievable matmul FLOPS). At a
                 power limit, dynamic power grows as the cube of the clock: the H100 with 96 GB has
                 500 W, so 720 x (500/700)^(1/3) = 644. Another part of a measured chip has the same
                 fraction of its peak. All others: 0.8 of the peak, as for most measured parts.
    HBM, links   data sheets. A link is one way, to all GPUs of the node together: NVLink, Infinity
                 Fabric, or PCIe of a card, as a bridge connects only pairs of cards.
    SMs          data sheets; compute units of AMD
    network      one way for each GPU, of the vendor's system of 8: DGX-1 (4 x 100 Gb/s), DGX A100
                 (8 x 200), DGX H100, H200 and B200 and MI300X platforms (8 x 400). Cards have no
                 such system; 12.5 GB/s (100 Gb/s) is assumed.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType


class DeviceError(ValueError):
    """The table does not list this accelerator."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator. Rates are in 10^12 operations a second, bandwidths in GB/s."""

    name: str  # as on the command line
    memory_bytes: int  # total of one device, as its driver reports it
    peak_16: float = 0.0  # dense, in bf16 and fp16 (V100, T4: fp16 alone)
    peak_8: float = 0.0  # dense, in fp8; 0 if the device has none
    peak_fp32: float = 0.0  # without TF32
    sustained_16: float = 0.0  # of large matrix products in bf16
    sustained_8: float = 0.0  # in fp8; 0 if the device has none
    memory_bandwidth: float = 0.0
    link_bandwidth: float = 0.0  # to the other GPUs of the node, one way
    network_bandwidth: float = 0.0  # to other nodes, one way, usual for each GPU
    processors: int = 0  # streaming multiprocessors (NVIDIA), compute units (AMD)


_COLUMNS = [field.name for field in fields(Device)][2:]  # after the name and the memory

# fmt: off
_TABLE: Mapping[str, tuple[float, ...]] = {
    #                    MiB   16 bit    fp8   fp32  sust. 16  8 bit    HBM  link network  SMs
    "gb200-186gb":   (189_471, 2500.0, 5000.0,  80.0, 1822.0, 3616.0, 8000, 900, 50.0, 152),
    "b200-180gb":    (183_359, 2250.0, 4500.0,  75.0, 1745.0, 3432.0, 7700, 900, 50.0, 148),
    "gh200-96gb":    ( 97_871,  989.4, 1978.9,  66.9,  829.0, 1535.0, 4000, 450, 50.0, 132),
    "h200-141gb":    (143_771,  989.4, 1978.9,  66.9,  720.0, 1280.0, 4800, 450, 50.0, 132),
    "h200-nvl-141gb":(143_771,  835.0, 1671.0,  60.0,  608.0, 1081.0, 4800,  64, 12.5, 132),
    "h100-80gb":     ( 81_559,  989.4, 1978.9,  66.9,  720.0, 1280.0, 3350, 450, 50.0, 132),
    "h100-96gb":     ( 97_269,  989.4, 1978.9,  66.9,  644.0, 1144.0, 2400, 450, 50.0, 132),
    "h100-94gb":     ( 95_830,  835.0, 1671.0,  60.0,  608.0, 1081.0, 3900,  64, 12.5, 132),
    "h100-pcie-80gb":( 81_559,  756.0, 1513.0,  51.0,  550.0,  979.0, 2000,  64, 12.5, 114),
    "h800-80gb":     ( 81_559,  989.4, 1978.9,  66.9,  720.0, 1280.0, 3350, 200, 50.0, 132),
    "a100-40gb":     ( 40_536,  311.8,    0.0,  19.5,  271.0,    0.0, 1555, 300, 25.0, 108),
    "a100-80gb":     ( 81_251,  311.8,    0.0,  19.5,  271.0,    0.0, 2039, 300, 25.0, 108),
    "a800-80gb":     ( 81_251,  311.8,    0.0,  19.5,  271.0,    0.0, 2039, 200, 25.0, 108),
    "v100-16gb":     ( 16_160,  125.0,    0.0,  15.7,  100.0,    0.0,  900, 150, 6.25,  80),
    "v100-32gb":     ( 32_510,  125.0,    0.0,  15.7,  100.0,    0.0,  900, 150, 6.25,  80),
    "v100-pcie-16gb":( 16_160,  112.0,    0.0,  14.0,   90.0,    0.0,  900,  16, 12.5,  80),
    "l40s-48gb":     ( 46_068,  362.0,  733.0,  91.6,  290.0,  586.0,  864,  32, 12.5, 142),
    "a40-48gb":      ( 46_068,  149.7,    0.0,  37.4,  120.0,    0.0,  696,  32, 12.5,  84),
    "a10-24gb":      ( 23_028,  125.0,    0.0,  31.2,  100.0,    0.0,  600,  32, 12.5,  72),
    "l4-24gb":       ( 23_034,  121.0,  242.5,  30.3,   97.0,  194.0,  300,  32, 12.5,  58),
    "t4-16gb":       ( 15_360,   65.0,    0.0,   8.1,   52.0,    0.0,  320,  16, 12.5,  40),
    "rtx-5090-32gb": ( 32_607,  209.5,  419.0, 104.8,  168.0,  335.0, 1792,  64, 12.5, 170),
    "rtx-4090-24gb": ( 24_564,  165.2,  330.3,  82.6,  132.0,  264.0, 1008,  32, 12.5, 128),
    "rtx-3090-24gb": ( 24_576,   71.0,    0.0,  35.6,   57.0,    0.0,  936,  32, 12.5,  82),
    "mi300x-192gb":  (196_592, 1307.4, 2614.9, 163.4,  620.0,  990.0, 5300, 448, 50.0, 304),
}
# fmt: on


def _device(name: str, mebibytes: float, *figures: float) -> Device:
    named = dict(zip(_COLUMNS, figures, strict=True))
    processors = int(named.pop("processors"))
    return Device(name=name, memory_bytes=int(mebibytes) * 2**20, processors=processors, **named)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {name: _device(name, *figures) for name, figures in _TABLE.items()}
)


def device_named(name: str) -> Device:
    """The accelerator of that name. Case is ignored.

    Raises DeviceError, with the nearest name and all names, if the table does not list it.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        close = [each for each in DEVICES if each.startswith(name.lower())]
        close += difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.3)
        nearest = f"the nearest is {close[0]}; " if close else ""
        raise DeviceError(
            f"there is no device called {name!r}; {nearest}the names are {', '.join(DEVICES)}"
        )
    return device


# What the driver calls a device -> its row. The first pattern that matches is used, so longer names
# come first. A $ marks the end of the name: an RTX 4090 Laptop GPU is not an RTX 4090. Parts that
# differ only in the size of the memory have the same peak, so any of them serves.
_DRIVER_NAMES = {
    r"GB200": "gb200-186gb",
    r"B200": "b200-180gb",
    r"GH200": "gh200-96gb",
    r"H200 NVL": "h200-nvl-141gb",
    r"H200": "h200-141gb",
    r"H[18]00 PCIe": "h100-pcie-80gb",
    r"H100 NVL": "h100-94gb",
    r"H100": "h100-80gb",
    r"H800": "h800-80gb",
    r"A100": "a100-80gb",
    r"A800": "a800-80gb",
    r"L40S": "l40s-48gb",
    r"L4": "l4-24gb",
    r"A40": "a40-48gb",
    r"A10": "a10-24gb",
    r"RTX 5090$": "rtx-5090-32gb",
    r"RTX 4090$": "rtx-4090-24gb",
    r"RTX 3090$": "rtx-3090-24gb",
    r"V100-PCIE": "v100-pcie-16gb",
    r"V100": "v100-32gb",
    r"T4": "t4-16gb",
    r"MI300X": "mi300x-192gb",
}


def device_by_name(device_name: str) -> Device | None:
    """The device with a driver's name, such as "NVIDIA H100 80GB HBM3"; None if it is unknown.

    The memory of the actual device may have another size.
    """
    for pattern, row in _DRIVER_NAMES.items():
        if re.search(rf"\b{pattern}(?!\w)", device_name):
            return DEVICES[row]
    return None


def peak_by_name(device_name: str) -> float | None:
    """The dense 16-bit peak of ``device_by_name``, in operations a second; None if unknown."""
    device = device_by_name(device_name)
    return None if device is None else device.peak_16 * 1e12
