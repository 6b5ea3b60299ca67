"""Work that is cut off goes on with what is done, and ends with the same bytes as if it had not."""

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megaspeed.cli import main
from megaspeed.config.data import Source
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile, list_files
from megaspeed.data.tokenize import How, tokenize
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.data.tokenizing import batches, plan
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


@pytest.mark.timeout(300)
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


def write_long_text(file: Path) -> Path:
    """For a command that is interrupted: a fast machine does in a second what is enough elsewhere.

    A signal that comes while Python is on its way out ends the command as it ends any other.
    """
    write_json_lines(file, 6_000_000)
    file.write_bytes(file.read_bytes() * 20)
    return file


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


@pytest.mark.timeout(300)
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
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "one of 2 worker processes died" in said
    assert "the same command goes on with it. With fewer --processes" in said
    before = done(out)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert f"going on behind {before:,} tokens" in ended.stderr


@pytest.mark.timeout(300)
def test_ctrl_c_ends_it_and_keeps_what_is_done(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The signal reaches every process of the terminal; none of them shows a stack."""
    text = write_long_text(tmp_path / "text.jsonl")
    out = tmp_path / "out"
    command = [*tokenize_command(text, tokenizer_folder, "--save-interval", "0.1")]
    process = subprocess.Popen(
        [*command, "--output", out], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(process, lambda: done(out) > 0)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in said
    assert said.endswith(
        "megaspeed tokenize: stopped; what is done is kept, and the same command goes on with it\n"
    )
    assert done(out) > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [0, 0.3, 1])
def test_ctrl_c_while_workers_begin_shows_no_stack_either(
    tmp_path: Path, tokenizer_folder: Path, seconds: float
) -> None:
    """They import for a second or two before they can say what Ctrl-C does to them."""
    text = write_long_text(tmp_path / "text.jsonl")
    process = subprocess.Popen(
        [*tokenize_command(text, tokenizer_folder), "--output", tmp_path / "out"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # One of the first two keeps account of semaphores.
    wait_for(process, lambda: len(psutil.Process(process.pid).children()) >= 2)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in said
    assert said.splitlines()[-1].startswith("megaspeed tokenize: stopped; what is done is kept")


def test_ctrl_c_while_the_command_is_imported_shows_no_stack() -> None:
    interrupted = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "megaspeed.cli.tokenize":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
import megaspeed.cli
"""
    ended = subprocess.run(
        [sys.executable, "-c", interrupted], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "megaspeed: stopped\n")


@pytest.mark.timeout(300)
def test_a_full_disk_keeps_what_is_done_and_the_same_command_goes_on(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """A shard takes 600 kB, and files may grow to 400 kB only."""
    text = write_json_lines(tmp_path / "text.jsonl", 6_000_000)
    command = tokenize_command(text, tokenizer_folder, "--save-interval", "0")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert subprocess.run([*command, "--output", whole], check=False).returncode == 0
    full = subprocess.run(
        [*command, "--output", out],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1
    assert full.stderr == (
        f"megaspeed tokenize: {out / 'tokens-00000.bin'}: File too large; what is done is kept, "
        "and the same command goes on with it. Make room there, or move "
        f"{out} to a larger disk and name it as --output\n"
    )
    before = done(out)
    assert before > 0
    ended = subprocess.run([*command, "--output", out], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert f"going on behind {before:,} tokens" in ended.stderr
    assert contents(out) == contents(whole)


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


def test_it_goes_on_over_an_archive_that_was_cut(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it stops, the same text is read before the damage, which is listed once."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 20_000)
    cut, after = tmp_path / "a.txt.gz", tmp_path / "b.txt"
    whole = gzip.compress("<|endoftext|>".join(documents(500_000)).encode("utf-8"))
    cut.write_bytes(whole[: len(whole) * 7 // 10])
    after.write_text("the end")
    files = [SourceFile(path.name, path) for path in (cut, after)]
    how = replace(HOW, skip_bad=True)
    tokenize(files, tokenizer, tmp_path / "whole", how, Record())
    stops = 0
    while not (tmp_path / "out" / "index.json").exists():
        stops += 1
        with suppress(KeyboardInterrupt):
            tokenize(files, tokenizer, tmp_path / "out", how, Stop(3))
    assert stops > 4
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_it_goes_on_within_a_long_document(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Stopped behind its first piece, and again behind its second."""
    long = tmp_path / "long.txt"
    long.write_text(" ".join(documents(2_500_000)), encoding="utf-8")
    files = [SourceFile(long.name, long)]
    tokenize(files, tokenizer, tmp_path / "whole", HOW, Record())
    done_before = 0
    for _ in range(2):
        stop = Stop(1)
        with pytest.raises(KeyboardInterrupt):
            tokenize(files, tokenizer, tmp_path / "out", HOW, stop)
        assert stop.began[0].tokens == done_before < stop.reached[0].tokens
        done_before = stop.reached[0].tokens
    last = Record()
    tokenize(files, tokenizer, tmp_path / "out", HOW, last)
    assert (last.began[0].tokens, last.began[0].documents) == (done_before, 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_first_try_that_kept_nothing_binds_nobody_to_its_options(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual first mistake: the text is in another field."""
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    text.write_text('{"body": "some text"}\n' * 3)
    command = ["tokenize", str(text), "--tokenizer", str(tokenizer_folder), "--output", str(out)]
    assert main(command) == 2
    assert main([*command, "--skip-bad", "--text-field", "content"]) == 2
    assert main([*command, "--text-field", "body"]) == 0
    assert "3 documents" in capsys.readouterr()[0]
    assert not (out / "skipped.jsonl").exists()


def test_it_goes_on_only_as_it_was_begun(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    """Of other text or other shards it is said what differs, and nothing is lost."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenize(files, tokenizer, out, HOW, Stop(2))
    before = contents(out)
    text = [str(file.path) for file in files]

    def refused(
        inputs: list[str], shard_tokens: int = HOW.shard_tokens, text_field: str = "text"
    ) -> str:
        sources = [Source(path=path, text_field=text_field) for path in inputs]
        now = list_files(sources, "INPUT")
        with pytest.raises(DataError) as caught:
            tokenize(now, tokenizer, out, replace(HOW, shard_tokens=shard_tokens), Record())
        return str(caught.value)

    assert "the input was 2 files and is 1" in refused(text[:1])
    assert f"as a.jsonl where it has {text[1]} as b.txt" in refused(text[::-1])
    assert "--text-field was text and is body" in refused(text, text_field="body")
    assert "--shard-size was 500 and is 600" in refused(text, shard_tokens=600)
    assert contents(out) == before
    os.utime(files[0].path, (1e9, 1e9))
    assert re.search(
        rf"{text[0]} was written again \(it has \d+ bytes as before, and was last changed at "
        r"20\d\d-\S+ [\d:.]+, now at 2001-09-\S+ [\d:]+\)",
        refused(text),
    )
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


def test_work_that_was_begun_with_other_cuts_does_not_go_on(
    tmp_path: Path,
    files: list[SourceFile],
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A position counts the pieces of a long document, which were others then."""
    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(plan, "HOW_CUT", "at every thousandth byte")
        tokenize(files, tokenizer, out, HOW, Stop(2))
    before = contents(out)
    with pytest.raises(DataError, match=r"cutting of long documents was at every thousandth byte"):
        tokenize(files, tokenizer, out, HOW, Record())
    assert contents(out) == before


def test_a_journal_that_was_altered_is_refused(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenize(files, tokenizer, out, HOW, Stop(2))
    journal = out / "progress.json"
    journal.write_text(journal.read_text().replace('"records": 0', '"records": 1'))
    with pytest.raises(DataError, match=r"progress\.json is not as it was written; .*--fresh"):
        tokenize(files, tokenizer, out, HOW, Record())
