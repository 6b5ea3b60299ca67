"""A table as the lines of its cells."""

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

TEXT = Path(__file__).parents[3] / "LICENSE"


def printed(table: Table) -> list[str]:
    """Its lines, without the rules between the cells."""
    output = StringIO()
    Console(file=output, width=200).print(table)
    return output.getvalue().replace("│", " ").splitlines()
