"""Loaders: the rows of the training stream and of the validation data for one dp rank.

Each data-parallel rank in turn gets the rows of one micro-batch. With dp 2 and micro-batches of 2
rows, the 8 samples of a step that starts at sample c are

    micro-batch        0                1
    dp rank 0      c+0  c+1         c+4  c+5
    dp rank 1      c+2  c+3         c+6  c+7

So a step trains on samples c ... c + train_batch_size - 1 at every layout.

The ranks of a context group read the same rows. Each keeps its part of every row.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.mixture import Mixture
from megaspeed.data.sampler import Rows, TrainingOrder, ValidationOrder
from megaspeed.data.token_stream import StreamShard
from megaspeed.model.documents import Documents, take
from megaspeed.model.micro_batch import NOT_COUNTED, PADDING_SAMPLE, MicroBatch
from megaspeed.model.sequence_part import WHOLE, SequencePart
from megaspeed.topology.process_settings import use_device

_Key = tuple[int, int, int]
"""Samples before a step, number of a micro-batch in it, samples of the step."""

Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclass(frozen=True)
class LoaderShape:
    """How the rows of a step are divided."""

    micro_batch_size: int  # rows of one micro-batch on one dp rank
    gradient_accumulation_steps: int  # micro-batches of one step
    dp_rank: int
    dp_size: int
    part: SequencePart = WHOLE  # the tokens of each row that this rank keeps

    @property
    def train_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def rows(self, micro_batch: int) -> range:
        """Return the rows of this rank in a micro-batch, counted over all dp ranks."""
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


def read_micro_batch(
    rows: Sequence[NDArray[np.integer]],
    samples: Sequence[int],
    *,
    micro_batch_size: int,
    sequence_length: int,
    end_of_text: int | None = None,
    part: SequencePart = WHOLE,
) -> MicroBatch:
    """Read rows of S + 1 tokens, and add padding rows up to ``micro_batch_size``.

    The first S tokens of a row are its inputs, the last S its targets. Of both, ``part`` is kept.

    If ``end_of_text`` is given, attention and positions restart at every document. The end-of-text
    token after a document belongs to the next document. So each token is predicted only from its
    own document, and the first token of a document only from the end-of-text token.
    """
    padding = micro_batch_size - len(rows)
    both = torch.zeros(micro_batch_size, sequence_length + 1, dtype=torch.int64)
    for number, row in enumerate(rows):
        both[number] = torch.from_numpy(row.astype(np.int64))
    targets = both[:, 1:].clone()  # of a single row, contiguous() would share the tokens' memory
    targets[len(rows) :] = NOT_COUNTED
    tokens = both[:, :-1].contiguous()
    documents = None
    if end_of_text is not None:
        begins = tokens == end_of_text
        begins[len(rows) :] = False  # a padding row is one document
        documents = Documents.beginning_at(begins, part.attention)
    own = part.ranges(sequence_length)
    return MicroBatch(
        tokens=take(tokens, own).contiguous(),
        targets=take(targets, own).contiguous(),
        samples=torch.tensor([*samples, *[PADDING_SAMPLE] * padding], dtype=torch.int64),
        documents=documents,
    )


class OneAhead(Generic[Key, Item]):
    """Calls ``load`` for the expected next item in a background thread.

    ``get(key)`` always returns ``load(key)``. If another key was expected, it only takes longer. An
    error in the thread is raised by the ``get`` of its item.

    Args:
        load: reads an item. It is called from another thread.
        following: returns the key that is expected after a key; None if it cannot be loaded yet.
        device: the device for which the thread reads.
    """

    def __init__(
        self,
        load: Callable[[Key], Item],
        following: Callable[[Key], Key | None],
        device: torch.device,
    ) -> None:
        self._load = load
        self._following = following
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="prefetch",
            initializer=use_device,
            initargs=(device,),
        )
        self._expected: tuple[Key, Future[Item]] | None = None

    def get(self, key: Key) -> Item:
        """Return ``load(key)``, which may already be read if this key was expected."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == key:
            item = expected[1].result()
        else:
            item = self._load(key)
        following = self._following(key)
        if following is not None:
            self._expected = (following, self._thread.submit(self._load, following))
        return item

    def close(self) -> None:
        """End the thread, and discard the item that it reads."""
        self._expected = None
        self._thread.shutdown(wait=True, cancel_futures=True)


