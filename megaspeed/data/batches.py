"""Show samples of the training stream: where each is in the data, its ids and its text."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from megaspeed.config.errors import shortened
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.sampler import Rows, TrainingOrder
from megaspeed.data.text_cache import ORIGINS
from megaspeed.data.token_file import TokenFile, document_ends
from megaspeed.data.tokenizer import load_tokenizer

_IDS_SHOWN = 12
_CHARACTERS_SHOWN = 300
_DOCUMENTS_SHOWN = 4


@dataclass(frozen=True)
class ShownSample:
    """One sample."""

    sample: int  # its index in the stream
    source: str  # the component it is drawn from, as the configuration names it
    component: int  # the component's number
    draw: int  # number of earlier samples from that component
    epoch: int  # the epoch of the component
    sequence: int  # the sequence's number within the component, counted over all its files
    file: str  # the file with its tokens
    first_token: int  # the index of its first token in that file
    documents: list[str]  # their files and numbers, from 1; empty if the file does not state them
    ids: list[int]  # the S tokens and the target of the last one
    text: str | None  # the ids decoded; None if no tokenizer is known


def show_samples(corpus: PreparedCorpus, samples: Iterable[int]) -> Iterator[ShownSample]:
    """Yield the samples, in the given order."""
    order = TrainingOrder.of(corpus.train, corpus.seed, corpus.sequence_length)
    rows = Rows(corpus.train, corpus.sequence_length)
    tokenizer = None if corpus.tokenizer is None else load_tokenizer(str(corpus.tokenizer))
    documents_of = cache(_documents)
    for sample in samples:
        place = order.place_of(sample)
        component = corpus.train.components[place.component]
        file = component.files[place.file]
        ids: list[int] = rows.at(place).tolist()
        text = None
        if tokenizer is not None:
            text = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
        first_token = file.first_token + place.first_token
        ends, origins = documents_of(file)
        first, last = np.searchsorted(ends, [first_token + 1, first_token + len(ids)])
        yield ShownSample(
            sample=sample,
            source=component.name,
            component=place.component,
            draw=place.draw,
            epoch=place.draw // order.samplers[place.component].sequences,
            sequence=place.sequence,
            file=str(file.path),
            first_token=first_token,
            documents=[
                f"{path}, document {number + 1:,}"
                for path, number in islice(origins(), first, last + 1)
            ],
            ids=ids,
            text=text,
        )


def _documents(
    file: TokenFile,
) -> tuple[NDArray[np.int64], Callable[[], Iterator[tuple[str, int]]]]:
    """Return (end, file and number of each document) of the complete file; or nothing."""
    origins = file.path.with_name(ORIGINS)
    if not origins.exists():  # only a run writes it, when it tokenizes text
        return np.empty(0, np.int64), lambda: iter(())
    listed: list[tuple[str, list[int]]] = json.loads(origins.read_bytes())
    ends = document_ends(np.memmap(file.path, file.index.dtype, "r"), file.index.end_of_text)
    return ends, lambda: ((path, number) for path, numbers in listed for number in numbers)


def samples_table(samples: Iterable[ShownSample]) -> Table:
    """Return a row for each sample, with ids and text shortened."""
    table = Table(show_lines=True, expand=True)
    table.add_column("sample", justify="right")
    table.add_column("from", ratio=3)
    table.add_column("ids", ratio=3)
    table.add_column("text", ratio=5)
    for shown in samples:
        documents = shown.documents or [f"token {shown.first_token:,} of {shown.file}"]
        table.add_row(
            str(shown.sample),
            Text(
                f"{shown.source}\nepoch {shown.epoch}, sequence {shown.sequence:,}\n"
                + "\n".join(shortened(documents, _DOCUMENTS_SHOWN)),
                overflow="fold",
            ),
            Text(_cut_ids(shown.ids)),
            Text("no tokenizer is known" if shown.text is None else _cut_text(shown.text)),
        )
    return table


def _cut_ids(ids: list[int]) -> str:
    head = " ".join(map(str, ids[:_IDS_SHOWN]))
    return head if len(ids) <= _IDS_SHOWN else f"{head} ... ({len(ids)} ids)"


def _cut_text(text: str) -> str:
    cut = text if len(text) <= _CHARACTERS_SHOWN else f"{text[:_CHARACTERS_SHOWN]} ..."
    # Replaces incomplete characters at an edge, and control codes that a terminal would execute.
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in cut)
