"""Corpora keep their ids, their split, their fingerprints and their order of samples.

``pinned_corpora.json`` has what an earlier version prepared from the sources that
``write_sources`` writes. If a test fails here, a resumed run would continue with other samples, so
correct the code. If ``tokenizers`` changed on purpose, ``python -m tests.data.test_pinned_corpora``
writes the file again.
"""

import hashlib
import json
import platform
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from megaspeed.cli import main
from megaspeed.config.run import DataConfig, Source
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.mixture import Mixture
from megaspeed.data.sampler import Rows, TrainingOrder, ValidationOrder
from megaspeed.data.tokenize import tokenize
from megaspeed.data.tokenizer import load_tokenizer
from tests.data.token_folders import write_nanogpt
from tests.data.written_formats import FORMATS
from tests.support.text import list_files

pytestmark = pytest.mark.slow

PINNED = Path(__file__).with_name("pinned_corpora.json")
VOCAB_SIZE = 400
SEQUENCE_LENGTH = 16
ROWS = 64


def texts(seed: int, count: int, longest: int = 400) -> list[str]:
    """Return texts of random words, some with line ends or non-ASCII letters; one occurs twice."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdeäß日 etaoin", k=n)) for n in range(2, 9)] * 3
    found = [
        " ".join(
            generator.choices([*words, "the", "of\n", "\n\nThe"], k=generator.randint(1, longest))
        )
        for _ in range(count)
    ]
    return [*found, found[0]]


def write_sources(folder: Path) -> None:
    """Write every kind of source, each in a folder of its own."""
    for number, (kind, write) in enumerate(FORMATS.items()):
        place = folder / kind.replace(", ", "_").replace(" ", "_")
        place.mkdir(parents=True)
        write(place, texts(number, 30))
    many = folder / "many"
    many.mkdir()
    for number in range(12):
        (many / f"{number}.txt").write_text(texts(50 + number, 1)[0], encoding="utf-8")
    (many / "empty.txt").write_text("")
    long = folder / "long"
    long.mkdir()
    spaces, lines, neither = (texts(70 + n, 0 + 1, 150)[0] for n in range(3))
    (long / "spaces.txt").write_text(spaces * 1500, encoding="utf-8")
    (long / "lines.txt").write_text(lines.replace(" ", "x") * 1500, encoding="utf-8")
    (long / "neither.txt").write_text("日本語" * 40_000 + neither, encoding="utf-8")
    generator = random.Random(9)
    write_nanogpt(folder / "ids.bin", [generator.randrange(300) for _ in range(70_000)])
    first, *others = str(folder / "jsonl" / "a.jsonl"), str(folder / "many" / "*.txt")
    tokenizer = str(folder / "tokenizer")
    assert main(["train-tokenizer", first, "--vocab-size", "300", "--output", tokenizer]) == 0
    options = ["--tokenizer", tokenizer, "--output", str(folder / "tokens")]
    assert main(["tokenize", first, *others, *options]) == 0
    files = list_files([Source(path=path) for path in (first, *others)], "INPUT")
    loaded = load_tokenizer(tokenizer)
    tokenize(files, loaded, folder / "shards", lambda _: None, shard_tokens=9000)


TOKENIZED = ("tokens", "shards")
"""Token folders of the same text, with one shard and with several."""


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> ``data`` section, without ``sequence_length``."""

    def path(name: str) -> str:
        return f"{folder}/{name}"

    txt, jsonl, zst = path("txt/a.txt"), path("jsonl/a.jsonl"), path("jsonl.zst/*.zst")
    tokens, shards = path("tokens"), path("shards")
    return {
        "plain text": {"train": [txt]},
        "gzip text": {"train": [path("txt.gz/a.txt.gz")]},
        "json lines": {"train": [jsonl], "validation_fraction": 0.2},
        "ndjson": {"train": [path("ndjson/a.NDJSON")]},
        "gzip json lines": {"train": [path("jsonl.gz/*")]},
        "zstd json lines": {"train": [zst]},
        "parquet": {"train": [path("parquet/*.parquet")]},
        "saved": {"train": [path("saved/dataset")]},
        "saved splits": {"train": [{"path": path("saved_splits/splits"), "split": "train"}]},
        "many files": {"train": [path("many/*.txt")], "seed": 7},
        # A tokenizer is not trained here, because that is slow for words this long.
        "long documents": {
            "train": [path("long/*.txt")],
            "validation_fraction": 0.1,
            "tokenizer": tokens,
        },
        "no validation": {"train": [txt], "validation_fraction": 0.0},
        "own validation": {"train": [txt], "validation": [jsonl, zst]},
        "two sources": {"train": [jsonl, txt]},
        "weights": {"train": [{"path": txt, "weight": 3}, {"path": jsonl, "weight": 0.5}]},
        "token folder": {"train": [tokens]},
        "several shards": {"train": [shards], "validation_fraction": 0.3},
        "text and a token folder": {"train": [txt, tokens], "tokenizer": tokens},
        "nanoGPT": {"train": [path("ids.bin")]},
        "weights and tokens": {
            "train": [{"path": path("many/*.txt"), "weight": 1}, {"path": tokens, "weight": 2}]
        },
        "everything": {
            "train": [
                {"path": txt, "weight": 2.5},
                {"path": path("parquet/a.parquet"), "weight": 1},
                {"path": shards, "weight": 0.1},
                {"path": path("ids.bin"), "weight": 4},
            ],
            "tokenizer": tokens,
        },
        f"python-stdlib of {platform.python_version()}": {},
    }


