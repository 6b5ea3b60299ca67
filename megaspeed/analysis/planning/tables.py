"""How the tables of a plan look: a heading, a line under it, no more."""

from collections.abc import Sequence

from rich import box
from rich.table import Table


def table_of(
    title: str, *, left: Sequence[str] = (), right: Sequence[str] = (), caption: str | None = None
) -> Table:
    """Columns that are read as words, then columns of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
