"""Pretrains a GPT: ``deepspeed scripts/pretrain.py --config ds_configs/zero3.json``.

Runs the same under ``deepspeed``, ``torchrun``, ``srun`` and plain ``python`` (one process).
"""

from megaspeed.topology.process_exit import end_process
from megaspeed.training.supervisor import run_supervised

if __name__ == "__main__":
    end_process(run_supervised())
