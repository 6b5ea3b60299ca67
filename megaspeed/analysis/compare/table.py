"""A grid for the terminal."""

from rich import box
from rich.table import Table

from megaspeed.analysis.compare.grids import Grid


def as_table(grid: Grid) -> Table:
    """Words to the left, numbers to the right."""
    table = Table(
        title=grid.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(grid.headings):
        words = index < grid.names
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for cells in grid.rows:
        table.add_row(*cells)
    return table
