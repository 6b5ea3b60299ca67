"""What DeepSpeed 0.19.8 does when it starts.

comm/torch.py:47-53 and ops/__init__.py:16-33: starting the communication backend builds a C++
extension (``deepspeed_shm_comm``, about half a minute with a compiler, an error without one) that
only inference uses.

comm/torch.py:47-200: collectives are called by names that torch 2.13 announces to rename. Each rank
warns of it.

accelerator/cpu_accelerator.py:70-79 and utils/numa.py:27: on a CPU every call that counts devices
starts a ``numactl`` process, about ten times for each optimizer step and rank. It tries to do so
even if ``numactl`` is not installed.
"""

import functools
import warnings

import deepspeed.ops
import deepspeed.utils.numa


def declare_no_compiled_ops() -> None:
    """Declares that no operator can be compiled here, so that DeepSpeed never tries.

    The registry of compatible operators is filled on first use. An empty one means that there is
    nothing to build.
    """
    deepspeed.ops.__compatible_ops__ = {}


def hide_announced_renames() -> None:
    """Hides torch's FutureWarnings about its collectives; other warnings still come through."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*")


def count_numa_nodes_once() -> None:
    """Caches the result of ``numactl``, because nodes do not change while a process runs."""
    if not hasattr(deepspeed.utils.numa.get_numa_cores, "cache_info"):
        deepspeed.utils.numa.get_numa_cores = functools.cache(deepspeed.utils.numa.get_numa_cores)
