"""A bad record is reported with its place and its mend, and can be skipped."""

import gzip
import random
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megaspeed.config.run import Source
from megaspeed.data.documents import read_documents
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import PIECE_BYTES, BadRecord
from megaspeed.data.sources import SourceFile
from tests.data.written_formats import (
    json_lines,
    own_datasets_cache,
    plain_text,
    saved,
    saved_splits,
    texts_in,
    write_table,
    zst,
)
from tests.support.text import list_files

__all__ = ["own_datasets_cache"]


def the_file(path: Path, **fields: object) -> SourceFile:
    (file,) = list_files([Source.model_validate({"path": str(path), **fields})], "data.train")
    return file


def skipped(file: SourceFile) -> tuple[list[str], list[str]]:
    """Return (texts of the documents, messages of the bad records without the path)."""
    bad: list[BadRecord] = []
    texts = texts_in(file.pieces(bad.append))
    assert all(record.path == file.path for record in bad)
    return texts, [str(record).removeprefix(f"{file.path}, ") for record in bad]


LINES = [
    (b'{"text": "cut"', "cannot be read (Expecting ',' delimiter"),
    (b"plain words", "cannot be read (Expecting value"),
    (b"[" * 100_000, "cannot be read (maximum recursion depth"),
    (b'{"n": ' + b"9" * 5000 + b"}", "cannot be read (Exceeds the limit"),
    (b'["text"]', "a line must be one JSON object in UTF-8, but this one is a list"),
    (b'"text"', "this one is a string"),
    (b"null", "this one is null"),
    (b'{"text": "\xff"}', "can't decode byte 0xff in position 10"),
    (b'{"text": null}', 'the field "text" must be a string, but is null'),
    (b'{"text": 5}', 'the field "text" must be a string, but is a number'),
    (b'{"text": {"en": "a"}}', 'the field "text" must be a string, but is an object'),
    (b'{"text": "a\\ud800"}', "is one with half a character (\\ud800 at character 1)"),
    (b'{"id": 1, "body": ""}', 'must hold the text, but is missing; the fields are "id", "body"'),
    (b"{}", "is missing; the fields are none"),
]


@pytest.mark.parametrize(("line", "problem"), LINES, ids=lambda value: str(value)[:24])
def test_a_line_that_is_not_a_record_is_reported_by_number_and_byte(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n\n' + line + b'\n{"text": "behind"}\n')
    texts, (reported,) = skipped(the_file(path))
    assert texts == ["before", "behind"]
    assert reported.startswith("line 3 (byte 20): ")
    assert problem in reported and reported.endswith(" correct it")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3 \(byte 20\): "):
        texts_in(the_file(path).pieces())


def test_a_missing_field_is_mended_by_naming_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"], field="content"))
    texts, (reported,) = skipped(the_file(tmp_path / "a.jsonl"))
    assert texts == []
    assert (
        'the fields are "id", "content"; name the right one as text_field, or --text-field, or '
        "correct it"
    ) in reported


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_lines_are_counted_from_the_beginning_of_the_text(tmp_path: Path, suffix: str) -> None:
    content = json_lines([f"text {i}" for i in range(3000)]) + b"oops\n"
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    _, (reported,) = skipped(the_file(path))
    assert reported.startswith(f"line 3,001 (byte {len(content) - 5:,}): ")


def noise(texts: int, size_bytes: int) -> list[str]:
    """Return texts that compress to half their size, the same at every call."""
    chance = random.Random(0)
    return [chance.randbytes(size_bytes).hex() for _ in range(texts)]


ARCHIVES = {
    "a.jsonl.gz": gzip.compress(json_lines(noise(10_000, 50))),
    "a.jsonl.zst": zst(json_lines(noise(10_000, 50))),
    "a.txt.gz": gzip.compress(plain_text(noise(10_000, 50))),
}


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("damage", ["cut", "altered", "no archive"])
def test_a_damaged_archive_states_how_far_it_could_be_read(
    tmp_path: Path, name: str, damage: str
) -> None:
    whole = ARCHIVES[name]
    half = len(whole) // 2
    content = {
        "cut": whole[:half],
        "altered": whole[:half] + bytes(64) + whole[half + 64 :],
        "no archive": b"no archive at all",
    }[damage]
    (tmp_path / name).write_bytes(content)
    texts, bad = skipped(the_file(tmp_path / name))
    reported = bad[-1]
    assert f" of {len(content):,} on disk: " in reported
    assert "the file is damaged or truncated and cannot be read further (" in reported
    assert "bytes of text could be read; copy the complete file here again" in reported
    if damage == "no archive":
        assert texts == [] and "; 0 bytes of text" in reported
    else:
        assert 1_000 < len(texts) < 10_000


def test_an_archive_after_a_bad_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(ARCHIVES["a.jsonl.gz"][:-1])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(["good"])))
    files = list_files([Source(path=f"{tmp_path}/*.gz")], "data.train")
    bad: list[BadRecord] = []
    texts = [text for file in files for text in texts_in(file.pieces(bad.append))]
    assert texts[-1] == "good"
    assert [record.path.name for record in bad] == ["a.jsonl.gz"]


