"""The inputs of each optimizer step: its micro-batches and its learning rate.

    samples consumed so far -> micro-batches of the step, this data rank's rows
    steps taken so far      -> learning rate

Both are functions of these counts and have no state. So a step can be repeated or skipped, and a
checkpoint needs only the counts.
"""

import functools

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.topology.context import ParallelContext
from megaspeed.training.learning_rate import learning_rate
from megaspeed.training.worker import Load


class StepInputs:
    """One rank's part of every step's samples, and every step's learning rate."""

    def __init__(self, run: Run, corpus: PreparedCorpus, context: ParallelContext) -> None:
        self._run = run
        self.shape = LoaderShape(
            micro_batch_size=run.batch.micro_batch_size,
            gradient_accumulation_steps=run.batch.gradient_accumulation_steps,
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
        )
        """How the samples of a step are divided."""
        self._loader = TrainingLoader(corpus, self.shape, context.device)

    def load(self, samples: int) -> Load:
        """Return a function that maps a micro-batch index to the micro-batch.

        The step is the one after ``samples`` samples, including those of skipped steps.
        """
        return functools.partial(self._loader.micro_batch, samples)

    def learning_rate(self, steps_taken: int) -> float:
        """The rate of the step after ``steps_taken`` others; a skipped step is not counted."""
        config = self._run.config
        return learning_rate(
            config.optimizer, config.scheduler, step=steps_taken, steps=config.training.steps
        )

    def close(self) -> None:
        """End the thread that reads ahead, if there is one."""
        self._loader.close()
