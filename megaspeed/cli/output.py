"""What a command prints, and the same figures as JSON."""

import argparse
import json
import sys
from typing import Any


def say(text: str, *, error: bool = False) -> None:
    """Prints a line, to standard error where it is a complaint."""
    (sys.stderr if error else sys.stdout).write(text + "\n")


def write_json(options: argparse.Namespace, figures: Any) -> None:
    """Writes the figures where ``--json`` says, if it was given."""
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
