"""Pretrains a GPT: ``deepspeed scripts/pretrain.py --config ds_configs/zero3.json``.

Runs the same under ``deepspeed``, ``torchrun``, ``srun``, ``mpirun`` and plain ``python`` (one
process).
"""

import signal

from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.lasting_output import keep_output_open
from megaspeed.topology.process_exit import end_process
from megaspeed.training.pretrain import main
from megaspeed.zero.engine import ZeroEngine


def explain_memory(run: Run, context: ParallelContext, engine: ZeroEngine | None) -> str:
    """Loads what predicts memory only if memory has run out."""
    from megaspeed.analysis.measurement.out_of_memory import explain_out_of_memory

    return explain_out_of_memory(run, context, engine)


if __name__ == "__main__":
    keep_output_open()
    try:
        code = main(explain_memory=explain_memory)
    except KeyboardInterrupt:  # before the ranks have met
        code = 128 + signal.SIGINT
    end_process(code)
