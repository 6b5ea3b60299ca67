"""Continuations of ``training.sample_prompts``, which are the same at every layout.

    a row          e t o   b e . . . . .     S tokens; those after "to be" change nothing
    a new token    forward of all rows -> hidden state of the last token -> its likeliest successor
                   or, with training.sample_temperature, a successor that is drawn

As in training, an end-of-text (e) precedes a document. Each new token takes a forward of complete
micro-batches on all data ranks, so messages and compiled blocks have no new shapes. A draw depends
only on training.seed, the step, and the numbers of the prompt and of the new token.
"""

import torch

from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape
from megaspeed.data.prompts import Prompts
from megaspeed.model.documents import Documents, take
from megaspeed.model.dropout import random_key
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.tensor_parallel.drawing import Draw
from megaspeed.training.worker import Worker


def write_samples(
    worker: Worker, corpus: PreparedCorpus, shape: LoaderShape, prompts: Prompts, step: int
) -> list[tuple[str, str]]:
    """Return each prompt with its continuation after ``step``. All ranks call this together.

    A continuation ends with the document, or after ``training.sample_tokens`` tokens.
    """
    (tokenizer, rows), size, training = prompts, shape.micro_batch_size, worker.run.config.training
    new: list[list[int]] = [[] for _ in rows]
    for place in range(training.sample_tokens):
        seen = [ids + more for ids, more in zip(rows, new, strict=True)]
        numbered = [*enumerate(seen)]
        parts = [numbered[start : start + size] for start in range(0, len(seen), size)]
        batches = [_micro_batch(part, corpus, shape).to(worker.context.device) for part in parts]
        key = random_key(f"sample/{training.seed}/{step}/{place}")
        draw = Draw(key, training.sample_temperature, training.sample_top_k)
        tokens = worker.next_tokens(batches, draw)
        for more, token in zip(new, tokens, strict=False):  # padding rows come last
            more += [token] * (tokenizer.end_of_text not in more)
        if all(tokenizer.end_of_text in more for more in new):
            break
    continuations = (
        tokenizer.text_after(ids, [id for id in more if id != tokenizer.end_of_text])
        for ids, more in zip(rows, new, strict=True)
    )
    return [*zip(training.sample_prompts, continuations, strict=True)]


def _micro_batch(
    rows: list[tuple[int, list[int]]], corpus: PreparedCorpus, shape: LoaderShape
) -> MicroBatch:
    """Rows and padding. Each row is one document, with the number of its prompt.

    Only the target of its last token is counted. Its value is this number.
    """
    tokens = torch.zeros(shape.micro_batch_size, corpus.sequence_length, dtype=torch.int64)
    targets, documents = torch.full_like(tokens, NOT_COUNTED), None
    for place, (number, row) in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        targets[place, len(row) - 1] = number
    if corpus.reset_at_documents:
        documents = Documents.beginning_at(tokens < 0, shape.part.attention)
    own = shape.part.ranges(corpus.sequence_length)
    return MicroBatch(take(tokens, own), take(targets, own), torch.arange(len(tokens)), documents)
