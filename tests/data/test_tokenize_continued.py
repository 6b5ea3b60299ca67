"""An interrupted tokenization continues after the last complete input file, with the same bytes."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main
from megaspeed.config.run import Source
from megaspeed.data import tokenize as module
from megaspeed.data import tokenizer as tokenizer_module
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenize import tokenize
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.files.json_values import write_sealed
from tests.data.watching import Record, Stop, contents
from tests.data.words import documents, write_json_lines
from tests.support.machine import limit
from tests.support.text import list_files

pytestmark = pytest.mark.slow

SHARD_TOKENS = 500


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SourceFile]:
    """Write four files of about ten batches. The plan is saved after each file."""
    monkeypatch.setattr(tokenizer_module, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(module, "_SAVED_AT_ONCE_BYTES", 0)
    for name in "abc":
        write_json_lines(tmp_path / f"{name}.jsonl", 20_000)
    (tmp_path / "d.txt").write_text("<|endoftext|>".join(documents(20_000)), encoding="utf-8")
    return list_files([Source(path=str(tmp_path / "[abcd].*"))], "INPUT")


def tokenized(
    files: list[SourceFile], tokenizer: TextTokenizer, folder: Path, watch: Record
) -> None:
    tokenize(files, tokenizer, folder, watch, shard_tokens=SHARD_TOKENS)


def tokenize_command(text: Path, tokenizer: Path) -> list[str | Path]:
    """Return a command that saves the plan after each input file."""
    program = (
        "from megaspeed.cli import main; from megaspeed.data import tokenize; "
        "tokenize._SAVED_AT_ONCE_BYTES = 0; raise SystemExit(main())"
    )
    return [
        sys.executable,
        "-c",
        program,
        "tokenize",
        text / "*.jsonl",
        "--tokenizer",
        tokenizer,
    ]


def write_many(folder: Path, size_bytes: int) -> Path:
    """Write files with this many bytes in total. A fast machine encodes 100 MB in a second."""
    folder.mkdir()
    first = write_json_lines(folder / "00.jsonl", 1_000_000)
    for number in range(1, size_bytes // 1_000_000):
        (folder / f"{number:02}.jsonl").write_bytes(first.read_bytes())
    return folder


def start(command: list[str | Path]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(command: list[str | Path]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


def done(folder: Path) -> int:
    """Return the number of tokens that the plan states."""
    try:
        progress = json.loads((folder / "plan.json").read_text())["progress"]
    except FileNotFoundError:
        return 0
    return sum(int(shard["tokens"]) for shard in progress["shards"])


def has_done(folder: Path, tokens: float) -> bool:
    return done(folder) > tokens


def wait_for(process: "subprocess.Popen[str]", moment: Callable[[], bool]) -> None:
    while not moment():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


@pytest.mark.timeout(300)
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """It is killed at its start, after its first file, and later."""
    command = tokenize_command(write_many(tmp_path / "text", 10_000_000), tokenizer_folder)
    assert run([*command, "--output", tmp_path / "whole"]).returncode == 0
    whole = contents(tmp_path / "whole")
    tokens = json.loads(whole["index.json"])["tokens"]

    out = tmp_path / "out"
    reached = []
    for share in (None, 0, 0.4):
        process = start([*command, "--output", out])
        wait_for(
            process,
            (out / "plan.json").exists if share is None else partial(has_done, out, share * tokens),
        )
        process.kill()
        process.communicate()
        reached.append(done(out))
    assert reached[0] < reached[1] < reached[2] < tokens
    ended = run([*command, "--output", out])
    assert ended.returncode == 0
    assert f"continuing after {reached[-1]:,} tokens" in ended.stderr
    assert contents(out) == whole


@pytest.mark.timeout(300)
def test_ctrl_c_keeps_complete_files_and_shows_no_stack(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    out = tmp_path / "out"
    text = write_many(tmp_path / "text", 60_000_000)
    process = start([*tokenize_command(text, tokenizer_folder), "--output", out])
    wait_for(process, lambda: done(out) > 0)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=limit(120))
    assert process.returncode == 1
    assert "Traceback" not in printed
    assert printed.endswith(
        "megaspeed tokenize: stopped; complete input files are kept, and the same command "
        "continues after them\n"
    )
    assert done(out) > 0


def test_ctrl_c_while_the_command_is_imported_shows_no_stack() -> None:
    interrupted = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "megaspeed.cli.tokenize":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from megaspeed.cli import main
sys.exit(main(["tokenize"]))
"""
    ended = run([sys.executable, "-c", interrupted])
    assert (ended.returncode, ended.stderr) == (130, "megaspeed: stopped\n")


