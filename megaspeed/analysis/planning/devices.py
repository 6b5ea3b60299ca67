"""Accelerators by name, and how much of their memory a run may use.

    usable_bytes = USABLE_FRACTION x memory_bytes

The number in a name is the vendor's ("80 GB"). It is the GiB of the memory chips, of which error
correction and firmware use a part. ``memory_bytes`` is the rest, which the driver reports
(``nvidia-smi`` in MiB, ``rocm-smi`` in bytes). An "80 GB" H100 has 81,559 MiB = 79.6 GiB =
85.5 GB. A "48 GB" L40S, whose error correction is in the memory itself, has 46,068 MiB. If driver
releases differ, the table has the smaller total.

Sources: the vendors' data sheets (NVIDIA H100, H200, GH200, DGX B200, A100, V100, L40S, A10, L4,
T4, GeForce RTX; AMD Instinct MI300X) for the names, and the driver's report for the totals.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

USABLE_FRACTION = 0.92
"""The fraction of a device's memory that a plan may use.

The rest is for memory that is not predicted: the CUDA context and loaded kernels (about
0.5 GiB), workspaces of the matrix library, NCCL's buffers (some hundred MiB for each communicator:
pp, dp, tp and the world), and holes between blocks of torch's caching allocator (a few percent).
"""

GPUS_PER_NODE = 8
"""The default, which DGX and HGX machines have."""


class DeviceError(ValueError):
    """The table has no such accelerator."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator."""

    name: str  # as on the command line
    memory_bytes: int  # total of one device, as its driver reports it

    @property
    def usable_bytes(self) -> int:
        """Memory that the tensors of a run may use."""
        return int(USABLE_FRACTION * self.memory_bytes)


_MEMORY_MIB = {
    "b200-180gb": 183_359,
    "gh200-96gb": 97_871,
    "h200-141gb": 143_771,
    "h100-80gb": 81_559,
    "h100-94gb": 95_830,
    "a100-40gb": 40_536,
    "a100-80gb": 81_251,
    "v100-16gb": 16_160,
    "v100-32gb": 32_510,
    "l40s-48gb": 46_068,
    "a10-24gb": 23_028,
    "l4-24gb": 23_034,
    "t4-16gb": 15_360,
    "rtx-5090-32gb": 32_607,
    "rtx-4090-24gb": 24_564,
    "rtx-3090-24gb": 24_576,
    "mi300x-192gb": 196_592,
}

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        name: Device(name=name, memory_bytes=mebibytes * 2**20)
        for name, mebibytes in _MEMORY_MIB.items()
    }
)


def device_named(name: str) -> Device:
    """The accelerator of that name. Case is ignored.

    Raises:
        DeviceError: with the nearest name and all names.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        close = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.3)
        nearest = f"the nearest is {close[0]}; " if close else ""
        raise DeviceError(
            f"there is no device called {name!r}; {nearest}there are {', '.join(DEVICES)}"
        )
    return device
