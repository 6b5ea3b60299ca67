"""A training run on a rank whose process groups cannot be ended, and that fails in step 2.

    python -m tests.paper_gpu.failing_rank RANK_THAT_FAILS <arguments of scripts/pretrain.py>

NCCL's ``destroy_process_group`` waits for kernels that wait for other ranks. Here it waits forever,
and so does the function that aborts groups.
"""

import os
import runpy
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaspeed.topology import context
from megaspeed.zero.engine import ZeroEngine

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain.py"
BACKWARDS_OF_A_STEP = 4


def block_for_ever(*arguments: object) -> None:
    """Block, as a wait for a rank that never answers does."""
    threading.Event().wait()


def fail_in_the_second_step() -> None:
    """Raise in the second backward pass of the second step."""
    backward, calls = ZeroEngine.backward, count()

    def fails(*arguments: Any, **options: Any) -> None:
        if next(calls) == BACKWARDS_OF_A_STEP + 1:
            raise RuntimeError("broken on purpose")
        backward(*arguments, **options)

    ZeroEngine.backward = fails  # type: ignore[method-assign]


if __name__ == "__main__":
    dist.destroy_process_group = block_for_ever  # type: ignore[assignment]
    context._abort_process_group = block_for_ever  # type: ignore[attr-defined, assignment]
    failing, *sys.argv[1:] = sys.argv[1:]
    if os.environ["RANK"] == failing:
        fail_in_the_second_step()
    runpy.run_path(str(SCRIPT), run_name="__main__")
