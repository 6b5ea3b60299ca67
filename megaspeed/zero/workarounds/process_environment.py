"""DeepSpeed 0.19.8 reads its surroundings from the environment, where a plain process says nothing.

accelerator/real_accelerator.py:213 looks for accelerators when the package is first imported, and
warns where it ends with the CPU; runtime/zero/partition_parameters.py:1138 takes the device of
partitioned parameters from LOCAL_RANK, which torchrun and deepspeed set, and others do not.
"""

import os

import torch


def name_the_accelerator() -> None:
    """Says "cpu" where no GPU is visible; to be called before deepspeed is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def name_the_local_rank(device: torch.device, local_rank: int) -> None:
    """Sets LOCAL_RANK: on a GPU to its index, which differs from the launcher's where each process
    sees one GPU only. engine.py:1962 demands the same of Open MPI's variable where there is one.
    """
    number = str(local_rank if device.index is None else device.index)
    os.environ["LOCAL_RANK"] = number
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = number
