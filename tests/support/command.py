"""Run ``megaspeed`` in this process, and look for words in its output."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main


class Ended:
    """The exit code of a command and its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: Any) -> None:
        capsys.readouterr()
        file = tmp_path / "figures.json"
        file.unlink(missing_ok=True)
        self.code = main([*map(str, arguments), "--json", str(file)])
        self.out, self.err = capsys.readouterr()
        self.figures: Any = json.loads(file.read_text()) if file.exists() else None


def figures(tmp_path: Path, *command: Any) -> Any:
    """Run a command and return the JSON that it writes to ``--json``."""
    file = tmp_path / "figures.json"
    assert main([*map(str, command), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def lacking(text: object, *parts: object) -> list[str]:
    """Return the parts that a text lacks. A part is a key, a number or a path, for example."""
    return [str(part) for part in parts if str(part) not in str(text)]
