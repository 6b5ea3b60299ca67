"""Loaders: the rows of the training stream and of the validation set that one dp rank computes.

Rows go round the data-parallel ranks a micro-batch at a time. With dp 2 and micro-batches of 2
rows, the 8 samples of a step that starts at sample c are

    micro-batch        0                1
    dp rank 0      c+0  c+1         c+4  c+5
    dp rank 1      c+2  c+3         c+6  c+7

so a step trains on samples c ... c + train_batch_size - 1 at every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megaspeed.data.prepared import PreparedCorpus
from megaspeed.data.stream.micro_batch import read_micro_batch
from megaspeed.data.stream.mixture import Mixture
from megaspeed.data.stream.prefetch import OneAhead
from megaspeed.data.stream.rows import Rows
from megaspeed.data.stream.sampler import TrainingOrder, ValidationOrder
from megaspeed.model.micro_batch import MicroBatch


@dataclass(frozen=True)
class LoaderShape:
    """How a step's rows are cut.

    Attributes:
        micro_batch_size: rows of one micro-batch on one dp rank.
        gradient_accumulation_steps: micro-batches of one step.
        dp_rank, dp_size: this rank on the data-parallel axis.
    """

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int

    @property
    def train_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def rows(self, micro_batch: int) -> range:
        """Which rows, counted over all dp ranks, this rank has in micro-batch `micro_batch`."""
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


class _Reader:
    """Samples of the training or the validation data as micro-batches, in host memory."""

    def __init__(
        self,
        corpus: PreparedCorpus,
        mixture: Mixture,
        order: TrainingOrder | ValidationOrder,
        micro_batch_size: int,
    ) -> None:
        self._order = order
        self._rows = Rows(mixture, corpus.sequence_length)
        self._micro_batch_size = micro_batch_size
        self._sequence_length = corpus.sequence_length
        self._end_of_text = corpus.end_of_text if corpus.reset_at_documents else None
        # Refused by PreparedCorpus.check.
        assert self._end_of_text is not None or not corpus.reset_at_documents

    def read(self, samples: Sequence[int]) -> MicroBatch:
        """At most a micro-batch of rows, with padding where there are fewer."""
        return read_micro_batch(
            [self._rows.at(self._order.place_of(sample)) for sample in samples],
            samples,
            micro_batch_size=self._micro_batch_size,
            sequence_length=self._sequence_length,
            end_of_text=self._end_of_text,
        )


class TrainingLoader:
    """Micro-batches of the training stream, on `device`.

    Where the device is a GPU, the next micro-batch is read into pinned memory in the background.
    The loader holds no position: the trainer says how many samples it has consumed.
    """

    def __init__(
        self, corpus: PreparedCorpus, shape: LoaderShape, device: torch.device | str = "cpu"
    ) -> None:
        self._shape = shape
        self._device = torch.device(device)
        order = TrainingOrder.of(corpus.train, corpus.seed, corpus.sequence_length)
        self._reader = _Reader(corpus, corpus.train, order, shape.micro_batch_size)
        self._ahead: OneAhead[tuple[int, int], MicroBatch] | None = None
        if self._device.type == "cuda":
            self._ahead = OneAhead(self._read_pinned, self._following, self._device)

    def micro_batch(self, samples_consumed: int, micro_batch: int) -> MicroBatch:
        """Micro-batch `micro_batch` of the step that starts after `samples_consumed` samples."""
        key = (samples_consumed, micro_batch)
        if self._ahead is None:
            return self._read(key).to(self._device)
        return self._ahead.get(key).to(self._device)

    def close(self) -> None:
        """Ends the background thread, if there is one."""
        if self._ahead is not None:
            self._ahead.close()

    def _read(self, key: tuple[int, int]) -> MicroBatch:
        samples_consumed, micro_batch = key
        return self._reader.read([samples_consumed + row for row in self._shape.rows(micro_batch)])

    def _read_pinned(self, key: tuple[int, int]) -> MicroBatch:
        return self._read(key).pin_memory()

    def _following(self, key: tuple[int, int]) -> tuple[int, int]:
        samples_consumed, micro_batch = key
        if micro_batch + 1 < self._shape.gradient_accumulation_steps:
            return samples_consumed, micro_batch + 1
        return samples_consumed + self._shape.train_batch_size, 0


class ValidationLoader:
    """The first K rows of the validation data in order, as micro-batches, on `device`.

    K = min(eval_batches x train_batch_size, validation sequences), whatever the layout. Every dp
    rank has the same number of micro-batches, all full: rows beyond K are padding whose targets
    are all -100. The mean loss is the sum over all ranks divided by `predicted_tokens`.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        shape: LoaderShape,
        *,
        eval_batches: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shape = shape
        self._device = torch.device(device)
        self._sequence_length = corpus.sequence_length
        self._reader: _Reader | None = None
        self.sequences = 0
        if corpus.validation is not None:
            order = ValidationOrder.of(corpus.validation, corpus.seed, corpus.sequence_length)
            self._reader = _Reader(corpus, corpus.validation, order, shape.micro_batch_size)
            self.sequences = min(eval_batches * shape.train_batch_size, order.sequences)

    def __len__(self) -> int:
        """Micro-batches of one evaluation on each dp rank."""
        return -(-self.sequences // (self._shape.dp_size * self._shape.micro_batch_size))

    @property
    def predicted_tokens(self) -> int:
        """Targets that count, over all dp ranks."""
        return self.sequences * self._sequence_length

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self.micro_batch(micro_batch) for micro_batch in range(len(self)))

    def micro_batch(self, micro_batch: int) -> MicroBatch:
        """Micro-batch `micro_batch`, in [0, len(self)); `samples` are the numbers of the rows."""
        assert self._reader is not None and 0 <= micro_batch < len(self), micro_batch
        rows = [row for row in self._shape.rows(micro_batch) if row < self.sequences]
        return self._reader.read(rows).to(self._device)
