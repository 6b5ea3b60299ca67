"""A dataset of the hub is tokenized in shards, and training reads the shards that exist."""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import psutil
import pytest

from megaspeed.config.run import DataConfig
from megaspeed.data.background import Tokenization
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.errors import DataError, StreamEnded, StreamInterrupted
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.supervision.answers import RankFailed
from tests.data.words import WORDS
from tests.data.written_formats import json_lines, write_table
from tests.support.command import figures
from tests.support.hub import COMMIT, Hub
from tests.support.machine import limit

S, TOKENS, VOCABULARY = 8, 6401, 2000
SHARDS = [range(first, min(first + 101, TOKENS)) for first in range(0, TOKENS, 101)]
SEQUENCES = [(len(shard) - 1) // S for shard in SHARDS]  # 12 each, and 4 of the last 38 tokens
PARTS = 3


def texts() -> list[str]:
    """Return documents of 0 to 5 words. One is longer than several shards."""
    chance = random.Random(0)
    made = [" ".join(chance.choices(WORDS, k=chance.randrange(6))) for _ in range(800 * PARTS)]
    made[300] = " ".join(WORDS * 2)
    return made


def serve(folder: Path, kind: str = "jsonl") -> None:
    folder.mkdir(parents=True)
    for number in range(PARTS):
        part = texts()[800 * number : 800 * (number + 1)]
        if kind == "parquet":
            write_table(folder / f"train-{number}.parquet", part)
        else:
            (folder / f"train-{number}.jsonl").write_bytes(json_lines(part))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as hub:
        hub.use(monkeypatch)
        yield hub


@pytest.fixture
def data(tokenizer_folder: Path) -> DataConfig:
    return stated(tokenizer_folder)


def stated(tokenizer: Path, *others: Any, fraction: float = 0.0, **source: Any) -> DataConfig:
    stream = {"dataset": "us/words", "revision": COMMIT, "streaming": True, "tokens": TOKENS}
    return DataConfig.model_validate(
        {
            "train": [{**stream, **source}, *others],
            "tokenizer": str(tokenizer),
            "sequence_length": S,
            "validation_fraction": fraction,
        }
    )


def prepare(data: DataConfig, cache: Path) -> PreparedCorpus:
    return prepare_corpus(data, VOCABULARY, cache_dir=cache)


def made(corpus: PreparedCorpus) -> PreparedCorpus:
    """Make all shards."""
    for stream in corpus.streams:
        stream.make()
    return corpus


def ids_of(tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of the stream, encoded at once."""
    encoded = tokenizer.encode([text for text in texts() if text])
    return [token for ids in encoded for token in (*ids, tokenizer.end_of_text)]


def rows_of(corpus: PreparedCorpus, first: int, steps: int, dp: int = 1) -> list[list[int]]:
    """Return the rows of some steps of 8 samples, as ``dp`` ranks read them, sorted by sample."""
    rows: dict[int, list[int]] = {}
    for rank in range(dp):
        loader = TrainingLoader(corpus, LoaderShape(2, 4 // dp, rank, dp))
        for step in range(steps):
            for micro_batch in range(4 // dp):
                batch = loader.micro_batch(first + 8 * step, micro_batch)
                rows |= dict(zip(batch.samples.tolist(), batch.tokens.tolist(), strict=True))
    assert sorted(rows) == list(range(first, first + 8 * steps))
    return [rows[sample] for sample in sorted(rows)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_shards_are_read_in_order_and_shuffled_within_at_every_layout(
    hub: Hub, data: DataConfig, tokenizer: TextTokenizer, tmp_path: Path, kind: str
) -> None:
    serve(tmp_path / "hub" / "data", kind)
    corpus = prepare(data, tmp_path / "cache")
    assert corpus.training_sequences == sum(SEQUENCES) == 760
    made(corpus)
    both_epochs = rows_of(corpus, 0, 190)
    ids, orders = ids_of(tokenizer), []
    for epoch in range(2):
        sample = 760 * epoch
        for shard, count in zip(SHARDS, SEQUENCES, strict=True):
            starts = [shard.start + S * number for number in range(count)]
            expected = [ids[start : start + S] for start in starts]
            read = both_epochs[sample : sample + count]
            assert sorted(read) == sorted(expected), shard
            orders.append([expected.index(row) for row in read])
            sample += count
    assert orders[0] != orders[1] != orders[64]  # of two shards, and of the same one later
    for dp in (2, 4):
        assert rows_of(corpus, 0, 190, dp) == both_epochs
    resumed = prepare(data, tmp_path / "other")
    assert rows_of(resumed, 8 * 20, 3, 2) == both_epochs[160:184]  # makes 16 shards


def test_a_first_shard_is_enough_to_begin(hub: Hub, data: DataConfig, tmp_path: Path) -> None:
    serve(tmp_path / "hub" / "data")
    corpus = prepare(data, tmp_path / "cache")
    loader = TrainingLoader(corpus, LoaderShape(2, 4, 0, 1))
    assert not any(shard.is_missing for shard in loader.shards(0, 8))
    assert "data/train-1.jsonl" not in hub.answered
    (second,) = (shard for shard in loader.shards(8, 8) if shard.is_missing)  # samples 12 to 15
    assert loader._following((0, 3, 8)) is None, "nothing waits in the background"
    second.map()
    assert loader._following((0, 3, 8)) == (8, 0, 8)


@pytest.mark.slow
def test_a_killed_process_is_reported_and_its_shards_are_continued(
    hub: Hub, data: DataConfig, tmp_path: Path
) -> None:
    serve(tmp_path / "hub" / "data")
    corpus = prepare(data, tmp_path / "cache")
    (stream,) = corpus.streams
    hub.held.add("train-1.jsonl")
    with Tokenization([stream]) as tokenization:
        process = the_spawned_process()
        wait_until(lambda: not stream.is_missing(5))
        process.send_signal(signal.SIGTERM)  # of a scheduler, to all processes
        assert tokenization.failure() is None
        process.kill()
        wait_until(lambda: tokenization.failure() is not None)
    failure = tokenization.failure()
    assert isinstance(failure, RankFailed)
    assert all(words in str(failure) for words in ("us/words", "-9", "start again"))
    assert stream.is_missing(63)
    hub.held.clear()
    hub.answered.clear()
    with Tokenization([stream]) as tokenization:
        wait_until(lambda: not stream.is_missing(63))
        assert tokenization.failure() is None
    (other,) = prepare(data, tmp_path / "other").streams
    other.make()
    for shard in range(64):
        assert stream.path(shard).read_bytes() == other.path(shard).read_bytes()


def the_spawned_process() -> psutil.Process:
    def spawned() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    # At first, it has the command line of this process. One of an earlier test may still end.
    wait_until(lambda: len(spawned()) == 1)
    return spawned()[0]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + limit(60)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_end_of_the_block_ends_the_process(hub: Hub, data: DataConfig, tmp_path: Path) -> None:
    serve(tmp_path / "hub" / "data")
    hub.held.add("train-1.jsonl")
    with Tokenization([*prepare(data, tmp_path / "cache").streams]):
        process = the_spawned_process()
    process.wait(limit(10))


def test_a_stream_with_fewer_tokens_is_refused_with_their_number(
    hub: Hub, tokenizer: TextTokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    serve(tmp_path / "hub" / "data")
    count = len(ids_of(tokenizer))
    (stream,) = prepare(stated(tokenizer_folder, tokens=count + 1), tmp_path / "cache").streams
    with pytest.raises(DataError, match=f'has {count:,} of {count + 1:,}; write "tokens": {count}'):
        stream.make()
    (stream,) = prepare(stated(tokenizer_folder, tokens=count), tmp_path / "cache").streams
    stream.make()


def test_a_bad_record_of_a_stream_is_named_by_its_row(
    hub: Hub, data: DataConfig, tmp_path: Path
) -> None:
    serve(tmp_path / "hub" / "data")
    bad: list[str | None] = [*texts()[:700], None, *texts()[701:800]]
    (tmp_path / "hub" / "data" / "train-0.jsonl").write_bytes(json_lines(bad))
    (stream,) = prepare(data, tmp_path / "cache").streams
    for _ in range(2):  # from the beginning, and continued
        with pytest.raises(DataError, match=r"us/words, row 700 .* but is null"):
            stream.make()


def test_only_a_stream_that_may_be_readable_later_is_worth_a_restart(
    hub: Hub, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(tmp_path / "hub" / "data")
    (stream,) = prepare(data, tmp_path / "cache").streams
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    second = tmp_path / "hub" / "data" / "train-1.jsonl"
    content = second.read_bytes()
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(StreamInterrupted, match="Couldn't reach"):
            stream.make()
    second.unlink()
    with pytest.raises(StreamInterrupted, match="start again"):
        stream.make()
    second.write_bytes(content[:-3])
    with Tokenization([stream]) as tokenization:
        wait_until(lambda: tokenization.failure() is not None)
    assert isinstance(tokenization.failure(), StreamEnded)
    assert "fewer tokens" in str(tokenization.failure())


def test_another_commit_or_another_text_is_another_corpus(
    hub: Hub, data: DataConfig, tokenizer_folder: Path, tmp_path: Path
) -> None:
    serve(tmp_path / "hub" / "data")
    corpus = prepare(data, tmp_path / "cache")
    assert prepare(data, tmp_path / "second").fingerprint == corpus.fingerprint
    later = prepare(stated(tokenizer_folder, revision=COMMIT[::-1]), tmp_path / "cache")
    assert later.fingerprint != corpus.fingerprint
    first = tmp_path / "hub" / "data" / "train-0.jsonl"
    first.write_bytes(json_lines(texts()[1:800]))
    assert prepare(data, tmp_path / "third").fingerprint != corpus.fingerprint


def test_a_damaged_shard_is_made_again(hub: Hub, data: DataConfig, tmp_path: Path) -> None:
    serve(tmp_path / "hub" / "data")
    corpus = prepare(data, tmp_path / "cache")
    before = rows_of(made(corpus), 0, 10)
    (stream,) = corpus.streams
    content = bytearray(stream.path(1).read_bytes())
    content[7] ^= 1
    stream.path(1).write_bytes(content)
    assert rows_of(corpus, 0, 10) == before


def test_the_start_of_a_stream_is_held_out(
    hub: Hub, tokenizer: TextTokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    serve(tmp_path / "hub" / "data")
    ids = ids_of(tokenizer)
    for fraction, held_out in ((0.005, 32), (0.1, 50)):  # at most half of the first shard
        corpus = prepare(stated(tokenizer_folder, fraction=fraction), tmp_path / "cache")
        assert corpus.validation is not None
        (part,) = corpus.validation.files
        assert part.map().tolist() == ids[:held_out]
        assert corpus.train.files[0].map().tolist() == ids[held_out:101]


def test_a_stream_with_a_weight_is_mixed_with_text(
    hub: Hub, tokenizer_folder: Path, tmp_path: Path
) -> None:
    serve(tmp_path / "hub" / "data")
    (tmp_path / "other.txt").write_text(" ".join(WORDS))
    other = {"path": str(tmp_path / "other.txt"), "weight": 1}
    corpus = prepare(stated(tokenizer_folder, other, weight=3), tmp_path / "cache")
    assert [component.in_order for component in corpus.train.components] == [True, False]
    rows = rows_of(made(corpus), 0, 128)
    assert rows_of(corpus, 0, 128, 2) == rows
    alone = rows_of(prepare(stated(tokenizer_folder), tmp_path / "cache"), 0, 96)
    assert [row for row in rows if row in alone] == alone  # 3/4 of 1,024


def test_show_batch_makes_the_shards_that_it_shows(
    hub: Hub, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(tmp_path / "hub" / "data")
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    values = {
        "model": {"preset": "gpt2-nano", "vocab_size": VOCABULARY},
        "data": data.model_dump(mode="json", exclude_none=True),
        "training": {"steps": 3},
        "train_batch_size": 8,
    }
    (tmp_path / "run.json").write_text(json.dumps(values))
    shown = figures(tmp_path, "show-batch", "--config", tmp_path / "run.json", "--samples", "24:40")
    read = rows_of(prepare(data, tmp_path / "other"), 24, 2)
    assert [sample["ids"][:-1] for sample in shown["samples"]] == read
    files = {Path(sample["file"]).name for sample in shown["samples"]}
    assert files == {"00002.bin", "00003.bin"}
