"""Shows samples of the training stream: where each is in the data, its ids and its text."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from megaspeed.config.errors import shortened
from megaspeed.data.cache import Cache
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.sampler import Rows, TrainingOrder
from megaspeed.data.token_file import ORIGINS
from megaspeed.data.tokenizer import load_tokenizer

_IDS_SHOWN = 12
_CHARACTERS_SHOWN = 300
_DOCUMENTS_SHOWN = 4
_SCANNED_AT_ONCE_TOKENS = 1 << 24


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
    """The samples, in the given order."""
    order = TrainingOrder.of(corpus.train, corpus.seed, corpus.sequence_length)
    rows = Rows(corpus.train, corpus.sequence_length)
    tokenizer = None if corpus.tokenizer is None else load_tokenizer(str(corpus.tokenizer))
    origins = cache(_Origins)
    for sample in samples:
        place = order.place_of(sample)
        component = corpus.train.components[place.component]
        file = component.files[place.file]
        ids: list[int] = rows.at(place).tolist()
        text = None
        if tokenizer is not None:
            text = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
        yield ShownSample(
            sample=sample,
            source=component.name,
            component=place.component,
            draw=place.draw,
            epoch=place.draw // order.samplers[place.component].sequences,
            sequence=place.sequence,
            file=str(file.path),
            first_token=file.first_token + place.first_token,
            documents=origins(file.path, file.index.dtype, file.index.end_of_text).between(
                file.first_token + place.first_token, len(ids)
            ),
            ids=ids,
            text=text,
        )


class _Origins:
    """The text from which the documents of a token file were made."""

    def __init__(self, path: Path, dtype: str, end_of_text: int | None) -> None:
        self._files: list[tuple[str, int, int]] = []
        origins = path.with_suffix(ORIGINS)
        ends = []
        if Cache(path.parents[1]).read(origins) is not None:
            self._files = [json.loads(line) for line in origins.read_bytes().splitlines()]
            ids = np.memmap(path, dtype, "r")
            for start in range(0, len(ids), _SCANNED_AT_ONCE_TOKENS):
                block = ids[start : start + _SCANNED_AT_ONCE_TOKENS]
                ends.append(start + np.flatnonzero(block == end_of_text))
        self._ends = np.concatenate(ends or [np.empty(0, np.int64)])  # of each document
        self._firsts = list(accumulate((count for _, _, count in self._files), initial=0))

    def between(self, first_token: int, tokens: int) -> list[str]:
        """The documents with these tokens, those of a file together."""
        if not self._files:
            return []
        first, last = np.searchsorted(self._ends, [first_token, first_token + tokens - 1]).tolist()
        named = []
        for at in range(bisect_right(self._firsts, first) - 1, bisect_right(self._firsts, last)):
            path, number, count = self._files[at]
            start = number + 1 + max(0, first - self._firsts[at])
            stop = number + 1 + min(count - 1, last - self._firsts[at])
            numbers = f"document {start:,}" if start == stop else f"documents {start:,} to {stop:,}"
            named.append(f"{path}, {numbers}")
        return named


def samples_table(samples: Iterable[ShownSample]) -> Table:
    """A row for each sample, with ids and text shortened."""
    table = Table(show_lines=True, expand=True)
    table.add_column("sample", justify="right")
    table.add_column("from", ratio=3)
    table.add_column("ids", ratio=3)
    table.add_column("text", ratio=5)
    for shown in samples:
        table.add_row(
            str(shown.sample),
            Text(
                f"{shown.source}\nepoch {shown.epoch}, sequence {shown.sequence:,}\n"
                + (
                    "\n".join(shortened(shown.documents, _DOCUMENTS_SHOWN))
                    or f"token {shown.first_token:,} of {shown.file}"
                ),
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
