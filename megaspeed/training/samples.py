"""Continuations of ``training.sample_prompts``, which are the same at every layout.

    a row          e t o   b e . . . . .     S tokens; those after "to be" change nothing
    a new token    forward of all rows -> hidden state of the last token -> its likeliest successor

As in training, an end-of-text (e) precedes a document. Each new token takes a forward of complete
micro-batches on all data ranks, so messages and compiled blocks have no new shapes.
"""

import torch

from megaspeed.config.run import TrainingConfig
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.loader import LoaderShape
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer
from megaspeed.model.documents import Documents, take
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.training.worker import Worker

Prompts = tuple[TextTokenizer, list[list[int]]]
"""The run's tokenizer, and the ids of each prompt."""


def read_prompts(training: TrainingConfig, corpus: PreparedCorpus) -> Prompts | None:
    """Encode the prompts; None if there are none.

    Raises DataError if there is no tokenizer, or a prompt and its continuation do not fit.
    """
    prompts, more, most = training.sample_prompts, training.sample_tokens, corpus.sequence_length
    if not prompts:
        return None
    if corpus.tokenizer is None:
        raise DataError(
            "training.sample_prompts are texts, but the data are token ids without a tokenizer; "
            "name it in data.tokenizer, or remove training.sample_prompts"
        )
    tokenizer = load_tokenizer(str(corpus.tokenizer))
    rows = [[tokenizer.end_of_text, *ids] for ids in tokenizer.encode(prompts)]
    raise_any(
        f"training.sample_prompts[{number}] has {len(row)} tokens with the end-of-text before it. "
        f"{len(row)} + training.sample_tokens {more} must be at most data.sequence_length {most}; "
        "shorten the prompt, or lower training.sample_tokens"
        for number, row in enumerate(rows)
        if len(row) + more > most
    )
    return tokenizer, rows


def write_samples(
    worker: Worker, corpus: PreparedCorpus, shape: LoaderShape, prompts: Prompts
) -> dict[str, str]:
    """Return prompt -> continuation. All ranks call this together.

    A continuation ends with the document, or after ``training.sample_tokens`` tokens.
    """
    (tokenizer, rows), size, training = prompts, shape.micro_batch_size, worker.run.config.training
    new: list[list[int]] = [[] for _ in rows]
    for _ in range(training.sample_tokens):
        seen = [ids + more for ids, more in zip(rows, new, strict=True)]
        parts = [seen[start : start + size] for start in range(0, len(seen), size)]
        batches = [_micro_batch(part, corpus, shape).to(worker.context.device) for part in parts]
        tokens = worker.likeliest_tokens(batches)
        for more, token in zip(new, tokens, strict=False):  # padding rows come last
            more += [token] * (tokenizer.end_of_text not in more)
        if all(tokenizer.end_of_text in more for more in new):
            break
    return {
        prompt: tokenizer.text_after(ids, [id for id in more if id != tokenizer.end_of_text])
        for prompt, ids, more in zip(training.sample_prompts, rows, new, strict=True)
    }


def _micro_batch(rows: list[list[int]], corpus: PreparedCorpus, shape: LoaderShape) -> MicroBatch:
    """Rows and padding. Each row is one document. Only the target of its last token is counted."""
    tokens = torch.zeros(shape.micro_batch_size, corpus.sequence_length, dtype=torch.int64)
    targets, documents = torch.full_like(tokens, NOT_COUNTED), None
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        targets[number, len(row) - 1] = 0
    if corpus.reset_at_documents:
        documents = Documents.beginning_at(tokens < 0, shape.part.attention)
    own = shape.part.ranges(corpus.sequence_length)
    return MicroBatch(take(tokens, own), take(targets, own), torch.arange(len(tokens)), documents)
