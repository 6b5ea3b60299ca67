"""Runs ``megaspeed`` in this process, and looks for words in what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main


class Ended:
    """What a command printed, wrote and returned."""

    def __init__(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: Any) -> None:
        capsys.readouterr()
        file = tmp_path / "figures.json"
        file.unlink(missing_ok=True)
        self.code = main([*map(str, arguments), "--json", str(file)])
        self.out, self.err = capsys.readouterr()
        self.figures: Any = json.loads(file.read_text()) if file.exists() else None


def figures(tmp_path: Path, *command: Any) -> Any:
    """What a command writes to --json."""
    file = tmp_path / "figures.json"
    assert main([*map(str, command), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def lacking(text: object, *parts: object) -> list[str]:
    """The parts that a text does not have, such as a key, a number or a path."""
    return [str(part) for part in parts if str(part) not in str(text)]
