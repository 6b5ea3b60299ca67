"""Sources of several kinds become one corpus: one component, or one for each weight."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megaspeed.config.run import DataConfig
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.documents import read_documents
from megaspeed.data.errors import DataError
from megaspeed.data.selection import find_problems
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from tests.data.token_folders import write_nanogpt, write_token_folder
from tests.data.written_formats import (
    json_lines,
    own_datasets_cache,
    plain_text,
    write_table,
)

__all__ = ["own_datasets_cache"]

TEXTS = [f"the text of document {number} " * 6 for number in range(40)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(plain_text(TEXTS))
    return path


@pytest.fixture
def tokenizer(text: Path) -> TextTokenizer:
    return train_tokenizer(read_documents([SourceFile(text.name, text)]), 300)


@pytest.fixture
def tokens(tmp_path: Path, text: Path, tokenizer: TextTokenizer) -> Path:
    return write_token_folder(tmp_path / "tokens", text, tokenizer)


def prepared(folder: Path, *train: object, **fields: Any) -> PreparedCorpus:
    data = DataConfig.model_validate({"train": train, "sequence_length": 8, **fields})
    return prepare_corpus(data, 512, cache_dir=folder / "cache")


def ids_of(corpus: PreparedCorpus) -> list[int]:
    return [token for file in corpus.train.files for token in file.map().tolist()]


def test_the_same_documents_give_the_same_ids_from_any_format(tmp_path: Path, text: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    write_table(tmp_path / "a.parquet", TEXTS)
    lines, table, plain = (
        prepared(tmp_path, str(tmp_path / name)) for name in ("a.jsonl", "a.parquet", "a.txt")
    )
    assert ids_of(lines) == ids_of(table) == ids_of(plain)
    assert lines.validation is not None and plain.validation is not None
    assert lines.validation.tokens == plain.validation.tokens > 0


@pytest.mark.usefixtures("own_datasets_cache")
def test_a_dataset_by_name_is_prepared_as_files_are(tmp_path: Path, text: Path) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "train.jsonl").write_bytes(json_lines(TEXTS))
    named = {"dataset": str(tmp_path / "named")}
    assert ids_of(prepared(tmp_path, named)) == ids_of(prepared(tmp_path, str(text)))
    with pytest.raises(DataError, match="save the dataset elsewhere with save_to_disk"):
        prepared(tmp_path, {**named, "configuration": "nonesuch"})


def test_a_token_folder_is_the_stream_of_its_text(tmp_path: Path, text: Path, tokens: Path) -> None:
    whole: dict[str, Any] = {"validation_fraction": 0.0, "tokenizer": str(tokens)}
    of_text = prepared(tmp_path, str(text), **whole)
    of_tokens = prepared(tmp_path, str(tokens), **whole)
    assert ids_of(of_tokens) == ids_of(of_text)
    assert of_tokens.fingerprint == of_text.fingerprint
    assert of_tokens.tokenizer_fingerprint == of_text.tokenizer_fingerprint


def test_text_beside_a_token_folder_is_tokenized_as_the_folder_is(
    tmp_path: Path, tokens: Path, tokenizer: TextTokenizer
) -> None:
    (tmp_path / "b.txt").write_bytes(plain_text(["other words, as many as that " * 9] * 2))
    corpus = prepared(tmp_path, str(tokens), str(tmp_path / "b.txt"), validation_fraction=0.0)
    (component,) = corpus.train.components
    text_file, shard = component.files
    assert shard.path == tokens / "tokens-00000.bin"
    texts = tokenizer.tokenizer.decode(text_file.map().tolist(), skip_special_tokens=False)
    assert texts == ("other words, as many as that " * 9 + "<|endoftext|>") * 2
    assert corpus.tokenizer is not None
    assert load_tokenizer(str(corpus.tokenizer)).fingerprint == tokenizer.fingerprint


def test_with_weights_each_source_is_a_component_that_is_trained_and_validated_on(
    tmp_path: Path, text: Path, tokens: Path
) -> None:
    (tmp_path / "b.jsonl").write_bytes(json_lines(["b " * 99 + str(i) for i in range(20)]))
    corpus = prepared(
        tmp_path,
        {"path": str(text), "weight": 3},
        {"path": str(tokens), "weight": 0.5},
        {"path": f"{tmp_path}/b.jsonl", "weight": 1},
        validation_fraction=0.2,
    )
    assert corpus.validation is not None
    for mixture in (corpus.train, corpus.validation):
        assert [component.weight for component in mixture.components] == [3.0, 0.5, 1.0]
        assert [component.name for component in mixture.components] == [
            str(text),
            str(tokens),
            f"{tmp_path}/b.jsonl",
        ]
    held_out = [
        held.tokens / (held.tokens + trained.tokens)
        for held, trained in zip(corpus.validation.components, corpus.train.components, strict=True)
    ]
    assert held_out == pytest.approx([0.2] * 3, abs=0.06)


def test_the_rule_of_version_0_1_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="without hold_out_by, because only tokens are held out"):
        DataConfig.model_validate({"sequence_length": 8, "hold_out_by": "documents"})
    kept = DataConfig.model_validate({"sequence_length": 8, "hold_out_by": "tokens"})
    assert kept == DataConfig(sequence_length=8), "as config.json of version 0.2 states it"


def test_another_field_of_the_same_file_is_another_text(tmp_path: Path) -> None:
    records = [{"text": f"words {i} " * 9, "more": f"others {i} " * 9} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    sources = [{"path": f"{tmp_path}/a.jsonl", "text_field": field} for field in ("text", "more")]
    one, other = (prepared(tmp_path, source) for source in sources)
    assert one.fingerprint != other.fingerprint


def test_a_weight_changes_no_token_file(tmp_path: Path, text: Path) -> None:
    light, heavy = (prepared(tmp_path, {"path": str(text), "weight": w}) for w in (1, 7))
    assert light.train.files == heavy.train.files == prepared(tmp_path, str(text)).train.files


def test_validation_sources_may_be_of_another_kind(
    tmp_path: Path, text: Path, tokens: Path
) -> None:
    corpus = prepared(tmp_path, str(text), validation=[str(tokens)])
    assert corpus.validation is not None
    assert corpus.validation.files[0].path.parent == tokens
    assert corpus.train.files[0].map().tolist() == corpus.validation.files[0].map().tolist()


def test_foreign_tokens_alone_need_no_tokenizer(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "train.bin", list(range(400)))
    corpus = prepared(tmp_path, str(path), validation_fraction=0.25)
    assert corpus.tokenizer is None
    assert corpus.validation is not None
    held_out = corpus.validation.files[0].map().tolist()
    assert held_out == list(range(held_out[0], held_out[0] + 100))
    assert sorted(ids_of(corpus) + held_out) == list(range(400))
    assert prepared(tmp_path, str(path), validation_fraction=0.25) == corpus


def test_foreign_tokens_beside_text_use_the_named_tokenizer(
    tmp_path: Path, text: Path, tokens: Path
) -> None:
    path = write_nanogpt(tmp_path / "train.bin", list(range(280)))
    with pytest.raises(DataError, match=r"name that tokenizer in data\.tokenizer"):
        prepared(tmp_path, str(text), str(path))
    tokenizer = str(tokens)
    corpus = prepared(tmp_path, str(text), str(path), tokenizer=tokenizer, validation_fraction=0.0)
    assert [len(component.files) for component in corpus.train.components] == [2]


def test_the_tokenizer_in_the_cache_is_one_for_transformers_with_its_own_end_of_text(
    tmp_path: Path, text: Path, tokenizer: TextTokenizer
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_bytes(tokenizer.to_json())
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": "w"}')
    corpus = prepared(tmp_path, str(text), tokenizer=str(tmp_path / "own"))
    assert corpus.tokenizer is not None
    end = tokenizer.tokenizer.token_to_id("w")
    assert corpus.end_of_text == end == load_tokenizer(str(corpus.tokenizer)).end_of_text
    assert AutoTokenizer.from_pretrained(corpus.tokenizer).eos_token_id == end


def test_every_share_with_a_bad_record_is_reported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        content = json_lines(["good " * 9, "fine " * 9]) + b"bad\n"
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    sources = [{"path": f"{tmp_path}/{name}.jsonl", "weight": 1} for name in ("a", "b")]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, *sources)
    assert [reported.split(",")[0] for reported in caught.value.problems] == [
        f"{tmp_path}/a.jsonl",
        f"{tmp_path}/b.jsonl",
    ]


def test_a_corpus_of_tokens_and_text_shows_every_token_once_an_epoch(
    tmp_path: Path, text: Path, tokens: Path
) -> None:
    corpus = prepared(tmp_path, str(text), str(tokens), validation_fraction=0.0)
    (component,) = corpus.train.components
    assert corpus.training_sequences == 2 * ((component.files[0].index.tokens - 1) // 8)
    assert np.array_equal(component.files[0].map(), component.files[1].map())


def test_a_source_whose_documents_others_hold_out_is_not_omitted_silently(
    tmp_path: Path,
) -> None:
    """Each source holds out one of its two documents. No source trains on held-out ones."""
    one, two, three = TEXTS[10:13]
    sources = []
    for name, documents in {"a": [one, two], "b": [two, three], "c": [one, three]}.items():
        (tmp_path / f"{name}.txt").write_bytes(plain_text(documents))
        sources.append({"path": f"{tmp_path}/{name}.txt", "weight": 1})
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, *sources, validation_fraction=0.5)
    (reported,) = caught.value.problems
    assert reported.startswith(
        "data.train: every source must keep text to train on, but all 2 documents of "
        f"'{tmp_path}/c.txt' are held out: "
    )
    assert "lower data.validation_fraction (0.5), give data.validation sources" in reported
    (tmp_path / "validation.txt").write_bytes(plain_text(TEXTS[:2]))
    corpus = prepared(tmp_path, *sources, validation=[f"{tmp_path}/validation.txt"])
    assert len(corpus.train.components) == 3


def test_a_glob_may_match_text_and_tokens_and_skips_ordinary_folders(
    tmp_path: Path, text: Path, tokens: Path
) -> None:
    together = tmp_path / "together"
    (together / "ordinary").mkdir(parents=True)
    tokens.rename(together / "tokens")
    (only,) = prepared(tmp_path, f"{together}/*").train.components
    text.rename(together / "z.txt")
    (both,) = prepared(tmp_path, f"{together}/*").train.components
    assert only.files[0].path.parent == together / "tokens"
    assert both.files[1:] == only.files


def test_32_bit_ids_are_not_read_as_nanogpts_16_bit_ones(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    data = DataConfig(train=(str(path),), sequence_length=8)
    for vocab_size, largest_upper in ((512, 0), (128_256, 1)):
        np.linspace(0, vocab_size - 1, 400).astype("<u4").tofile(path)
        (reported,) = find_problems(data, vocab_size)
        assert f"every second one of {path} is at most {largest_upper}, as in a file of" in reported
        with pytest.raises(DataError) as caught:
            prepare_corpus(data, vocab_size, cache_dir=tmp_path / "cache")
        assert caught.value.problems == (reported,)


@pytest.mark.parametrize("vocab_size", [512, 50_304, 128_256])
def test_16_bit_ids_are_right_for_a_model_of_any_vocabulary(
    tmp_path: Path, vocab_size: int
) -> None:
    """A vocabulary may be padded, so a large one alone states nothing about the file."""
    path = write_nanogpt(tmp_path / "train.bin", list(range(400)))
    assert tuple(find_problems(DataConfig(train=(str(path),), sequence_length=8), vocab_size)) == ()


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_of_long_documents_the_fraction_is_held_out_and_no_more(
    tmp_path: Path, kind: str, tokenizer: TextTokenizer
) -> None:
    path = tmp_path / "three.txt"
    path.write_bytes(plain_text([" ".join(f"{n}{i}" for i in range(n)) for n in (330, 380, 290)]))
    if kind == "tokens":
        path = write_token_folder(tmp_path / "three", path, tokenizer)
    corpus = prepared(tmp_path, str(path), validation_fraction=0.05)
    assert corpus.validation is not None
    tokens = corpus.validation.tokens
    assert tokens / (tokens + corpus.train.tokens) == pytest.approx(0.05, abs=0.005)


def test_text_for_training_is_not_recalled_as_text_for_validation(tmp_path: Path) -> None:
    """The same files in the same order, but another one is for validation."""
    files = []
    for name in "pqr":
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text(f"{name} " * 400)
    p, q, r = ({"path": str(file), "weight": 1} for file in files)
    settled = {"sequence_length": 4}
    first = prepared(tmp_path, p, validation=[q, r], **settled)
    second = prepared(tmp_path, p, q, validation=[r], **settled)
    assert len(list((tmp_path / "cache" / "text").iterdir())) == 2
    assert first.fingerprint != second.fingerprint


def test_of_a_short_document_one_token_stays_for_training(tmp_path: Path) -> None:
    """Of its two tokens, 0.9 x 2 would be both. One token is too few for a sequence."""
    (tmp_path / "short.txt").write_text("ab")
    short = str(tmp_path / "short.txt")
    with pytest.raises(DataError) as error:
        prepared(tmp_path, short, validation_fraction=0.9, sequence_length=1)
    assert str(error.value).count("but has 1;") == 2, "training and validation"


def test_a_single_document_is_divided(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(" ".join(f"word{i}" for i in range(3000)))
    corpus = prepared(tmp_path, str(path), validation_fraction=0.1)
    assert corpus.validation is not None
    (train,), (tail,) = corpus.train.files, corpus.validation.files
    assert train.first_token + train.index.tokens == tail.first_token
    assert tail.index.tokens == pytest.approx(0.1 * (train.index.tokens + tail.index.tokens), abs=1)
