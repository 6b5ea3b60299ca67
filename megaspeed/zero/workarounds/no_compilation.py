"""DeepSpeed 0.19.8, comm/torch.py:47-53 and ops/__init__.py:16-33: starting the communication
backend builds a C++ extension (``deepspeed_shm_comm``, about half a minute with a compiler, an
error without one) that only inference uses.

The registry of compatible operators is filled on first use; an empty one says that there is nothing
to build.
"""

import deepspeed.ops


def declare_no_compiled_ops() -> None:
    """Tells DeepSpeed that no operator can be compiled here, so that it never tries."""
    deepspeed.ops.__compatible_ops__ = {}
