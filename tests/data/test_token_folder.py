"""A token folder is opened as it was written, and a damaged one is refused."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.sources import paths_at
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import (
    Shard,
    TokenFolderIndex,
    is_token_folder,
    open_token_folder,
    read_index,
    token_paths,
    write_index,
)
from megaspeed.files.json_values import read_sealed, write_sealed
from tests.data.token_folders import open_all


def write_folder(folder: Path, *shards: list[int]) -> TokenFolderIndex:
    folder.mkdir()
    described = []
    for number, ids in enumerate(shards):
        path = folder / f"tokens-{number:05d}.bin"
        path.write_bytes(np.array(ids, dtype="<u2").tobytes())
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        described.append(Shard(path.name, len(ids), ids.count(0), checksum))
    index = TokenFolderIndex(
        dtype="<u2",
        documents=sum(shard.documents for shard in described),
        tokens=sum(shard.tokens for shard in described),
        vocab_size=300,
        end_of_text=0,
        tokenizer_fingerprint="tokenizer",
        corpus_fingerprint="corpus",
        largest_id=max(max(ids) for ids in shards),
        shards=tuple(described),
    )
    write_index(folder, index)
    return index


def open_folder(folder: Path) -> tuple[TokenFile, ...]:
    return open_token_folder(folder, Cache(folder.parent / "cache"))


def refusal(folder: Path) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        open_folder(folder)
    return caught.value.problems


def test_a_folder_is_its_shards_in_order(tmp_path: Path) -> None:
    index = write_folder(tmp_path / "tokens", [5, 6, 0], [7, 299, 8, 0, 9, 0])
    assert read_index(tmp_path / "tokens") == index
    first, second = open_folder(tmp_path / "tokens")
    assert first.map().tolist() == [5, 6, 0]
    assert second.map().tolist() == [7, 299, 8, 0, 9, 0]
    assert (first.index.documents, second.index.documents) == (1, 2)
    for file in (first, second):
        assert file.index.largest_id == 299
        assert file.index.end_of_text == 0
        assert file.index.tokenizer_fingerprint == "tokenizer"
    opened = open_all(tmp_path / "tokens", Cache(tmp_path / "cache"))
    assert opened == (first, second)


def test_one_shard_has_the_fingerprint_of_its_text_and_several_have_their_own(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path / "one", [5, 6, 0])
    (file,) = open_folder(tmp_path / "one")
    assert file.index.corpus_fingerprint == "corpus"
    index = write_folder(tmp_path / "two", [5, 6, 0], [7, 0])
    fingerprints = [file.index.corpus_fingerprint for file in open_folder(tmp_path / "two")]
    assert fingerprints == [shard.checksum for shard in index.shards]


def test_an_id_beyond_the_vocabulary_is_reported_for_the_shard_that_has_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "tokens", [5, 6, 0], [7, 299, 0])
    first, second = open_folder(tmp_path / "tokens")
    assert first.large_id(299) is None
    assert "tokens-00001.bin has id 299 at token 1 (byte 2)" in str(second.large_id(299))


def test_an_unfinished_folder_states_how_to_continue(tmp_path: Path) -> None:
    write_folder(tmp_path / "tokens", [5, 6, 0])
    (tmp_path / "tokens" / "index.json").unlink()
    assert is_token_folder(tmp_path / "tokens") and token_paths(paths_at(str(tmp_path / "tokens")))
    (problem,) = refusal(tmp_path / "tokens")
    assert (
        "its tokenization did not finish; run the same `megaspeed tokenize` command again"
        in problem
    )


def test_every_damaged_shard_is_named_with_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    write_folder(folder, [5, 6, 0], [7, 0], [8, 0])
    (folder / "tokens-00000.bin").write_bytes(b"\x05\x00\x06\x00")
    (folder / "tokens-00001.bin").unlink()
    (folder / "tokens-00002.bin").write_bytes(b"\x09\x00\x00\x00")
    cut, missing, altered = refusal(folder)
    assert "tokens-00000.bin has 4 bytes instead of 6" in cut
    assert "tokens-00001.bin is missing" in missing
    assert "tokens-00002.bin did not: its sha256 is" in altered
    assert all("copy the folder again, or remove it" in problem for problem in (cut, altered))


def test_an_edited_index_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    write_folder(folder, [5, 6, 0])
    path = folder / "index.json"
    sealed = path.read_text()
    path.write_text(sealed.replace('"vocab_size": 300', '"vocab_size": 200'))
    assert "its hash does not match" in refusal(folder)[0]
    facts = read_sealed(folder / "index.json")
    assert facts is None
    path.write_text(sealed)
    facts = read_sealed(path)
    assert facts is not None
    write_sealed(path, facts | {"format": 9})
    assert "have format 2, but" in refusal(folder)[0] and "has format 9" in refusal(folder)[0]
    write_sealed(path, facts | {"format": 1, "samples": ["of version 0.2"]})
    assert read_index(folder).tokens == 3


def test_a_folder_without_tokens_is_not_a_source(tmp_path: Path) -> None:
    index = write_folder(tmp_path / "tokens", [5, 0])
    write_index(tmp_path / "tokens", replace(index, shards=(), tokens=0, documents=0))
    with pytest.raises(DataError, match="a source must have tokens"):
        open_all(tmp_path / "tokens", Cache(tmp_path / "cache"))


def test_the_index_has_the_documented_json(tmp_path: Path) -> None:
    write_folder(tmp_path / "tokens", [5, 6, 0])
    facts = json.loads((tmp_path / "tokens" / "index.json").read_text())
    assert facts["format"] == 2
    assert facts["shards"][0].keys() == {"file", "tokens", "documents", "checksum"}
    assert facts.keys() >= {
        "dtype", "documents", "tokens", "vocab_size", "end_of_text", "tokenizer_fingerprint",
        "corpus_fingerprint", "largest_id", "shards",
    }  # fmt: skip


def test_every_shard_is_read_completely_once_on_a_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_folder(tmp_path / "tokens", [1] * 100_000, [1])
    source, cache = tmp_path / "tokens", Cache(tmp_path / "cache")
    for _ in range(2):
        open_all(source, cache)
        reported = [record.getMessage().removesuffix(" once") for record in caplog.records]
        shards = [tmp_path / "tokens" / f"tokens-0000{number}.bin" for number in range(2)]
        assert reported == [f"reading {shard}" for shard in shards]


def test_an_altered_byte_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    index = write_folder(folder, [1] * 100_000, [1])
    source, cache = folder, Cache(tmp_path / "cache")
    open_all(source, cache)
    path = folder / "tokens-00000.bin"
    content = bytearray(path.read_bytes())
    content[1 << 16] ^= 1
    path.write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    with pytest.raises(DataError) as caught:
        open_all(source, cache)
    assert caught.value.problems == (
        f"a shard must stay as it was written, but {path} did not: its sha256 is {found[:16]}... "
        f"instead of {index.shards[0].checksum[:16]}...; copy the folder again, or remove it and "
        "tokenize again",
    )


def test_an_index_of_another_program_makes_no_token_folder(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"weight_map": {}}')
    assert not is_token_folder(tmp_path) and not token_paths(paths_at(str(tmp_path)))
    ids = tmp_path / "train.bin"
    ids.write_bytes(b"\x05\x00\x06\x00")
    (file,) = open_all(ids, Cache(tmp_path / "cache"))
    assert file.map().tolist() == [5, 6]


def test_a_plan_of_another_program_makes_no_token_folder(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"input": [], "shard_tokens": 1, "format": 1}')
    assert not is_token_folder(tmp_path)
