"""The most memory that this rank has held so far."""

import resource

import torch

_BYTES_PER_UNIT_OF_MAXRSS = 1024  # Linux counts in KiB


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the peak of torch's allocator, on a CPU the process's peak resident set.

    The resident set includes libraries. Neither makes the host wait for the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_UNIT_OF_MAXRSS
