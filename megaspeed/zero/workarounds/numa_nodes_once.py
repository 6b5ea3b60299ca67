"""DeepSpeed 0.19.8, accelerator/cpu_accelerator.py:70-79 and utils/numa.py:27: on a CPU every
question for the number of devices starts ``numactl`` as a process of its own, some ten times an
optimizer step and rank, whether it is installed or not.

A machine's nodes do not change while a process runs, so that they are counted once.
"""

import functools

import deepspeed.utils.numa


def count_numa_nodes_once() -> None:
    """Lets DeepSpeed remember what ``numactl`` said."""
    if not hasattr(deepspeed.utils.numa.get_numa_cores, "cache_info"):
        deepspeed.utils.numa.get_numa_cores = functools.cache(deepspeed.utils.numa.get_numa_cores)
