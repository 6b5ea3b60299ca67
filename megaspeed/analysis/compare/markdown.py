"""A comparison as Markdown, fit for an issue or a paper's appendix."""

from collections.abc import Iterator, Sequence

from megaspeed.analysis.compare.grids import Grid, memory_grid, summary_grid, traffic_grid
from megaspeed.analysis.compare.heading import layout_line, model_line, notes
from megaspeed.analysis.compare.result import ComparisonResult


def as_markdown(result: ComparisonResult, pictures: Sequence[str]) -> str:
    """Layout, model, tables, and references to the pictures, which lie beside the file."""
    return "\n".join(_lines(result, pictures)) + "\n"


def _lines(result: ComparisonResult, pictures: Sequence[str]) -> Iterator[str]:
    yield f"## {result.run.name}: ZeRO stages compared"
    yield ""
    yield f"- {layout_line(result)}"
    yield f"- {model_line(result)}"
    yield "- ratio: predicted / measured. Baselines have no prediction."
    for note in notes(result):
        yield f"- **{note}**"
    for grid in (summary_grid(result), memory_grid(result), traffic_grid(result)):
        yield ""
        yield f"**{grid.title[0].upper()}{grid.title[1:]}**"
        yield ""
        yield from _table(grid)
    for picture in pictures:
        yield ""
        yield f"![{picture}]({picture})"


def _table(grid: Grid) -> Iterator[str]:
    rules = [":--" if index < grid.names else "--:" for index in range(len(grid.headings))]
    for cells in (grid.headings, rules, *grid.rows):
        yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("\n", "<br>")
