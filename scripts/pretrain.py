"""Pretrain a GPT: ``deepspeed scripts/pretrain.py --config ds_configs/zero3.json``.

This script does the same under ``deepspeed``, ``torchrun``, ``srun``, ``mpirun`` and plain
``python`` (one process). ``megaspeed train`` does the same without a launcher.
"""

from megaspeed.cli.train import train_rank

if __name__ == "__main__":
    train_rank()
