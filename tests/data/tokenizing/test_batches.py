"""Batches hold all the text in order, and reading goes on from wherever one of them reached."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megaspeed.data.documents import corpus_fingerprint, read_documents
from megaspeed.data.encode import BEGINNING, Batch, Position, Reached, read_batches
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import BadRecord, refuse
from megaspeed.data.sources import SourceFile
from megaspeed.data.text_files import JsonLines, PlainText
from megaspeed.data.tokenizing import batches as module
from megaspeed.data.tokenizing.passed_over import PassedOver
from tests.data.tokenizing import words
from tests.data.written_formats import zst


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 100)


def plain(folder: Path, *texts: str) -> list[SourceFile]:
    files = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        files.append(SourceFile(path.name, path))
    return files


def all_batches(files: list[SourceFile], start: Position = BEGINNING) -> list[Batch]:
    return list(read_batches(files, start, refuse, PassedOver))


def texts_of(batch: Batch) -> list[str]:
    return [piece.text for piece in batch.pieces]


def test_a_batch_ends_with_the_document_that_fills_it(tmp_path: Path) -> None:
    files = plain(tmp_path, "a" * 60, "b" * 40, "c" * 300, "d" * 99)
    assert [texts_of(batch) for batch in all_batches(files)] == [
        ["a" * 60, "b" * 40],
        ["c" * 300],
        ["d" * 99],
    ]


def test_a_position_within_a_long_document_counts_its_pieces(tmp_path: Path) -> None:
    long = "word " * 75_000  # 375 kB: two pieces
    batches = all_batches(plain(tmp_path, long, long, "end"))
    positions = [batch.reached.position for batch in batches]
    assert positions == [
        Position(0, 0, pieces=1),
        Position(0, len(long)),
        Position(1, 0, pieces=1),
        Position(1, len(long)),
        Position(3, 0),
    ]
    assert [batch.within_document for batch in batches] == [False, True, False, True, False]
    assert "".join(text for batch in batches for text in texts_of(batch)) == long + long + "end"


def test_reading_goes_on_within_a_long_document_of_any_format(tmp_path: Path) -> None:
    """Of the last document the hash is right, though the first half of it was not read for it."""
    long = "d'rüber " * 400_000
    table = tmp_path / "records.jsonl"
    table.write_text(json.dumps({"text": "short"}) + "\n" + json.dumps({"text": long}) + "\n")
    files = [*plain(tmp_path, f"one<|endoftext|>\n{long}"), SourceFile("r", table, JsonLines())]
    whole = all_batches(files)
    assert sum(batch.reached.position.pieces > 0 for batch in whole) >= 6
    for number, batch in enumerate(whole):
        assert (
            all_batches(files, batch.reached.position) == whole[number + 1 :] or batch == whole[-1]
        )


def test_the_last_batch_reaches_the_end_of_all_files(tmp_path: Path) -> None:
    files = plain(tmp_path, "a" * 100, "b")
    last = all_batches(files)[-1]
    assert last.reached.position == Position(2, 0)
    assert last.reached.read_bytes == 101
    assert texts_of(last) == ["b"]
    (after_all,) = all_batches(files, Position(2, 0))
    assert after_all.pieces == ()


def test_reading_goes_on_behind_any_position_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    documents = ["é" * (17 * n % 130 + 1) for n in range(40)]
    table = tmp_path / "records.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    files = [
        *plain(tmp_path, "<|endoftext|>\n".join(documents), "another"),
        SourceFile("records.jsonl", table, JsonLines()),
    ]
    whole = all_batches(files)
    assert len(whole) > 20
    for number, batch in enumerate(whole):
        position = batch.reached.position
        assert all_batches(files, position) == whole[number + 1 :] or number == len(whole) - 1


ARCHIVES = {".gz": gzip.compress, ".zst": zst}
AS_TEXT = {
    "a.txt": lambda texts: "<|endoftext|>".join(texts).encode(),
    "a.jsonl": lambda texts: "".join(json.dumps({"text": text}) + "\n" for text in texts).encode(),
}


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("name", AS_TEXT)
def test_reading_goes_on_behind_any_position_of_an_archive_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str, share: float
) -> None:
    """The same text is read before the damage, and the damage is met once, behind all of it."""
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 30_000)
    short = list(words.documents(400_000))
    texts = [*short, " ".join(short), *short]
    content = ARCHIVES[suffix](AS_TEXT[name](texts))
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(content[: int(len(content) * share)])
    file = SourceFile(path.name, path, JsonLines() if "jsonl" in name else PlainText())
    after = SourceFile("b.txt", tmp_path / "b.txt")
    after.path.write_text("another")
    whole = text_and_records([file, after], BEGINNING, 0)
    # The cut itself, and in plain text the half of a character that it may leave.
    assert whole[-1][1].passed_over.records in (1, 2)
    assert len(whole) > 10
    for number, (_, reached) in enumerate(whole[:-1]):
        rest = text_and_records([file, after], reached.position, reached.passed_over.records)
        assert rest == whole[number + 1 :]


def text_and_records(
    files: list[SourceFile], start: Position, before: int
) -> list[tuple[str, Reached]]:
    """Of each batch the text and what it reaches, without the progress, for which it reads ahead.

    Args:
        files: the input.
        start: where reading begins.
        before: bad records that were met before it.
    """
    met: list[BadRecord] = []
    batches = read_batches(files, start, met.append, lambda: PassedOver(before + len(met)))
    return [("".join(texts_of(b)), replace(b.reached, read_bytes=0)) for b in batches]


def test_the_lines_of_documents_are_what_a_corpus_fingerprint_is_made_of(tmp_path: Path) -> None:
    files = plain(tmp_path, "eins<|endoftext|>zwei", "d'rüber " * 200_000, "vier")
    lines = b"".join(line for batch in all_batches(files) for line in batch.reached.documents)
    assert hashlib.sha256(lines).hexdigest() == corpus_fingerprint(read_documents(files))


def test_a_batch_knows_how_many_bad_records_are_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good, bad = json.dumps({"text": "x" * 60}), '{"text": 1}'
    path.write_text("\n".join([bad, good, bad, good, bad, good, bad]))
    files = [SourceFile("a.jsonl", path, JsonLines())]
    assert passed_over(files, BEGINNING) == [["line 1", "line 3"], ["line 5", "line 7"]]
    position = next(read_batches(files, BEGINNING, lambda _: None, PassedOver)).reached.position
    assert passed_over(files, position) == [["line 5", "line 7"]]
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 \(byte 0\)"):
        all_batches(files)


def passed_over(files: list[SourceFile], start: Position) -> list[list[str]]:
    """Of each batch, the bad records that came since the one before."""
    met: list[str] = []
    batches = read_batches(
        files, start, lambda record: met.append(record.where[:6]), lambda: PassedOver(len(met))
    )
    ends = [batch.reached.passed_over.records for batch in batches]
    return [met[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def test_bad_records_before_a_long_document_are_not_met_again_within_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "word " * 125_000})
    path.write_text("\n".join(['{"text": 1}', long, '{"text": 2}']))
    files = [SourceFile("a.jsonl", path, JsonLines())]
    assert passed_over(files, BEGINNING) == [["line 1"], [], [], ["line 3"]]
    assert passed_over(files, Position(0, 0, pieces=1)) == [[], [], ["line 3"]]
