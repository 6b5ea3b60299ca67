"""Bad input gives exit code 2 and one message, quickly, and leaves no files."""

import contextlib
import copy
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaspeed.cli import main
from tests.config.mutations import Bad, Workshop

pytestmark = pytest.mark.slow

SEED = 13
MOST_SECONDS = 5.0
"""Limit for one check, on an idle machine."""

CHECK = ("check", "--world-size", "2", "--device", "cpu")
_HEADING = re.compile(r"^\d[\d,]* problems? in ", re.MULTILINE)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    return Workshop(tmp_path, SEED)


def check(options: tuple[str, ...]) -> tuple[int, str, str, float]:
    """(exit code, standard output, standard error, processor seconds) of `megaspeed check`."""
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*CHECK, *options])
        except SystemExit as exit_:  # of argparse
            code = int(str(exit_.code))
    return code, out.getvalue(), err.getvalue(), time.process_time() - start


def complaints(code: int, out: str, err: str, seconds: float) -> list[str]:
    """What is wrong with the output of `megaspeed check`."""
    messages = len(_HEADING.findall(err)) + err.count(" error: ")
    return [
        *([f"exit code {code}"] if code != 2 else []),
        *([f"output {out!r:.100}"] if out else []),
        *(["a traceback"] if "Traceback" in err else []),
        *([f"{messages} messages"] if messages != 1 else []),
        *([f"{len(err):,} characters"] if len(err) > 20_000 else []),
        *([f"{seconds:.1f} s"] if seconds > MOST_SECONDS else []),
    ]


def tree(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def failure(bad: Bad) -> str | None:
    try:
        code, out, err, seconds = check(bad.options)
    except Exception as error:
        return f"{bad.name}: {type(error).__name__}: {error!s:.200}"
    found = complaints(code, out, err, seconds)
    return f"{bad.name}: {', '.join(found)}: {err:.300}" if found else None


def test_the_valid_configurations_have_no_mistake(workshop: Workshop) -> None:
    for name, file in workshop.good_ones().items():
        code, _, err, _ = check(("--config", str(file)))
        assert (code, err) == (0, ""), name


GROUPS = (
    "values",
    "keys",
    "relations",
    "text",
    "--set",
    "flags",
    "extends",
    "special files",
    "tokenizers",
    "models of Hugging Face",
)


@pytest.mark.parametrize("group", GROUPS)
def test_each_mistake_is_one_message_and_exit_code_2(group: str, workshop: Workshop) -> None:
    mistakes = list(dict(workshop.groups())[group]())
    before = tree(workshop.folder)
    wrong = [text for text in map(failure, mistakes) if text is not None]
    assert not wrong, f"{len(wrong)} of {len(mistakes)}:\n" + "\n".join(wrong)
    assert tree(workshop.folder) == before, "something was written"


def test_there_are_more_than_200_mistakes(workshop: Workshop) -> None:
    names = [bad.name for _, mistakes in workshop.groups() for bad in mistakes()]
    assert tuple(name for name, _ in workshop.groups()) == GROUPS
    assert len(set(names)) > 0.95 * len(names) and len(names) >= 300


def test_of_20_000_unknown_keys_20_are_listed_and_the_rest_is_counted(workshop: Workshop) -> None:
    for section in (None, "model"):
        values = copy.deepcopy(workshop.good)
        inner = values if section is None else values[section]
        inner |= {f"key_{number}": {"a": number} for number in range(20_000)}
        code, out, err, seconds = check(("--config", str(workshop.write(values))))
        assert complaints(code, out, err, seconds) == []
        assert err.startswith("20,000 problems in ") and err.endswith(
            "\n  and 19,980 more; megaspeed check --json FILE writes all of them\n"
        )
        assert len(err.splitlines()) == 22


def test_a_process_ends_with_exit_code_2(workshop: Workshop) -> None:
    """The first mistake of each group."""
    program = "import sys; from megaspeed.cli import main; sys.exit(main())"
    for name, mistakes in workshop.groups():
        bad = next(mistakes())
        ended = subprocess.run(
            [sys.executable, "-c", program, *CHECK, *bad.options],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert complaints(ended.returncode, ended.stdout, ended.stderr, 0.0) == [], (name, bad.name)
