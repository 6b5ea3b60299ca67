"""The only package that trains with DeepSpeed, except for a peer of ``bench``."""

import os

import torch


def name_the_accelerator() -> None:
    """Set DS_ACCELERATOR to "cpu" if no GPU is visible. DeepSpeed 0.19.8 looks for accelerators
    when it is first imported, and warns if it finds none (accelerator/real_accelerator.py:213).
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


name_the_accelerator()  # before any module of this package imports deepspeed
