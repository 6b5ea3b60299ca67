"""Choices of experts with which a rank receives one row, or none."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.verify import ParallelRun, train_rank
from megaspeed.model.experts import Experts
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.mutations import replaced


@contextmanager
def few_rows(rank: int) -> Iterator[None]:
    """Replace the choices of two of three micro-batches, on 4 expert ranks with 2 experts each.

    micro-batch    0                     1           2
    tokens use     experts 0 and 1       any         experts 4 and 5
    but one token  experts 0 and 2                   experts 4 and 7
    so rows        rank 1 gets 1         all get     rank 3 gets 1
    and            ranks 2, 3 get none   many        ranks 0, 1 get none
    """
    forwards: dict[int, Iterator[int]] = defaultdict(itertools.count)

    def forced(decide: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def few(self: Experts, scores: Tensor) -> Tensor:
            chosen = decide(self, scores)
            number = next(forwards[id(self)]) % 3
            if number != 1:
                first = 2 * number
                chosen[:, 0], chosen[:, 1] = first, first + 1
                if rank == 2:
                    chosen[3, 1] = first + 2 + number // 2
            return chosen

        return few

    with replaced(Experts, "decide", forced):
        yield


def train_with_few_rows(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    with few_rows(launch.rank):
        return train_rank(launch, run, corpus, steps)
