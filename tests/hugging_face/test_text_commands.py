"""``megaspeed generate`` and ``megaspeed evaluate``: their output, files and exit codes."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaspeed.bar_or_lines import BarOrLines
from megaspeed.cli import main
from tests.hugging_face.tiny_text import LICENSE, checkpoint_of_text, write_tokenizer
from tests.support.command import Ended

TEXT = LICENSE.read_text()[:700]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the only checkpoint of a run."""
    return checkpoint_of_text(tmp_path_factory.mktemp("run"))


Command = Callable[..., Ended]


@pytest.fixture
def generate(checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return lambda *options: Ended(
        capsys, tmp_path, "generate", "--checkpoint", checkpoint, "--max-tokens", 12, *options
    )


@pytest.fixture
def evaluate(checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return lambda *options: Ended(
        capsys, tmp_path, "evaluate", "--checkpoint", checkpoint.parents[1], *options
    )


def test_generate_prints_and_writes_every_sample(generate: Command, checkpoint: Path) -> None:
    reported = generate("--prompt", "You may", "--prompt", "[bold]", "--samples", 2, "--seed", 3)
    assert (reported.code, reported.err) == (0, "")
    assert reported.out.startswith(f"{checkpoint}\n")
    continuations = reported.figures["continuations"]
    assert [(c["prompt"], c["number"]) for c in continuations] == [
        ("You may", 1),
        ("You may", 2),
        ("[bold]", 1),
        ("[bold]", 2),
    ]
    for found in continuations:
        (first_line, *_) = (found["prompt"] + found["text"]).splitlines()
        assert first_line.rstrip() in reported.out
        end = "ended by the model" if found["ended"] else "cut"
        title = f"sample {found['number']} from {found['prompt']!r}: {len(found['ids'])} tokens"
        assert f"{title}, {end} ─" in reported.out
    assert reported.figures["sampling"] == {
        "temperature": 0.8,
        "top_k": 50,
        "max_tokens": 12,
        "seed": 3,
    }


def test_generate_begins_a_document_without_a_prompt(generate: Command) -> None:
    (begun,) = generate("--temperature", 0).figures["continuations"]
    assert begun["prompt"] == ""
    assert generate("--temperature", 0, "--prompt", "").figures["continuations"] == [begun]


def test_evaluate_computes_the_same_loss_for_every_format(
    evaluate: Command, tmp_path: Path
) -> None:
    plain, packed = tmp_path / "a.txt", tmp_path / "b.jsonl.gz"
    plain.write_text(TEXT)
    packed.write_bytes(gzip.compress(json.dumps({"body": TEXT}).encode()))
    one = evaluate(plain)
    assert (one.code, one.err) == (0, "")
    two = evaluate(plain, packed, "--text-field", "body")
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert two.figures[name] == pytest.approx(one.figures[name], rel=1e-6)
    for name in ("documents", "tokens", "bytes"):
        assert two.figures[name] == 2 * one.figures[name]
    assert one.figures["bytes"] == 700
    assert (one.figures["sequence_length"], one.figures["dtype"]) == (24, "float32")
    assert f"\nloss            {one.figures['loss']:.4f}\n" in one.out
    assert f"\nbits per byte   {one.figures['bits_per_byte']:.4f}\n" in one.out


def test_evaluate_takes_a_length_and_a_precision(evaluate: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    plain = evaluate(tmp_path / "a.txt").figures
    short = evaluate(tmp_path / "a.txt", "--sequence-length", 8).figures
    assert short["sequence_length"] == 8
    coarse = evaluate(tmp_path / "a.txt", "--dtype", "bfloat16").figures
    assert len({plain["loss"], short["loss"], coarse["loss"]}) == 3
    assert coarse["loss"] == pytest.approx(plain["loss"], rel=0.02)


def test_wrong_input_is_reported_with_its_mend(
    generate: Command, evaluate: Command, tmp_path: Path, checkpoint: Path
) -> None:
    text, empty = tmp_path / "a.txt", tmp_path / "empty.txt"
    text.write_text(TEXT)
    empty.touch()
    larger = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=302)
    for reported, expected in [
        (evaluate(tmp_path / "nowhere.txt"), f"there is no file {tmp_path / 'nowhere.txt'}"),
        (evaluate(), "INPUT must list at least one source"),
        (evaluate(empty), "at least one token is needed to predict"),
        (evaluate(text, "--sequence-length", 25), "max_position_embeddings 24; lower or omit it"),
        (evaluate(text, "--tokenizer", larger), "has 302 entries"),
        (generate("--tokenizer", larger), "has 302 entries"),
        (generate("--checkpoint", tmp_path), "must be a checkpoint, a folder of checkpoints or"),
        (
            evaluate(text, "--checkpoint", tmp_path),
            "must be a checkpoint, a folder of checkpoints or",
        ),
    ]:
        assert (reported.code, reported.out, reported.figures) == (2, "", None)
        assert expected in reported.err and "Traceback" not in reported.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "--checkpoint", ".", "--temperature", "-1"],
        ["generate", "--checkpoint", ".", "--temperature", "nan"],
        ["generate", "--checkpoint", ".", "--top-k", "-1"],
        ["generate", "--checkpoint", ".", "--samples", "0"],
        ["evaluate", "a.txt"],
        ["evaluate", "--checkpoint", ".", "a.txt", "--sequence-length", "0"],
        ["evaluate", "--checkpoint", ".", "a.txt", "--dtype", "int8"],
    ],
)
def test_a_wrong_command_line_is_wrong_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: megaspeed")


