"""DeepSpeed 0.19.8 reads its surroundings from the environment, where a plain process says nothing.

accelerator/real_accelerator.py:213 looks for accelerators when the package is first imported, and
warns where it ends with the CPU; runtime/zero/partition_parameters.py:1138 takes the device of
partitioned parameters from LOCAL_RANK, which only launchers set.
"""

import os

import torch


def name_the_accelerator() -> None:
    """Says "cpu" where no GPU is visible; to be called before deepspeed is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def name_the_local_rank(device: torch.device) -> None:
    """Sets LOCAL_RANK to the device's index where no launcher has set it."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
