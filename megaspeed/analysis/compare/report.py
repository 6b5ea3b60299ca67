"""A comparison shown in the terminal, and left in a folder as JSON, Markdown and two pictures."""

import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megaspeed.analysis.compare.grids import memory_grid, summary_grid, traffic_grid
from megaspeed.analysis.compare.heading import layout_line, model_line, notes
from megaspeed.analysis.compare.markdown import as_markdown
from megaspeed.analysis.compare.memory_chart import draw_memory_chart
from megaspeed.analysis.compare.result import ComparisonResult
from megaspeed.analysis.compare.result_json import result_as_json
from megaspeed.analysis.compare.table import as_table
from megaspeed.analysis.compare.trade_off_chart import draw_trade_off_chart

RESULT, MARKDOWN, MEMORY, TRADE_OFF = "compare.json", "compare.md", "memory.png", "tradeoff.png"


def show(result: ComparisonResult, console: Console) -> None:
    """Layout, model, tables, and everything that went wrong."""
    for line in (layout_line(result), model_line(result)):
        console.print(line, highlight=False, markup=False)
    for grid in (traffic_grid, memory_grid, summary_grid) if result.done else (summary_grid,):
        console.print()
        console.print(as_table(grid(result)))
    console.print()
    for note in notes(result):
        console.print(Text(note, style="red" if "DISAGREE" in note or "FAILED" in note else ""))


def write(result: ComparisonResult, folder: Path) -> list[Path]:
    """Writes the files to ``folder`` and returns them; pictures only where there are figures."""
    pictures = [MEMORY, TRADE_OFF] if result.done else []
    text = json.dumps(result_as_json(result), indent=2) + "\n"
    (folder / RESULT).write_text(text, encoding="utf-8")
    (folder / MARKDOWN).write_text(as_markdown(result, pictures), encoding="utf-8")
    if pictures:  # after the figures, which must be safe by then
        draw_memory_chart(result, folder / MEMORY)
        draw_trade_off_chart(result, folder / TRADE_OFF)
    return [folder / name for name in (RESULT, MARKDOWN, *pictures)]
