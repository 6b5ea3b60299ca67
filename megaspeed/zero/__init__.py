"""ZeRO on the data axis. Only this package imports DeepSpeed."""

import os

import torch

# DeepSpeed 0.19.8, accelerator/real_accelerator.py:213, looks for accelerators when it is first
# imported, and warns if it finds only the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
