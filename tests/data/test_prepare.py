"""A machine prepares a corpus once, even if processes start together or are killed."""

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.run import DataConfig
from megaspeed.data import hold_out, text_cache
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.errors import DataError
from megaspeed.data.mixture import Mixture
from megaspeed.data.selection import find_problems
from megaspeed.data.token_file import TokenFile
from megaspeed.data.tokenizer import load_tokenizer
from tests.support.machine import limit

pytestmark = pytest.mark.slow

STDLIB = Path(sysconfig.get_path("stdlib"))
SMALL = [f"{STDLIB}/json/*.py", f"{STDLIB}/email/*.py"]
LARGE = [f"{STDLIB}/[a-m]*.py"]

PREPARE = """
import json, logging, sys
from pathlib import Path
from megaspeed.config.run import DataConfig
from megaspeed.data import hold_out, text_cache
from megaspeed.data.corpus import prepare_corpus
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
data = DataConfig.model_validate_json(sys.argv[1])
corpus = prepare_corpus(data, 512, cache_dir=Path(sys.argv[2]))
sources = [name for name in opened if name.endswith(".py") and "/json/" in name]
print(json.dumps([repr(corpus), len(sources)]))
"""


def config(**fields: Any) -> DataConfig:
    return DataConfig(**{"train": SMALL, "sequence_length": 32, "seed": 3, **fields})


