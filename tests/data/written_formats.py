"""The same documents, written in each format."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megaspeed.config.run import Source
from megaspeed.data.pieces import Piece
from megaspeed.data.sources import SourceFile
from tests.support.text import list_files

Texts = Sequence[str | None]


def json_lines(texts: Texts, field: str = "text") -> bytes:
    records = [{"id": number, field: text} for number, text in enumerate(texts)]
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def plain_text(texts: Texts) -> bytes:
    return "<|endoftext|>\n".join(str(text) for text in texts).encode()


def write_table(path: Path, texts: Texts, column: str = "text") -> None:
    """Write a table with three rows in each row group."""
    table = pyarrow.table({"id": list(range(len(texts))), column: list(texts)})
    parquet.write_table(table, path, row_group_size=3)


def saved(path: Path, texts: Texts) -> None:
    rows = datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": list(texts)})
    rows.save_to_disk(path)


def saved_splits(path: Path, texts: Texts) -> None:
    rows = datasets.Dataset.from_dict({"text": list(texts)})
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(path)


def _file(write: Callable[[Path, Texts], object], name: str) -> Callable[[Path, Texts], Source]:
    def written(folder: Path, texts: Texts) -> Source:
        write(folder / name, texts)
        return Source(path=str(folder / name))

    return written


def _bytes(content: Callable[[Texts], bytes]) -> Callable[[Path, Texts], object]:
    return lambda path, texts: path.write_bytes(content(texts))


def _named(folder: Path, texts: Texts, *, streaming: bool = False) -> Source:
    """Write a dataset with a name. The name of a folder needs no network."""
    (folder / "named").mkdir()
    (folder / "named" / "train.jsonl").write_bytes(json_lines(texts))
    return Source(dataset=str(folder / "named"), streaming=streaming)


def zst(content: bytes) -> bytes:
    """Compress to two frames with checksums, as the program zstd does with several threads."""
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    return compress(content[: len(content) // 2]) + compress(content[len(content) // 2 :])


FORMATS: dict[str, Callable[[Path, Texts], Source]] = {
    "txt": _file(_bytes(plain_text), "a.txt"),
    "txt.gz": _file(_bytes(lambda texts: gzip.compress(plain_text(texts))), "a.txt.gz"),
    "jsonl": _file(_bytes(json_lines), "a.jsonl"),
    "ndjson": _file(_bytes(json_lines), "a.NDJSON"),
    "jsonl.gz": _file(_bytes(lambda texts: gzip.compress(json_lines(texts))), "a.jsonl.gz"),
    "jsonl.zst": _file(_bytes(lambda texts: zst(json_lines(texts))), "a.jsonl.zst"),
    "parquet": _file(write_table, "a.parquet"),
    "saved": _file(saved, "dataset"),
    "saved splits": _file(saved_splits, "splits"),
    "named": _named,
    "named, streaming": partial(_named, streaming=True),
}


@pytest.fixture
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the copies of named datasets out of the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def written(kind: str, folder: Path, texts: Texts) -> SourceFile:
    """Write a source in this format, and return its file."""
    (file,) = list_files([FORMATS[kind](folder, texts)], "data.train")
    return file


def texts_in(pieces: Iterable[Piece]) -> list[str]:
    """Return the text of each document."""
    documents, text = [], ""
    for piece in pieces:
        text += piece.text
        if piece.ends_document:
            documents.append(text)
            text = ""
    assert text == "", "a document has an end"
    return documents
