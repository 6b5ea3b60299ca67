"""`megaspeed verify` of a build with one mistake that no first step shows: from step 2 on the ranks
take their steps at 1.5 times the learning rate.

The ranks import this file too, as every program's main file, so the mistake is theirs.
"""

import sys

from megaspeed.cli import main
from megaspeed.training.step_inputs import StepInputs

right = StepInputs.learning_rate


def wrong(inputs: StepInputs, steps_taken: int) -> float:
    return right(inputs, steps_taken) * (1.5 if steps_taken else 1.0)


StepInputs.learning_rate = wrong  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