def prepared(data: dict[str, Any], cache_dir: Path) -> PreparedCorpus:
    config = DataConfig(**{"sequence_length": SEQUENCE_LENGTH, **data})
    return prepare_corpus(config, VOCAB_SIZE, cache_dir=cache_dir)


def facts_of(corpus: PreparedCorpus) -> dict[str, Any]:
    """Return everything that determines the samples of a run."""
    training = TrainingOrder.of(corpus.train, corpus.seed, SEQUENCE_LENGTH)
    facts = {
        "tokenizer": corpus.tokenizer_fingerprint,
        "end_of_text": corpus.end_of_text,
        "train": _side(corpus.train, training, ROWS),
    }
    if corpus.validation is not None:
        order = ValidationOrder.of(corpus.validation, corpus.seed, SEQUENCE_LENGTH)
        facts["validation"] = _side(corpus.validation, order, min(ROWS, order.sequences))
    return facts


def _side(mixture: Mixture, order: TrainingOrder | ValidationOrder, count: int) -> dict[str, Any]:
    """Return the hashes of all ids and of the first rows, and the number of tokens of each file."""
    rows = Rows(mixture, SEQUENCE_LENGTH)
    drawn = [rows.at(order.place_of(number)).tolist() for number in range(count)]
    ids = hashlib.sha256()
    for file in mixture.files:
        ids.update(file.map().astype("<i8").tobytes())
    return {
        "fingerprint": mixture.fingerprint,
        "ids": ids.hexdigest(),
        "rows": hashlib.sha256(json.dumps(drawn).encode()).hexdigest(),
        "tokens": [[file.index.tokens for file in c.files] for c in mixture.components],
    }


@pytest.fixture(scope="module")
def pinned() -> Any:
    return json.loads(PINNED.read_text())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sources")
    datasets.disable_progress_bars()
    write_sources(folder)
    yield folder
    datasets.enable_progress_bars()


@pytest.mark.parametrize("name", configurations(Path()))
def test_a_corpus_is_that_of_earlier_versions(
    name: str, sources: Path, tmp_path: Path, pinned: Any
) -> None:
    if name not in pinned:
        pytest.skip("another Python has another standard library")
    cold = prepared(configurations(sources)[name], tmp_path)
    assert facts_of(cold) == pinned[name]
    warm = prepared(configurations(sources)[name], tmp_path)
    assert warm == cold


@pytest.mark.parametrize("name", TOKENIZED)
def test_the_same_text_gives_the_same_token_folder(name: str, sources: Path, pinned: Any) -> None:
    assert hashes_of(sources / name) == pinned[name]


def hashes_of(token_folder: Path) -> dict[str, str]:
    """Return the hash of each file of the ids and of the tokenizer."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([*token_folder.glob("*.bin"), *token_folder.glob("tokenizer*")])
    }


def _write() -> None:
    """Write the expected values with the version of megaspeed that is installed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder)
        found: dict[str, Any] = {
            name: facts_of(prepared(data, folder / "caches" / str(number)))
            for number, (name, data) in enumerate(configurations(folder).items())
        }
        found |= {name: hashes_of(folder / name) for name in TOKENIZED}
    PINNED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _write()
