"""Token files of nanoGPT and Megatron-LM are read unchanged, and refused if they are damaged."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.foreign_tokens import MegatronIndex
from megaspeed.data.search import paths_at
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import token_paths
from tests.data.foreign_tokens import write_megatron, write_nanogpt
from tests.data.token_folders import open_all

DOCUMENTS = [[[5, 6, 7, 0]], [[8, 0]], [[9, 10, 0]]]  # 0 ends each and occurs nowhere else
IDS = [5, 6, 7, 0, 8, 0, 9, 10, 0]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def open_one(path: Path | str, cache: Cache) -> TokenFile:
    (file,) = open_all(path, cache)
    return file


def refusal(path: Path | str, cache: Cache) -> str:
    with pytest.raises(DataError) as caught:
        open_all(path, cache)
    (problem,) = caught.value.problems
    return problem


def test_a_nanogpt_file_is_its_ids_and_what_one_pass_finds(tmp_path: Path, cache: Cache) -> None:
    file = open_one(write_nanogpt(tmp_path / "train.bin", [3, 50_256, 65_535, 4]), cache)
    assert file.map().tolist() == [3, 50_256, 65_535, 4]
    assert file.index.largest_id == 65_535
    assert (file.index.end_of_text, file.index.documents) == (None, None)
    assert (file.index.vocab_size, file.index.tokenizer_fingerprint) == (None, None)


@pytest.mark.parametrize("named", ["corpus", "corpus.bin", "corpus.idx", "corpus.[bi]*"])
def test_a_megatron_pair_is_named_by_either_file_its_prefix_or_a_glob(
    tmp_path: Path, cache: Cache, named: str
) -> None:
    write_megatron(tmp_path / "corpus", DOCUMENTS)
    (tmp_path / "corpus.v2").mkdir()  # of no concern
    assert token_paths(paths_at(str(tmp_path / named)))
    assert token_paths(paths_at(str(tmp_path / named))) == [tmp_path / "corpus.idx"]
    file = open_one(tmp_path / named, cache)
    assert file.path == tmp_path / "corpus.bin"
    assert file.map().tolist() == IDS
    assert (file.index.documents, file.index.largest_id) == (3, 10)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_every_integer_type_of_megatron_is_read(tmp_path: Path, cache: Cache, dtype: str) -> None:
    file = open_one(write_megatron(tmp_path / "corpus", DOCUMENTS, dtype), cache)
    assert file.map().tolist() == IDS
    assert file.map().dtype == np.dtype(f"<{dtype}")


def test_ids_above_65535_are_read_from_megatrons_32_bits(tmp_path: Path, cache: Cache) -> None:
    file = open_one(write_megatron(tmp_path / "corpus", [[[128_000, 7], [128_001]]], "i4"), cache)
    assert file.map().tolist() == [128_000, 7, 128_001]
    assert "has id 128000 at token 0 (byte 0)" in str(file.large_id(128_000))


@pytest.mark.parametrize(
    ("documents", "end_of_text"),
    [
        (DOCUMENTS, 0),
        ([*DOCUMENTS, []], 0),  # a document without any sequence
        ([[[5, 0], [6, 0]], [[7, 0]]], None),  # it occurs within a document, too
        ([[[5, 0]], [[7, 8]]], None),  # not every document ends with it
        ([[[5, 0]]], None),  # one document ends with any id
    ],
)
def test_megatrons_end_of_text_is_the_id_that_ends_every_document_and_nothing_else(
    tmp_path: Path, cache: Cache, documents: list[list[list[int]]], end_of_text: int | None
) -> None:
    file = open_one(write_megatron(tmp_path / "corpus", documents), cache)
    assert file.index.end_of_text == end_of_text


def test_documents_end_as_the_index_states(tmp_path: Path) -> None:
    documents = [[[1, 2], [3]], [], [[4, 5, 6]], []]
    index = MegatronIndex.read(write_megatron(tmp_path / "corpus", documents))
    assert index.document_ends(slice(None)).tolist() == [3, 3, 6, 6]
    assert [index.document_end_from(token) for token in range(1, 7)] == [3, 3, 3, 6, 6, 6]


def test_a_file_is_read_once_and_again_when_it_changed(
    tmp_path: Path,
    cache: Cache,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # of the clock that ticks finely
    path = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    caplog.set_level(logging.INFO)

    def passes() -> int:
        return sum("reading" in message for message in caplog.messages)

    first = open_one(path, cache)
    assert passes() == 1
    open_one(path, cache)
    assert passes() == 2  # it is so young that a change might not show
    settle(path, cache)
    before = passes()
    assert open_one(path, cache) == first
    assert passes() == before
    write_nanogpt(path, [1, 2, 9])
    changed = open_one(path, cache)
    assert changed.index.largest_id == 9
    assert changed.index.corpus_fingerprint != first.index.corpus_fingerprint


def settle(path: Path, cache: Cache) -> None:
    """Open the file as if the clock of the machine were three seconds later.

    Facts about a file are stored only if its times are two seconds old. ctime cannot be set.
    """
    real = os.stat(path).st_ctime_ns / 1e9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megaspeed.data.cache.time.time", lambda: real + 3)
        open_one(path, cache)


def test_the_same_ids_elsewhere_have_the_same_fingerprint(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "there").mkdir()
    one = open_one(write_nanogpt(tmp_path / "train.bin", [1, 2, 3]), cache)
    other = open_one(write_nanogpt(tmp_path / "there" / "other.bin", [1, 2, 3]), cache)
    assert one.index == other.index


def test_several_files_of_a_glob_are_sorted_by_name(tmp_path: Path, cache: Cache) -> None:
    for name in ("b", "a", "c"):
        write_nanogpt(tmp_path / f"{name}.bin", [ord(name)])
    files = open_all(f"{tmp_path}/*.bin", cache)
    assert [file.path.name for file in files] == ["a.bin", "b.bin", "c.bin"]


def test_text_and_folders_of_text_are_not_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "state.json").write_text("{}")
    write_nanogpt(tmp_path / "train.bin", [1])
    assert not token_paths(paths_at(str(tmp_path / "text.txt")))
    assert not token_paths(paths_at(str(tmp_path)))
    assert not token_paths(paths_at(str(tmp_path / "missing.bin")))
    assert token_paths(paths_at(str(tmp_path / "t*")))  # text and tokens
    assert token_paths(paths_at(str(tmp_path / "*.bin")))


def test_a_nanogpt_file_with_half_an_id_names_its_size(tmp_path: Path, cache: Cache) -> None:
    path = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} has 5 bytes; it was truncated" in refusal(path, cache)
    path.write_bytes(b"")
    assert "has 0 bytes" in refusal(path, cache)


def test_a_file_of_llm_c_is_not_read_as_ids(tmp_path: Path, cache: Cache) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(np.array([20240520, 1, *[0] * 254], dtype="<i4").tobytes() + b"\x01\x00")
    assert "begins with llm.c's (20240520)" in refusal(path, cache)


def test_a_cut_megatron_file_names_both_sizes(tmp_path: Path, cache: Cache) -> None:
    prefix = write_megatron(tmp_path / "corpus", DOCUMENTS)
    ids, index = tmp_path / "corpus.bin", tmp_path / "corpus.idx"
    whole = ids.read_bytes(), index.read_bytes()
    ids.write_bytes(whole[0][:-2])
    assert f"must have the 18 bytes that {index} states, but has 16" in refusal(prefix, cache)
    ids.write_bytes(whole[0])
    index.write_bytes(whole[1][:-8])
    assert "must have 102 bytes for its 3 sequences and 4 document bounds, but has 94" in refusal(
        prefix, cache
    )
    index.write_bytes(whole[1][:20])
    assert "has a header of 34 bytes" in refusal(prefix, cache)
    index.write_bytes(whole[1] + b"\x00" * 3)
    assert "one for each of its 3 sequences; multimodal data" in refusal(prefix, cache)


def test_a_missing_half_is_named(tmp_path: Path, cache: Cache) -> None:
    write_megatron(tmp_path / "corpus", DOCUMENTS)
    (tmp_path / "corpus.bin").unlink()
    assert f"there is no {tmp_path / 'corpus.bin'}" in refusal(tmp_path / "corpus.idx", cache)


@pytest.mark.parametrize(
    ("what", "printed"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, r"but .* with b'TNTIDX"),
        ({"version": 2}, "version 1 can be read, but .* has 2"),
        ({"dtype": "f4"}, r"states float32 as the dtype of its .bin"),
        ({"pointers": [0, 10, 12]}, "sequence 1 begins at byte 10 instead of 8"),
        ({"bounds": [0, 2, 1, 3]}, "document 1 ends before it begins"),
        ({"bounds": [0, 1, 2, 2]}, r"hold all 3 sequences, but in .* they hold \[0\] to \[2\]"),
    ],
)
def test_an_impossible_index_is_refused(
    tmp_path: Path, cache: Cache, what: dict[str, object], printed: str
) -> None:
    prefix = write_megatron(tmp_path / "corpus", DOCUMENTS, **what)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=printed):
        open_all(prefix, cache)


def test_a_negative_id_is_named_by_its_place(tmp_path: Path, cache: Cache) -> None:
    prefix = write_megatron(tmp_path / "corpus", [[[1, 2, -3, 4]]], "i4")
    printed = refusal(prefix, cache)
    assert f"{tmp_path / 'corpus.bin'} has -3 at token 2 (byte 8)" in printed


def test_a_file_truncated_after_it_was_opened_is_reported_and_not_read(
    tmp_path: Path, cache: Cache
) -> None:
    file = open_one(write_nanogpt(tmp_path / "train.bin", [1, 2, 3]), cache)
    write_nanogpt(tmp_path / "train.bin", [1, 2])
    with pytest.raises(DataError, match="had at least 6 bytes and has 4"):
        file.map()


def test_it_can_be_opened_under_the_caches_lock(tmp_path: Path, cache: Cache) -> None:
    path = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    with cache.lock():
        open_one(path, cache)
