"""The most memory that each pipeline stage has held so far."""

import resource

import torch
import torch.distributed as dist

from megaspeed.topology import ParallelContext

_BYTES_PER_UNIT_OF_MAXRSS = 1024  # Linux counts in KiB


def peak_memory_by_pipeline_stage(context: ParallelContext) -> list[int]:
    """Bytes, one number for each pipeline stage: the maximum over its ranks.

    On a GPU what torch's allocator held at its peak, on a CPU the process's peak resident set,
    libraries included. A collective over all ranks.
    """
    peaks = torch.zeros(context.pp_size, dtype=torch.float64, device=context.device)
    peaks[context.pp_rank] = _own_peak(context.device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=context.world_group)
    return [int(peak) for peak in peaks.tolist()]


def _own_peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_UNIT_OF_MAXRSS