def test_a_document_of_plain_text_is_omitted_from_the_bad_piece_on(tmp_path: Path) -> None:
    words = b"words " * (PIECE_BYTES // 6)
    separator = b"\n<|endoftext|>\n"
    documents = [b"first", b"sec\xffond", b"third", words + words + b"\xff" + words, b"fifth"]
    path = tmp_path / "a.txt"
    path.write_bytes(separator.join(documents))
    texts, (second, fourth) = skipped(the_file(path))
    assert [texts[0], texts[1], texts[3]] == ["first\n", "third\n", "fifth"]
    assert (words + words).decode().startswith(texts[2]) and len(texts[2]) > PIECE_BYTES // 2
    assert second.startswith("byte 23: text must be UTF-8, but this byte is 0xff (invalid start")
    assert fourth.startswith(f"byte {path.read_bytes().rindex(bytes([255])):,}: ")


def test_the_first_bad_record_of_every_file_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}\n{}\n")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.jsonl").write_bytes(json_lines(["good"]))
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError) as caught:
        read_documents(list_files([Source(path=f"{tmp_path}/*")], "data.train"))
    places = [problem.split(": ")[0] for problem in caught.value.problems]
    assert places == [
        f"{tmp_path}/a.jsonl, line 1 (byte 0)",
        f"{tmp_path}/b.txt, byte 0",
        f"{tmp_path}/d.parquet, the table",
    ]


def test_a_table_without_the_column_lists_those_it_has(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", ["a"], column="content")
    assert skipped(the_file(tmp_path / "a.parquet")) == (
        [],
        [
            'its columns: the column "text" must hold the text, but is missing; the columns are '
            '"id", "content"; name the right one as text_field, or --text-field'
        ],
    )
    _, (reported,) = skipped(the_file(tmp_path / "a.parquet", text_field="id"))
    assert reported.startswith('row 0 (counted from 0): the column "id" must be a string, but is')


@pytest.mark.parametrize("write", [write_table, saved])
def test_a_row_without_text_is_reported_by_its_number(tmp_path: Path, write: object) -> None:
    assert callable(write)
    write(tmp_path / "a.parquet", ["a", "b", "c", None, "e"])
    texts, (reported,) = skipped(the_file(tmp_path / "a.parquet"))
    assert texts == ["a", "b", "c", "e"]
    assert reported.startswith(
        'row 3 (counted from 0): the column "text" must be a string, but is null; '
    )


def test_a_row_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    raw = pyarrow.array([b"a", b"\xff", b"c"])
    column = pyarrow.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    texts, (reported,) = skipped(the_file(tmp_path / "a.parquet"))
    assert texts == ["a", "c"]
    assert reported.startswith("row 1 (counted from 0): ") and "but is not UTF-8" in reported


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_a_damaged_table_is_reported(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    write_table(path, noise(100, 500))
    whole = path.read_bytes()
    half = len(whole) // 2
    altered = whole[:half] + bytes(3000) + whole[half + 3000 :]
    path.write_bytes(whole[:half] if damage == "cut" else altered)
    texts, bad = skipped(the_file(path))
    assert len(texts) < 100
    (reported,) = bad
    assert reported.startswith("the table: it cannot be read completely (")
    assert reported.endswith("copy the complete file here again")


def test_a_saved_dataset_without_the_split_or_the_column_lists_those_it_has(tmp_path: Path) -> None:
    saved_splits(tmp_path / "splits", ["a", "b"])
    with pytest.raises(DataError, match=r"has no 'tset'; state one of test, train as split"):
        the_file(tmp_path / "splits", split="tset")
    _, (reported,) = skipped(the_file(tmp_path / "splits", text_field="body"))
    assert reported.startswith('its columns: the column "body" must hold the text, but is missing;')


def test_a_damaged_saved_dataset_is_reported(tmp_path: Path) -> None:
    saved(tmp_path / "dataset", ["a", "b"])
    (arrow,) = (tmp_path / "dataset").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:40])
    assert skipped(the_file(tmp_path / "dataset"))[1][0].startswith("the table: it cannot")


@pytest.mark.usefixtures("own_datasets_cache")
@pytest.mark.parametrize(
    ("wrong", "printed"),
    [
        ({"split": "tset"}, "split"),
        ({"configuration": "nonesuch"}, "BuilderConfig 'nonesuch' not found"),
        ({"dataset": "/no/such/folder"}, "folder"),
    ],
)
def test_an_error_of_load_dataset_is_reported_with_the_mend(
    tmp_path: Path, wrong: dict[str, str], printed: str
) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "train.jsonl").write_bytes(json_lines(["a"]))
    given = {"dataset": str(tmp_path / "named"), **wrong}
    (file,) = list_files([Source.model_validate(given)], "data.train")
    with pytest.raises(DataError, match=printed) as caught:
        texts_in(file.pieces())
    assert "save the dataset elsewhere with save_to_disk" in str(caught.value)


@pytest.mark.usefixtures("own_datasets_cache")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_named_dataset_without_the_column_lists_those_it_has(
    tmp_path: Path, streaming: bool
) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "train.jsonl").write_bytes(json_lines(["a"], field="content"))
    source = Source(dataset=str(tmp_path / "named"), streaming=streaming)
    (file,) = list_files([source], "data.train")
    with pytest.raises(DataError, match=r'but is missing; the columns are "id", "content"'):
        texts_in(file.pieces())


def test_a_row_of_a_dictionary_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    raw = pyarrow.array([b"a", b"\xff"])
    words = pyarrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0, 1, None, 0], pyarrow.int32()), words
    )
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    texts, (bad, null) = skipped(the_file(tmp_path / "a.parquet"))
    assert texts == ["a", "a"]
    assert bad.startswith("row 1 ") and "but is not UTF-8" in bad
    assert null.startswith("row 2 ") and "but is null" in null


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst"])
def test_an_archive_of_no_bytes_was_cut(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    texts, (reported,) = skipped(the_file(tmp_path / name))
    assert texts == [] and reported.startswith("byte 0 of 0 on disk: ")
    assert reported.endswith("; copy the complete file here again")
