"""Work that is cut off goes on with what is done, and ends with the same bytes as if it had not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megaspeed.cli import main
from megaspeed.config.data import Source
from megaspeed.data import DataError
from megaspeed.data.text.sources import SourceFile, list_files
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.data.tokenizing import batches
from megaspeed.data.tokenizing.tokenization import How, tokenize
from tests.data.tokenizing.watching import Record, Stop, contents
from tests.data.tokenizing.words import WORDS, documents, write_json_lines

HOW = How(processes=1, shard_tokens=500, save_interval_seconds=0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SourceFile]:
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 2000)
    write_json_lines(tmp_path / "a.jsonl", 20_000)
    texts = list(documents(20_000))
    (tmp_path / "b.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    return list_files([Source(path=str(tmp_path / "[ab].*"))], "INPUT")


@pytest.mark.timeout(150)
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Killed when it was begun, after its first journal, and twice on the way."""
    text = write_json_lines(tmp_path / "text.jsonl", 8_000_000)
    command = tokenize_command(text, tokenizer_folder, "--save-interval", "0")
    assert subprocess.run([*command, "--output", tmp_path / "whole"], check=False).returncode == 0
    whole = contents(tmp_path / "whole")
    tokens = json.loads(whole["index.json"])["tokens"]

    out = tmp_path / "out"
    moments: list[Callable[[], bool]] = [
        lambda: (out / "plan.json").exists(),
        *(lambda share=share: done(out) > share * tokens for share in (0, 0.3, 0.6)),
    ]
    reached = []
    for moment in moments:
        kill(start([*command, "--output", out]), moment)
        reached.append(done(out))
    assert reached[0] < reached[1] < reached[2] < reached[3] < tokens
    assert subprocess.run([*command, "--output", out], check=False).returncode == 0
    assert contents(out) == whole


def tokenize_command(text: Path, tokenizer: Path, *options: str) -> list[str | Path]:
    shards = ["--shard-size", "300000", "--processes", "2"]
    megaspeed = [sys.executable, "-c", "from megaspeed.cli import main; raise SystemExit(main())"]
    return [*megaspeed, "tokenize", text, "--tokenizer", tokenizer, *shards, *options]


def start(command: list[str | Path]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(folder: Path) -> int:
    """Tokens that the journal knows of."""
    try:
        shards = json.loads((folder / "progress.json").read_text())["shards"]
    except FileNotFoundError:
        return 0
    return sum(shard["tokens"] for shard in shards["closed"]) + int(shards["open_tokens"])


def wait_for(process: "subprocess.Popen[str]", moment: Callable[[], bool]) -> None:
    while not moment():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def kill(process: "subprocess.Popen[str]", moment: Callable[[], bool]) -> None:
    """Kills the command at that moment; its workers are then gone soon, too."""
    wait_for(process, moment)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(workers, timeout=20)[1] == []


@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_ends_the_work_and_it_can_go_on(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    text = write_json_lines(tmp_path / "text.jsonl", 6_000_000)
    out = tmp_path / "out"
    command = [*tokenize_command(text, tokenizer_folder, "--save-interval", "0"), "--output", out]
    process = start(command)
    wait_for(process, lambda: done(out) > 0)
    worker = max(psutil.Process(process.pid).children(), key=lambda child: child.memory_info().rss)
    worker.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "one of 2 worker processes died" in said
    assert "the same command goes on with it. With fewer --processes" in said
    before = done(out)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert f"going on behind {before:,} tokens" in ended.stderr


@pytest.mark.timeout(120)
def test_ctrl_c_ends_it_and_keeps_what_is_done(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The signal reaches every process of the terminal; none of them shows a stack."""
    text = write_json_lines(tmp_path / "text.jsonl", 6_000_000)
    out = tmp_path / "out"
    command = [*tokenize_command(text, tokenizer_folder, "--save-interval", "0.1")]
    process = subprocess.Popen(
        [*command, "--output", out], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(process, lambda: done(out) > 0)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == (
        "megaspeed tokenize: stopped; what is done is kept, and the same command goes on with it\n"
    )
    assert done(out) > 0


@pytest.mark.parametrize("stops", [(1,), (3, 1, 5)])
def test_what_goes_on_after_stops_is_the_whole(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer, stops: tuple[int, ...]
) -> None:
    tokenize(files, tokenizer, tmp_path / "whole", HOW, Record())
    done_before = 0
    for after_batches in stops:
        stop = Stop(after_batches)
        with pytest.raises(KeyboardInterrupt):
            tokenize(files, tokenizer, tmp_path / "out", HOW, stop)
        assert stop.began[0].tokens == done_before
        done_before = stop.reached[-1].tokens
    last = Record()
    tokenize(files, tokenizer, tmp_path / "out", HOW, last)
    assert last.began[0].tokens == done_before > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_it_goes_on_only_as_it_was_begun(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    """Of other text or other shards it is said what differs, and nothing is lost."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenize(files, tokenizer, out, HOW, Stop(2))
    before = contents(out)
    text = [str(file.path) for file in files]

    def refused(inputs: list[str], shard_tokens: int = HOW.shard_tokens) -> str:
        now = list_files([Source(path=path) for path in inputs], "INPUT")
        with pytest.raises(DataError) as caught:
            tokenize(now, tokenizer, out, replace(HOW, shard_tokens=shard_tokens), Record())
        return str(caught.value)

    assert "the input was 2 files and is 1" in refused(text[:1])
    assert f"as a.jsonl (JsonLines(text_field='text')) where it has {text[1]}" in refused(
        text[::-1]
    )
    assert "--shard-size was 500 and is 600" in refused(text, shard_tokens=600)
    assert contents(out) == before
    with files[0].path.open("a") as stream:
        stream.write(json.dumps({"text": WORDS[0]}) + "\n")
    assert f"{text[0]} was changed (it had" in refused(text)
    assert contents(out) == before


def test_another_tokenizer_does_not_go_on(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        tokenize(files, tokenizer, out, HOW, Stop(2))
    text = [str(file.path) for file in files]
    assert main(["train-tokenizer", *text, "--vocab-size", "300", "--output", str(other)]) == 0
    command = ["tokenize", *text, "--output", str(out), "--processes", "1", "--shard-size", "500"]
    assert main([*command, "--tokenizer", str(other)]) == 2
    assert main([*command, "--tokenizer", str(other), "--fresh"]) == 0
    assert (out / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_a_journal_that_was_altered_is_refused(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenize(files, tokenizer, out, HOW, Stop(2))
    journal = out / "progress.json"
    journal.write_text(journal.read_text().replace('"skipped": 0', '"skipped": 1'))
    with pytest.raises(DataError, match=r"progress\.json is not as it was written; .*--fresh"):
        tokenize(files, tokenizer, out, HOW, Record())
