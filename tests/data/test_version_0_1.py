"""Corpora of version 0.1 keep their ids, their split, their fingerprint and their order of samples.

`version_0_1/corpora.json` holds what version 0.1 prepared from the sources that `write_sources`
writes. `version_0_1/tokens` is a token folder that its `megaspeed tokenize` wrote. If a test fails
here, runs that began with version 0.1 would continue with other samples: mend the code. The files
were written with `python -m tests.data.test_version_0_1`.
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
import tokenizers

from megaspeed.cli import main
from megaspeed.config.data import DataConfig
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.mixture import Mixture
from megaspeed.data.sampler import Rows, TrainingOrder, ValidationOrder
from tests.data.foreign_tokens import write_megatron, write_nanogpt
from tests.data.written_formats import FORMATS

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).with_name("version_0_1")
VOCAB_SIZE = 400
SEQUENCE_LENGTH = 16
TOKENS = str(FOLDER / "tokens")
SHARDS = str(FOLDER / "shards")
ROWS = 64


def texts(seed: int, count: int, longest: int = 400) -> list[str]:
    """Random words, some with line ends or characters of several bytes; one text occurs twice."""
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
    """Every kind of source, each in a folder of its own."""
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
    ends = [
        [[generator.randrange(1, 300) for _ in range(generator.randint(1, 90))] for _ in range(2)]
        for _ in range(200)
    ]
    for document in ends:
        document[-1].append(0)
    write_megatron(folder / "indexed", ends, "i4")


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> the `data` section without `sequence_length`."""

    def path(name: str) -> str:
        return f"{folder}/{name}"

    by_documents = {"hold_out_by": "documents"}
    txt, jsonl, zst = path("txt/a.txt"), path("jsonl/a.jsonl"), path("jsonl.zst/*.zst")
    found: dict[str, dict[str, Any]] = {
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
        "many files by documents": {"train": [path("many/**/*.txt")], **by_documents},
        "one file by documents": {"train": [txt], **by_documents},
        # A tokenizer is not trained here, because that is slow for words this long.
        "long documents": {
            "train": [path("long/*.txt")],
            "validation_fraction": 0.1,
            "tokenizer": TOKENS,
        },
        "no validation": {"train": [txt], "validation_fraction": 0.0},
        "own validation": {"train": [txt], "validation": [jsonl, zst]},
        "two sources": {"train": [jsonl, txt]},
        "weights": {"train": [{"path": txt, "weight": 3}, {"path": jsonl, "weight": 0.5}]},
        "token folder": {"train": [TOKENS]},
        "token folder by documents": {"train": [TOKENS], **by_documents},
        "several shards": {"train": [SHARDS], "validation_fraction": 0.3},
        "several shards by documents": {"train": [SHARDS], **by_documents},
        "text and a token folder": {"train": [txt, TOKENS], "tokenizer": TOKENS},
        "nanoGPT": {"train": [path("ids.bin")]},
        "nanoGPT by documents": {"train": [path("ids.bin")], **by_documents},
        "Megatron": {"train": [path("indexed")]},
        "Megatron by documents": {"train": [path("indexed.idx")], **by_documents},
        "everything": {
            "train": [
                {"path": txt, "weight": 2.5},
                {"path": path("parquet/a.parquet"), "weight": 1},
                {"path": SHARDS, "weight": 0.1},
                {"path": path("ids.bin"), "weight": 4},
                {"path": path("indexed"), "weight": 1},
            ],
            "tokenizer": TOKENS,
        },
        "default": {},
    }
    for rule in ("tokens", "documents"):
        found[f"weights and tokens by {rule}"] = {
            "train": [{"path": path("many/*.txt"), "weight": 1}, {"path": TOKENS, "weight": 2}],
            "hold_out_by": rule,
        }
    return found


def prepared(data: dict[str, Any], cache_dir: Path) -> PreparedCorpus:
    config = DataConfig(**{"sequence_length": SEQUENCE_LENGTH, **data})
    return prepare_corpus(config, VOCAB_SIZE, cache_dir=cache_dir)