def _reader(
    corpus: PreparedCorpus, mixture: Mixture, order: TrainingOrder, shape: LoaderShape
) -> Callable[[Sequence[int]], MicroBatch]:
    """Return a function that reads at most a micro-batch of samples into host memory."""
    rows = Rows(mixture, corpus.sequence_length)
    end_of_text = corpus.end_of_text if corpus.reset_at_documents else None
    # PreparedCorpus.check refuses this.
    assert end_of_text is not None or not corpus.reset_at_documents

    def read(samples: Sequence[int]) -> MicroBatch:
        return read_micro_batch(
            [rows.at(order.place_of(sample)) for sample in samples],
            samples,
            micro_batch_size=shape.micro_batch_size,
            sequence_length=corpus.sequence_length,
            end_of_text=end_of_text,
            part=shape.part,
        )

    return read


class TrainingLoader:
    """Micro-batches of the training stream, on ``device``.

    If the device is a GPU, the next micro-batch is read into pinned memory in the background. The
    loader has no position: the trainer passes the number of samples it has consumed.
    """

    def __init__(
        self, corpus: PreparedCorpus, shape: LoaderShape, device: torch.device | str = "cpu"
    ) -> None:
        self._shape = shape
        self._device = torch.device(device)
        self._components = corpus.train.components
        self._order = TrainingOrder.of(corpus.train, corpus.seed, corpus.sequence_length)
        self._read_samples = _reader(corpus, corpus.train, self._order, shape)
        self._ahead: OneAhead[_Key, MicroBatch] | None = None
        if self._device.type == "cuda":
            self._ahead = OneAhead(
                lambda key: self._read(key).pin_memory(), self._following, self._device
            )

    def shards(self, samples_consumed: int, train_batch_size: int) -> set[StreamShard]:
        """Return the shards of streams that a step needs, on any rank."""
        if not any(self._order.in_order):
            return set()
        samples = range(samples_consumed, samples_consumed + train_batch_size)
        numbers = set(map(self._order.file_of, samples))
        files = (self._components[component].files[file] for component, file in numbers)
        return {file for file in files if isinstance(file, StreamShard)}

    def micro_batch(
        self, samples_consumed: int, micro_batch: int, train_batch_size: int | None = None
    ) -> MicroBatch:
        """Read a micro-batch of the step that starts after ``samples_consumed`` samples.

        ``train_batch_size`` is the samples of this step, by default those of the shape.
        """
        key = (samples_consumed, micro_batch, train_batch_size or self._shape.train_batch_size)
        if self._ahead is None:
            return self._read(key).to(self._device)
        return self._ahead.get(key).to(self._device)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _read(self, key: _Key) -> MicroBatch:
        samples_consumed, micro_batch, _ = key
        rows = self._shape.rows(micro_batch)
        return self._read_samples([samples_consumed + row for row in rows])

    def _following(self, key: _Key) -> _Key | None:
        """Return what follows if the next step has as many samples, as it does in most cases."""
        samples_consumed, micro_batch, batch = key
        if (micro_batch + 1) * self._shape.micro_batch_size * self._shape.dp_size < batch:
            return samples_consumed, micro_batch + 1, batch
        following = samples_consumed + batch
        # A shard that is missing would block the thread, and with it the end of the run.
        arrived = not any(shard.is_missing for shard in self.shards(following, batch))
        return (following, 0, batch) if arrived else None


class ValidationLoader:
    """The first K rows of the validation data in order, as micro-batches, on ``device``.

    K = min(eval_batches x train_batch_size, validation sequences) at every layout. Every dp rank
    has the same number of full micro-batches: rows beyond K are padding, whose targets are all
    -100. The mean loss is the sum over all ranks divided by ``predicted_tokens``.
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
        self._read_samples: Callable[[Sequence[int]], MicroBatch] | None = None
        self.sequences = 0
        if corpus.validation is not None:
            order = ValidationOrder.of(corpus.validation, corpus.seed, corpus.sequence_length)
            self._read_samples = _reader(corpus, corpus.validation, order, shape)
            self.sequences = min(eval_batches * shape.train_batch_size, order.sequences)

    def __len__(self) -> int:
        """Micro-batches of one evaluation on each dp rank."""
        return -(-self.sequences // (self._shape.dp_size * self._shape.micro_batch_size))

    @property
    def predicted_tokens(self) -> int:
        """Number of targets over all dp ranks, without padding."""
        return self.sequences * self._sequence_length

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self.micro_batch(micro_batch) for micro_batch in range(len(self)))

    def micro_batch(self, micro_batch: int) -> MicroBatch:
        """Read a micro-batch, in [0, len(self)). Its ``samples`` are the numbers of the rows."""
        assert self._read_samples is not None and 0 <= micro_batch < len(self), micro_batch
        rows = [row for row in self._shape.rows(micro_batch) if row < self.sequences]
        return self._read_samples(rows).to(self._device)
