"""Run ``megaspeed verify`` with a mistake that the first step does not show.

From step 2 on, the ranks use 1.5 times the learning rate. The ranks import this file, as they
import every program's main file. So they have the mistake, too.
"""

import sys

from megaspeed.cli import main
from megaspeed.training.worker import StepInputs

right = StepInputs.learning_rate


def wrong(inputs: StepInputs, steps_taken: int) -> float:
    return right(inputs, steps_taken) * (1.5 if steps_taken else 1.0)


StepInputs.learning_rate = wrong  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