def facts_of(corpus: PreparedCorpus, cache_dir: Path) -> dict[str, Any]:
    """Everything that determines the samples of a run."""
    training = TrainingOrder.of(corpus.train, corpus.seed, SEQUENCE_LENGTH)
    sides = {"train": _side(corpus.train, training, ROWS)}
    if corpus.validation is not None:
        order = ValidationOrder.of(corpus.validation, corpus.seed, SEQUENCE_LENGTH)
        sides["validation"] = _side(corpus.validation, order, min(ROWS, order.sequences))
    entries = [*cache_dir.glob("tokens/*.bin"), *cache_dir.glob("tokenizers/*")]
    return {
        **sides,
        "tokenizer": corpus.tokenizer_fingerprint,
        "end_of_text": corpus.end_of_text,
        # Their names hold the version of `tokenizers`.
        f"cache entries, tokenizers {tokenizers.__version__}": sorted(
            path.relative_to(cache_dir).as_posix() for path in entries
        ),
    }


def _side(mixture: Mixture, order: TrainingOrder | ValidationOrder, count: int) -> dict[str, Any]:
    rows = Rows(mixture, SEQUENCE_LENGTH)
    drawn = [rows.at(order.place_of(number)).tolist() for number in range(count)]
    return {
        "fingerprint": mixture.fingerprint,
        "tokens": mixture.tokens,
        "sequences": mixture.sequences(SEQUENCE_LENGTH),
        "files": [
            [len(component.files), component.fingerprint] for component in mixture.components
        ],
        "first row": drawn[0],
        "rows": hashlib.sha256(json.dumps(drawn).encode()).hexdigest(),
    }


@pytest.fixture(scope="module")
def expected() -> Any:
    return json.loads((FOLDER / "corpora.json").read_text())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sources")
    datasets.disable_progress_bars()
    write_sources(folder)
    yield folder
    datasets.enable_progress_bars()


@pytest.mark.parametrize("name", configurations(Path()))
def test_a_corpus_is_that_of_version_0_1(
    name: str, sources: Path, tmp_path: Path, expected: Any
) -> None:
    if name == "default" and expected["python"] != platform.python_version():
        pytest.skip("another Python has another standard library")
    cold = prepared(configurations(sources)[name], tmp_path)
    facts = facts_of(cold, tmp_path)
    assert facts == {key: expected["corpora"][name].get(key, facts[key]) for key in facts}
    warm = prepared(configurations(sources)[name], tmp_path)
    assert warm == cold


@pytest.mark.parametrize(("folder", "options"), [(TOKENS, []), (SHARDS, ["--shard-size", "9000"])])
@pytest.mark.parametrize("processes", [1, 3])
def test_the_same_text_gives_the_same_token_folder(
    folder: str, options: list[str], processes: int, sources: Path, tmp_path: Path
) -> None:
    made = ["--tokenizer", TOKENS, "--output", f"{tmp_path}/out", "--processes", str(processes)]
    assert main(["tokenize", *_tokenized(sources), *made, *options]) == 0
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    found.pop(".lock", None)
    assert found == {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _tokenized(sources: Path) -> list[str]:
    """The text of the token folders."""
    return [str(sources / "jsonl" / "a.jsonl"), str(sources / "many" / "*.txt")]


def _write() -> None:
    """Writes the expected values with the version of megaspeed that is installed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder)
        tokenizer, texts = str(folder / "tokenizer"), _tokenized(folder)
        main(["train-tokenizer", texts[0], "--vocab-size", "300", "--output", tokenizer])
        made = ["tokenize", *texts, "--tokenizer", tokenizer]
        main([*made, "--processes", "1", "--output", TOKENS])
        main([*made, "--processes", "1", "--output", SHARDS, "--shard-size", "9000"])
        corpora = {}
        for number, (name, data) in enumerate(configurations(folder).items()):
            cache_dir = folder / "caches" / str(number)
            corpora[name] = facts_of(prepared(data, cache_dir), cache_dir)
    found = {
        "python": platform.python_version(),
        "corpora": corpora,
    }
    (FOLDER / "corpora.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _write()