@pytest.mark.timeout(300)
def test_a_full_disk_keeps_complete_files_and_the_same_command_continues(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """A shard takes 200 kB, and files may grow to 150 kB only; an input file has 70 kB of ids."""
    text = write_many(tmp_path / "text", 4_000_000)
    command = tokenize_command(text, tokenizer_folder)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run([*command, "--output", whole]).returncode == 0
    full = subprocess.run(
        [*command, "--output", out],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1
    assert "File too large; complete input files are kept, and the same command" in full.stderr
    assert "and that the disk has room" in full.stderr
    ended = run([*command, "--output", out])
    assert ended.returncode == 0
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("stops", [(1,), (15,), (15, 3, 6)])
def test_a_tokenization_continued_after_stops_is_complete(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer, stops: tuple[int, ...]
) -> None:
    """It stops after these numbers of batches. Each file has ten."""
    tokenized(files, tokenizer, tmp_path / "whole", Record())
    for after_batches in stops:
        stop = Stop(after_batches)
        with pytest.raises(KeyboardInterrupt):
            tokenized(files, tokenizer, tmp_path / "out", stop)
    kept = done(tmp_path / "out")
    assert (kept > 0) == (stops != (1,))
    last = Record()
    tokenized(files, tokenizer, tmp_path / "out", last)
    assert last.tokens[0] == kept
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bad_records_of_complete_files_stay_listed(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    files[0].path.write_text("bad\n" + files[0].path.read_text())
    options: dict[str, Any] = {"shard_tokens": SHARD_TOKENS, "skip": lambda record: None}
    tokenize(files, tokenizer, tmp_path / "whole", Record(), **options)
    with pytest.raises(KeyboardInterrupt):
        tokenize(files, tokenizer, tmp_path / "out", Stop(15), **options)
    tokenize(files, tokenizer, tmp_path / "out", Record(), **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert b'"line 1 (byte 0)"' in contents(tmp_path / "out")["skipped.jsonl"]


def test_a_first_call_that_kept_nothing_can_be_repeated_with_other_options(
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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("fewer files", "number of input files and input"),
        ("other field", "input"),
        ("later time", "input"),
        ("other shards", "shard_tokens"),
        ("other cuts", "cutting of long documents"),
    ],
)
def test_it_continues_only_as_it_was_started(
    tmp_path: Path,
    files: list[SourceFile],
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    problem: str,
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenized(files, tokenizer, out, Stop(15))
    before = contents(out)
    shard_tokens = 600 if change == "other shards" else SHARD_TOKENS
    if change == "fewer files":
        files = files[:3]
    elif change == "other field":
        sources = [Source(path=str(file.path), text_field="body") for file in files]
        files = list_files(sources, "INPUT")
    elif change == "later time":
        os.utime(files[0].path, (1e9, 1e9))
    elif change == "other cuts":
        monkeypatch.setattr(module, "CUT_RULE", "at every thousandth byte")
    with pytest.raises(DataError) as caught:
        tokenize(files, tokenizer, out, Record(), shard_tokens=shard_tokens)
    assert f"can only be continued as it was started, but its {problem} differed then;" in str(
        caught.value
    )
    assert contents(out) == before


def test_another_tokenizer_does_not_continue(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        tokenized(files, tokenizer, out, Stop(15))
    text = [str(file.path) for file in files]
    assert main(["train-tokenizer", *text, "--vocab-size", "300", "--output", str(other)]) == 0
    command = ["tokenize", *text, "--output", str(out)]
    assert main([*command, "--tokenizer", str(other)]) == 2


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.jsonl"])
def test_a_file_shorter_than_the_plan_states_is_refused(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer, name: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenized(files, tokenizer, out, Stop(15))
    (out / name).write_bytes(b"123")
    with pytest.raises(DataError, match=rf"{name} must have .* states, but has 3; .*remove"):
        tokenized(files, tokenizer, out, Record())


def test_a_plan_that_was_altered_is_refused(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tokenized(files, tokenizer, out, Stop(15))
    plan = out / "plan.json"
    plan.write_text(plan.read_text().replace('"skipped": 0', '"skipped": 1'))
    with pytest.raises(DataError, match=r"cannot be continued"):
        tokenized(files, tokenizer, out, Record())


def test_a_folder_that_an_earlier_version_did_not_finish_is_refused(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_sealed(out / "plan.json", {"format": 1, "input": [], "shard_tokens": SHARD_TOKENS})
    (out / "tokens-00000.bin").write_bytes(b"12")
    with pytest.raises(DataError, match=r"as it was started, but its format and"):
        tokenized(files, tokenizer, out, Record())