def start(data: DataConfig, cache_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, data.model_dump_json(), str(cache_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def fingerprint_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "checksums" not in path.parts
    }


def write_texts(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return [f"{folder}/*.txt"]


def only_file(mixture: Mixture) -> TokenFile:
    ((file,),) = [component.files for component in mixture.components]
    return file


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedCorpus]:
    cache_dir = tmp_path_factory.mktemp("cache")
    return cache_dir, prepare_corpus(config(), 512, cache_dir=cache_dir)


def test_the_tokens_are_the_documents_text(prepared: tuple[Path, PreparedCorpus]) -> None:
    _, corpus = prepared
    assert corpus.validation is not None
    tokenizer = load_tokenizer(str(corpus.tokenizer))
    texts: list[str] = []
    for file in (*corpus.train.files, *corpus.validation.files):
        text = tokenizer.tokenizer.decode(file.map().tolist(), skip_special_tokens=False)
        documents = text.split("<|endoftext|>")
        assert documents.pop() == ""
        assert len(documents) == file.index.documents
        texts += documents
    sources = [path.read_text("utf-8") for path in STDLIB.glob("json/*.py")]
    sources += [path.read_text("utf-8") for path in STDLIB.glob("email/*.py")]
    assert sorted(texts) == sorted(source for source in sources if source)


def test_a_warm_start_opens_no_text_and_gives_the_same(
    prepared: tuple[Path, PreparedCorpus],
) -> None:
    cache_dir, corpus = prepared
    before = fingerprint_of(cache_dir)
    process = start(config(), cache_dir)
    out, err = process.communicate(timeout=limit(120))
    assert process.returncode == 0, err
    assert "tokenizing" not in err
    assert out.strip().endswith(", 0]")
    assert str(only_file(corpus.train).path) in out
    assert fingerprint_of(cache_dir) == before


def test_the_documents_are_counted_when_they_are_read_and_then_known(
    prepared: tuple[Path, PreparedCorpus],
) -> None:
    cache_dir, corpus = prepared
    files = [path for path in (*STDLIB.glob("json/*.py"), *STDLIB.glob("email/*.py"))]
    texts = [text for path in files if (text := path.read_bytes())]
    assert corpus.documents == len(texts)
    assert prepare_corpus(config(), 512, cache_dir=cache_dir).documents == corpus.documents


def test_a_cold_start_does_open_the_text(tmp_path: Path) -> None:
    # Without this the test above could not fail.
    process = start(config(), tmp_path)
    out, err = process.communicate(timeout=limit(120))
    assert not out.strip().endswith(", 0]"), err
    assert err.count("tokenizing") == 2


def test_four_processes_at_once_build_one_cache(
    tmp_path: Path, prepared: tuple[Path, PreparedCorpus]
) -> None:
    processes = [start(config(), tmp_path) for _ in range(4)]
    results = [process.communicate(timeout=limit(120)) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    assert len({out.split('", ')[0] for out, _ in results}) == 1
    log = "".join(err for _, err in results)
    assert log.count("training a byte-level BPE") == 1
    assert log.count("tokenizing") == 2
    assert fingerprint_of(tmp_path) == fingerprint_of(prepared[0])


@pytest.mark.parametrize("train", [LARGE, SMALL])
def test_a_process_killed_while_it_builds_leaves_a_cache_that_builds_again(
    tmp_path: Path, train: list[str]
) -> None:
    """The next build removes its remains, even for another corpus, but no file of the user."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    (killed / "text" / "my-run.writing").mkdir(parents=True)
    process = start(config(train=LARGE), killed)
    deadline = time.monotonic() + limit(40)
    # A stopped process cannot rename the folder between the look and the kill.
    while not list(killed.glob("text/*.writing/0-train/tokens-*.bin")):
        process.send_signal(signal.SIGCONT)
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=limit(10))
    (left,) = killed.glob("text/*[0-9a-f].writing")
    prepare_corpus(config(train=train), 512, cache_dir=killed)
    assert not left.exists() and (killed / "text" / "my-run.writing").exists()
    prepare_corpus(config(train=train), 512, cache_dir=whole)
    assert fingerprint_of(killed) == fingerprint_of(whole)


@pytest.mark.parametrize(
    "pattern",
    ["*/tokens-00000.bin", "0-train/index.json", "entry.json", "*/tokenizer*", "0-validation"],
)
@pytest.mark.parametrize("damage", ["cut", "altered", "deleted"])
def test_a_damaged_entry_is_built_again(
    tmp_path: Path, prepared: tuple[Path, PreparedCorpus], pattern: str, damage: str
) -> None:
    shutil.copytree(prepared[0], tmp_path, dirs_exist_ok=True)
    whole = fingerprint_of(prepared[0])
    (entry,) = (tmp_path / "text").iterdir()
    damaged = list(entry.glob(pattern))
    assert damaged
    for path in damaged:
        if path.is_dir():
            shutil.rmtree(path)
        elif damage == "deleted":
            path.unlink()
        else:
            content = path.read_bytes()
            half = len(content) // 2
            path.write_bytes(content[:half] if damage == "cut" else content[:half] + b"\0" * half)
    prepare_corpus(config(), 512, cache_dir=tmp_path)
    assert fingerprint_of(tmp_path) == whole


def test_a_changed_file_changes_the_corpus_even_with_its_size_and_time_kept(tmp_path: Path) -> None:
    sources = write_texts(tmp_path, a="one two three " * 50, b="four five " * 50)
    data = config(train=sources, sequence_length=4, validation_fraction=0.0)
    first = prepare_corpus(data, 512, cache_dir=tmp_path / "cache")
    stat = (tmp_path / "a.txt").stat()
    (tmp_path / "a.txt").write_text("two one three " * 50)
    os.utime(tmp_path / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepare_corpus(data, 512, cache_dir=tmp_path / "cache")
    assert first.fingerprint != second.fingerprint
    assert only_file(first.train).path != only_file(second.train).path


@pytest.mark.parametrize("change", ["altered", "deleted"])
def test_text_that_changes_while_it_is_tokenized_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sources = write_texts(tmp_path, a="one two " * 50, b="four " * 50)
    split = hold_out.split_documents

    def split_and_change(*arguments: Any) -> Any:
        b = tmp_path / "b.txt"
        b.unlink() if change == "deleted" else b.write_text("five " * 50)
        return split(*arguments)

    monkeypatch.setattr(text_cache, "split_documents", split_and_change)
    with pytest.raises(DataError, match=r"must not change while it is read, but .* did"):
        prepare_corpus(config(train=sources), 512, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "text").iterdir()) == []


def test_everything_that_determines_the_tokens_has_an_entry_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(vocab_size: int = 300, **fields: Any) -> Path:
        corpus = prepare_corpus(config(train=SMALL[:1], **fields), vocab_size, cache_dir=tmp_path)
        return corpus.train.files[0].path.parents[1]

    entries = [entry(), entry(seed=4), entry(validation_fraction=0.3), entry(vocab_size=280)]
    assert entry(sequence_length=64) == entries[0]
    for what in ("tokenizers.__version__", "megaspeed.data.text_cache.CUT_RULE"):
        monkeypatch.setattr(what, "another")
        entries.append(entry())
    assert len(set(entries)) == 6


def test_explicit_validation_sources_are_the_validation_set(tmp_path: Path) -> None:
    data = config(train=SMALL[:1], validation=SMALL[1:])
    corpus = prepare_corpus(data, 512, cache_dir=tmp_path)
    assert corpus.validation is not None
    assert only_file(corpus.train).index.documents == len(list(STDLIB.glob("json/*.py")))
    nonempty = [path for path in STDLIB.glob("email/*.py") if path.stat().st_size]
    assert only_file(corpus.validation).index.documents == len(nonempty)


def test_a_fraction_of_zero_prepares_no_validation(tmp_path: Path) -> None:
    corpus = prepare_corpus(config(validation_fraction=0.0), 512, cache_dir=tmp_path)
    assert corpus.validation is None
    assert corpus.validation_sequences == 0
    assert prepare_corpus(config(validation_fraction=0.0), 512, cache_dir=tmp_path) == corpus


def test_a_tokenizer_on_disk_is_used_and_its_change_is_seen(
    tmp_path: Path, prepared: tuple[Path, PreparedCorpus]
) -> None:
    _, corpus = prepared
    assert corpus.tokenizer is not None
    shutil.copy(corpus.tokenizer / "tokenizer.json", tmp_path)
    data = config(tokenizer=str(tmp_path))
    again = prepare_corpus(data, 512, cache_dir=tmp_path / "cache")
    assert only_file(again.train).index == only_file(corpus.train).index
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "self"}')
    other_end = prepare_corpus(data, 512, cache_dir=tmp_path / "cache")
    assert only_file(other_end.train).path != only_file(again.train).path
    with pytest.raises(DataError, match=r"has 512 entries while model\.vocab_size is 500"):
        prepare_corpus(data, 500, cache_dir=tmp_path / "cache")


def test_a_pickled_corpus_has_a_few_bytes(
    prepared: tuple[Path, PreparedCorpus],
) -> None:
    _, corpus = prepared
    assert len(pickle.dumps(corpus)) < 3000
    assert pickle.loads(pickle.dumps(corpus)) == corpus


def test_every_problem_is_named_at_once_without_reading_text(tmp_path: Path) -> None:
    data = config(
        train=[f"{tmp_path}/missing.txt", *SMALL],
        validation=[f"{tmp_path}/*.none"],
        tokenizer=f"{tmp_path}/no-tokenizer",
    )
    problems = tuple(find_problems(data, 512))
    assert [problem.split()[0] for problem in problems] == [
        "data.train:", "data.validation:", "data.tokenizer",
    ]  # fmt: skip
    with pytest.raises(DataError) as caught:
        prepare_corpus(data, 512, cache_dir=tmp_path / "cache")
    assert caught.value.problems == problems
    assert not (tmp_path / "cache").exists()
    assert list(find_problems(config(), 512)) == []


def test_validation_files_that_are_trained_on_are_refused(tmp_path: Path) -> None:
    sources = write_texts(tmp_path, a="one", b="two")
    (problem,) = find_problems(config(train=sources, validation=[f"{tmp_path}/b.txt"]), 512)
    assert "must not be trained on, but 1 of 1 files" in problem
    assert f"{tmp_path}/b.txt" in problem


def test_a_corpus_shorter_than_a_sequence_names_both_lengths(tmp_path: Path) -> None:
    sources = write_texts(tmp_path, a="one two three", b="four")
    with pytest.raises(DataError) as caught:
        prepare_corpus(config(train=sources, sequence_length=100), 512, cache_dir=tmp_path / "c")
    train, validation = caught.value.problems
    assert train.startswith("data.train must fill at least one sequence")
    assert "= 101 tokens, but has" in train
    assert validation.startswith("data.validation")
    assert "raise data.validation_fraction" in validation


def test_the_progress_goes_from_none_to_all_bytes(tmp_path: Path) -> None:
    """A second call prepares nothing."""
    shown: dict[str, list[tuple[int, int]]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        shown.setdefault(phase, []).append((done, total))

    files = {"a": "a b c d\n" * 500, "b": "e f g h\n" * 300}
    data = config(train=write_texts(tmp_path, **files), validation_fraction=0.2)
    for _ in range(2):
        prepare_corpus(data, 512, cache_dir=tmp_path / "cache", progress=progress)
    assert list(shown) == ["reading the text", "training the tokenizer", "tokenizing the text"]
    size = sum(map(len, files.values()))
    *both, tokenized = shown.values()
    assert both == [[(0, 0)], [(0, 0)]], "of unknown length"
    assert tokenized[0] == (0, size) and tokenized[-1] == (size, size)
