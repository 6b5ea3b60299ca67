"""Pretrains a GPT: ``deepspeed scripts/pretrain.py --config ds_configs/zero3.json``.

Runs the same under ``deepspeed``, ``torchrun``, ``srun``, ``mpirun`` and plain ``python`` (one
process).
"""

import os
import signal
from typing import TYPE_CHECKING

# torch reads this when it is imported. Without it, every rank prints dozens of lines about its
# connection to the store when a job ends.
os.environ["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")

from megaspeed.topology.process_end import end_process, keep_output_open, launcher_processes
from megaspeed.training.supervisor import run_supervised

if TYPE_CHECKING:
    from megaspeed.config.resolve import Run
    from megaspeed.topology.context import ParallelContext
    from megaspeed.zero.engine import ZeroEngine

LAUNCHERS = launcher_processes()  # one that ends while torch is loaded would not be found later


def train() -> int:
    """Run one rank. The imports are here because a supervisor does not need them."""
    from megaspeed.analysis.planning.prediction import predict_peaks
    from megaspeed.training.job import Predictions
    from megaspeed.training.pretrain import main

    predictions = Predictions(peaks=predict_peaks, out_of_memory=explain_out_of_memory)
    return main(predictions=predictions, launchers=LAUNCHERS)


def explain_out_of_memory(
    run: "Run", context: "ParallelContext", engine: "ZeroEngine | None"
) -> str:
    """Explain a lack of memory. The import is here because it is rarely needed."""
    from megaspeed.analysis.measurement.out_of_memory import explain_out_of_memory as explain

    return explain(run, context, engine)


if __name__ == "__main__":
    keep_output_open()
    try:
        code = run_supervised(train)
    except KeyboardInterrupt:  # before the ranks have met
        code = 128 + signal.SIGINT
    end_process(code)
