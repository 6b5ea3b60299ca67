"""What a loader hands over: inputs, targets and, if asked, the number of each token's document."""

import numpy as np
import torch

from megaspeed.data.loader import PADDING_SAMPLE, read_micro_batch
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch

END = 9
ROWS = [
    np.array([5, 6, END, 7, 8, END, END, 4, 3], dtype=np.uint16),
    np.array([END, 1, 2, 3, 4, 5, 6, 7, END], dtype=np.uint16),
]


def read(end_of_text: int | None) -> MicroBatch:
    return read_micro_batch(
        ROWS, [40, 41], micro_batch_size=3, sequence_length=8, end_of_text=end_of_text
    )


def test_end_of_text_opens_the_document_that_follows_it() -> None:
    batch = read(END)
    assert batch.tokens[0].tolist() == [5, 6, END, 7, 8, END, END, 4]
    assert batch.documents is not None
    assert batch.documents[0].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert batch.documents[1].tolist() == [1] * 8


def test_every_target_is_of_the_document_that_predicts_it_or_its_end() -> None:
    batch = read(END)
    assert batch.documents is not None
    predicting, of_target = batch.documents[:, :-1], batch.documents[:, 1:]
    targets = batch.targets[:, :-1]
    goes_on = (targets != END) & (targets != NOT_COUNTED)
    assert torch.equal(predicting[goes_on], of_target[goes_on])
    ends = targets == END
    assert torch.equal(predicting[ends] + 1, of_target[ends])


def test_tokens_and_targets_do_not_depend_on_documents() -> None:
    reset, plain = read(END), read(None)
    assert plain.documents is None
    assert torch.equal(reset.tokens, plain.tokens)
    assert torch.equal(reset.targets, plain.targets)
    assert reset.samples.dtype == torch.int64
    assert reset.samples.tolist() == plain.samples.tolist() == [40, 41, PADDING_SAMPLE]


def test_a_batch_moves_with_its_samples_and_documents() -> None:
    moved = read(END).to(torch.device("meta"))
    assert moved.documents is not None
    tensors = (moved.tokens, moved.targets, moved.samples, moved.documents)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.documents.shape == moved.tokens.shape
    assert read(None).to(torch.device("meta")).documents is None