@pytest.mark.parametrize("command", ["generate", "evaluate", "tokenize", "export-hf"])
def test_the_tokenizer_of_the_command_line_is_not_called_the_configurations(
    command: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text := tmp_path / "a.txt").write_text(TEXT)
    arguments: dict[str, list[str | Path]] = {
        "generate": ["--checkpoint", checkpoint],
        "evaluate": [text, "--checkpoint", checkpoint],
        "tokenize": [text, "--output", tmp_path / "tokens"],
        "export-hf": [checkpoint, tmp_path / "exported"],
    }
    for given, expected in [
        (
            tmp_path / "none",
            f"--tokenizer is a path (nothing is downloaded), but there is no {tmp_path}",
        ),
        (text, f"--tokenizer must be a tokenizer.json or a folder with one, but {text} cannot be"),
    ]:
        reported = Ended(capsys, tmp_path, command, *arguments[command], "--tokenizer", given)
        assert (reported.code, reported.out, reported.figures) == (2, "", None)
        assert reported.err.startswith(expected) and "data.tokenizer" not in reported.err


def test_a_prompt_that_is_not_utf_8_is_wrong_input(checkpoint: Path) -> None:
    # The shell's $'caf\\xe9': in Latin-1. Python reads the byte as a lone surrogate.
    megaspeed = [
        sys.executable,
        "-c",
        "import sys; from megaspeed.cli import main; sys.exit(main())",
    ]
    command: list[str | bytes] = [*megaspeed, "generate", "--checkpoint", str(checkpoint)]
    command += ["--prompt", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: megaspeed generate")
    assert done.stderr.endswith(
        "argument --prompt: it must be UTF-8, but its character 4 is not; write it in UTF-8\n"
    )


def test_neither_command_loads_deepspeed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    code = (
        "import sys; from megaspeed.cli import main; "
        "codes = [main([*command, '--checkpoint', sys.argv[1]]) for command in "
        "(['generate', '--max-tokens', '2'], ['evaluate', sys.argv[2]])]; "
        "sys.exit(' '.join({'deepspeed', 'datasets'} & set(sys.modules)) or max(codes) or None)"
    )
    command = [sys.executable, "-c", code, str(checkpoint), str(tmp_path / "a.txt")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


# --- progress -------------------------------------------------------------------------------------


def test_lines_show_the_share_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with BarOrLines(40, seconds_between_lines=0) as bar:
        for done in (15, 20, 40):
            bar.show(done, "some text")
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == " 38%  some text"
    assert re.fullmatch(r" 50%  some text, \d:\d\d:\d\d left", second)
    assert last == "100%  some text"


def test_no_share_is_shown_if_the_total_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with BarOrLines(0, seconds_between_lines=0) as bar:
        bar.show(7, "some text")
    assert capsys.readouterr().err == "some text\n"


def test_short_work_shows_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with BarOrLines(10) as bar:
        bar.show(10, "some text")
    assert capsys.readouterr() == ("", "")
