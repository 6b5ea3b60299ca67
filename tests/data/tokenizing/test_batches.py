"""Batches hold all the text in order, and reading goes on from wherever one of them reached."""

import hashlib
import json
from pathlib import Path

import pytest

from megaspeed.data import DataError
from megaspeed.data.text.documents import corpus_fingerprint, read_documents
from megaspeed.data.text.json_lines import JsonLines
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizing import batches as module
from megaspeed.data.tokenizing.batches import BEGINNING, Batch, Position, read_batches


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


def all_batches(
    files: list[SourceFile], start: Position = BEGINNING, *, skip_bad: bool = False
) -> list[Batch]:
    return list(read_batches(files, start, skip_bad=skip_bad))


def texts_of(batch: Batch) -> list[str]:
    return [piece.text for piece in batch.pieces]


def test_a_batch_ends_with_the_document_that_fills_it(tmp_path: Path) -> None:
    files = plain(tmp_path, "a" * 60, "b" * 40, "c" * 300, "d" * 99)
    assert [texts_of(batch) for batch in all_batches(files)] == [
        ["a" * 60, "b" * 40],
        ["c" * 300],
        ["d" * 99],
    ]


def test_no_document_begins_in_a_batch_that_ends_a_long_one(tmp_path: Path) -> None:
    """Else long documents, one after the other, would leave nowhere to go on from."""
    long = "word " * 300_000  # 1.5 MB: two pieces, the second one of 0.5 MB
    batches = all_batches(plain(tmp_path, long, long, "end"))
    reached = [batch.reached.position for batch in batches]
    assert [position is None for position in reached] == [True, False, True, False, False]
    assert "".join(text for batch in batches for text in texts_of(batch)) == long + long + "end"


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
        assert position is not None
        assert all_batches(files, position) == whole[number + 1 :] or number == len(whole) - 1


def test_the_lines_of_documents_are_what_a_corpus_fingerprint_is_made_of(tmp_path: Path) -> None:
    files = plain(tmp_path, "eins<|endoftext|>zwei", "d'rüber " * 200_000, "vier")
    lines = b"".join(line for batch in all_batches(files) for line in batch.reached.documents)
    assert hashlib.sha256(lines).hexdigest() == corpus_fingerprint(read_documents(files))


def test_bad_records_come_with_the_batch_that_they_stand_in(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good, bad = json.dumps({"text": "x" * 60}), '{"text": 1}'
    path.write_text("\n".join([bad, good, bad, good, bad, good, bad]))
    files = [SourceFile("a.jsonl", path, JsonLines())]
    first, second = all_batches(files, skip_bad=True)
    assert [record.where[:6] for record in first.reached.skipped] == ["line 1", "line 3"]
    assert [record.where[:6] for record in second.reached.skipped] == ["line 5", "line 7"]
    assert first.reached.position is not None
    assert all_batches(files, first.reached.position, skip_bad=True) == [second]
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 \(byte 0\)"):
        all_batches(files)


def test_what_is_nothing_but_bad_records_is_not_passed_over_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "the text is here"}\n' * 100_001)
    files = [SourceFile("a.jsonl", path, JsonLines())]
    with pytest.raises(DataError, match=r"there are 100,000 without .* there is \"content\""):
        all_batches(files, skip_bad=True)
