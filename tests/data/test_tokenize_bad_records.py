"""A bad record ends the work with its place and its mend, or it is skipped and listed."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megaspeed.cli import main
from megaspeed.data import formats
from megaspeed.data.cache import Cache
from megaspeed.data.token_sources import open_token_folder
from megaspeed.data.tokenizer import load_tokenizer

GOOD = ["first text", "second text"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in GOOD).encode()
MANY_LINES = b"".join(json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(20_000))


def table(texts: Sequence[str | None], column: str = "text") -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({column: pyarrow.array(texts, pyarrow.string())}), sink)
    return sink.getvalue().to_pybytes()


BAD = {
    "no-json.jsonl": (LINES + b'{"text": \n', "line 3 (byte 47)"),
    "missing.jsonl": (LINES + b'{"content": "here"}\n', "line 3 (byte 47)"),
    "number.jsonl": (b'{"text": 7}\n' + LINES, "line 1 (byte 0)"),
    "latin.jsonl": (LINES + b'{"text": "caf\xe9"}\n', "line 3 (byte 47)"),
    "latin.txt": (b"caf\xe9", "byte 3"),
    "cut.jsonl.gz": (gzip.compress(MANY_LINES)[:-2000], "on disk"),
    "cut.jsonl.zst": (zstandard.compress(MANY_LINES)[:-2000], "on disk"),
    "null.parquet": (table([*GOOD, None]), "row 2"),
    "other-column.parquet": (table(GOOD, "content"), "its columns"),
}
"""Name -> (content, where the bad record is)."""


def tokenize(text: Path, tokenizer: Path, *options: str) -> int:
    out = text.with_name("out")
    return main(
        ["tokenize", str(text), "--tokenizer", str(tokenizer), "--output", str(out), *options]
    )


def test_skip_bad_skips_counts_and_lists_all_bad_records(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call with the option may follow one without it, in the same folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, (content, _) in BAD.items():
        (folder / name).write_bytes(content)
    (folder / "many.jsonl").write_text('{"text": 1}\n' * 20 + '{"text": "the end"}\n')
    text = tmp_path / "texts" / "*"
    out = folder / "out"
    assert tokenize(text, tokenizer_folder) == 2
    assert f"{folder}/cut.jsonl.gz, byte " in capsys.readouterr().err
    assert not (out / "index.json").exists()
    assert tokenize(text, tokenizer_folder, "--skip-bad") == 0
    reported, complained = capsys.readouterr()

    skipped = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert len(skipped) == len(BAD) + 20
    for name, (_, where) in BAD.items():
        (record,) = (record for record in skipped if record["file"] == str(folder / name))
        assert where in record["where"]
        assert record["problem"]
    many = [record["where"] for record in skipped if record["file"].endswith("many.jsonl")]
    assert many[0].startswith("line 1 ") and many[-1].startswith("line 20 ")
    assert f"bad records skipped: {len(skipped)}, {out / 'skipped.jsonl'}" in reported
    assert complained.count("skipped: /") == 10

    tokenizer = load_tokenizer(str(out))
    (file,) = open_token_folder(out, Cache(tmp_path / "cache"))
    texts = tokenizer.tokenizer.decode(file.map().tolist(), skip_special_tokens=False)
    documents = texts.split("<|endoftext|>")
    assert "the end" in documents
    assert documents.count("first text") == 5


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_that_is_too_long_is_refused_or_skipped_before_it_is_complete(
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
) -> None:
    """A file of 17 MB had a line of 3 GiB, and reading it ended with a MemoryError."""
    monkeypatch.setattr(formats, "_LONGEST_LINE_BYTES", 1000)
    content = LINES + b" " * 500_000 + b"\n" + LINES
    packed = {"": content, ".gz": gzip.compress(content), ".zst": zstandard.compress(content)}
    text = tmp_path / f"a.jsonl{suffix}"
    text.write_bytes(packed[suffix])
    assert tokenize(text, tokenizer_folder) == 2
    reported = " ".join(capsys.readouterr().err.split())
    assert f"{text}, line 3 (byte 47): a line must have at most 1,000 bytes" in reported
    assert tokenize(text, tokenizer_folder, "--skip-bad") == 0
    assert len((tmp_path / "out" / "skipped.jsonl").read_text().splitlines()) == 1
    (file,) = open_token_folder(tmp_path / "out", Cache(tmp_path / "cache"))
    assert file.index.documents == 2


def test_any_number_of_consecutive_bad_records_is_skipped(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """They are not kept in memory."""
    text = tmp_path / "a.jsonl"
    text.write_bytes(LINES + b'{"content": 1}\n' * 120_000 + LINES)
    assert tokenize(text, tokenizer_folder, "--skip-bad") == 0
    with (tmp_path / "out" / "skipped.jsonl").open() as lines:
        assert sum(1 for _ in lines) == 120_000
    (file,) = open_token_folder(tmp_path / "out", Cache(tmp_path / "cache"))
    assert file.index.documents == 4
