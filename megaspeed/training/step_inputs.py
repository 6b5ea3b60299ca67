"""What each optimizer step starts from: its micro-batches and its learning rate.

    samples consumed so far -> micro-batches of the step, this data rank's rows
    steps taken so far      -> learning rate

Neither keeps a position, so a step can be trained again, skipped or resumed from.
"""

import functools

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.topology.context import ParallelContext
from megaspeed.training.learning_rate import learning_rate
from megaspeed.training.worker import Load


class StepInputs:
    """One rank's part of every step's samples, and every step's learning rate.

    Args:
        run: the resolved run.
        corpus: the prepared data.
        context: this rank's place on the data axis, and its device.
    """

    def __init__(self, run: Run, corpus: PreparedCorpus, context: ParallelContext) -> None:
        self._run = run
        self.shape = LoaderShape(
            micro_batch_size=run.batch.micro_batch_size,
            gradient_accumulation_steps=run.batch.gradient_accumulation_steps,
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
        )
        """How the rows of a step are cut."""
        self._loader = TrainingLoader(corpus, self.shape, context.device)

    def load(self, samples: int) -> Load:
        """The micro-batches, by their number, of the step that follows ``samples`` samples.

        Those of skipped steps are counted too.
        """
        return functools.partial(self._loader.micro_batch, samples)

    def learning_rate(self, steps_taken: int) -> float:
        """The rate of the step that follows ``steps_taken`` others, skipped ones not counted."""
        config = self._run.config
        return learning_rate(
            config.optimizer, config.scheduler, step=steps_taken, steps=config.training.steps
        )

    def close(self) -> None:
        """Ends the thread that reads ahead, if there is one."""
        self._loader.close()
