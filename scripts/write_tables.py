"""Write the tables of figures into README and docs. A test fails if a table is out of date.

    python scripts/write_tables.py

A table is between two lines, <!-- figures NAME --> and <!-- end -->. docs/figures/NAME.json has

    command     the command that printed the figures; the page names it, too
    measured    date and commit; absent if every figure is computed
    rows        the cells, the header first

This script computes the cells that follow from shapes: see COMPUTED.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.measurement.compare import zero_rows
from megaspeed.planning.prediction import Prediction, predict
from megaspeed.units import GB, GIB, MIB

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", ROOT / "ds_configs" / "README.md", *sorted(ROOT.glob("docs/*.md")))

_TABLE = re.compile(r"(<!-- figures (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Rows = list[list[str]]


def main() -> None:
    """Write every page that has a table."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = with_tables(text)
        if written != text:
            page.write_text(written, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


def with_tables(page: str) -> str:
    """Return the text of a page, with its tables written again."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)


def table(name: str) -> str:
    """Return the lines between the two marks."""
    figures = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    header, *rows = COMPUTED.get(name, list)(figures["rows"])
    lines = [[f" {cell} " if cell else " " for cell in cells] for cells in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    text = "".join(f"|{'|'.join(cells)}|\n" for cells in lines)
    if "measured" in figures:
        text += f"\nMeasured {figures['measured']}.\n"
    return text


def _memory(rows: Rows) -> Rows:
    """Return columns 1 and 3: predicted peak and bytes of ds_configs/3d.json at each ZeRO stage."""
    run = load_run(ROOT / "ds_configs" / "3d.json", (), World(8, "the table"))
    header, *measured = rows
    for cells, row in zip(measured, zero_rows(run, range(4), "cpu"), strict=True):
        assert row.predicted is not None
        cells[1] = MIB.of(max(each.peak_bytes for each in row.predicted))
        cells[3] = MIB.of(max(each.sent_bytes for each in row.predicted))
    return [header, *measured]


def _zero_paper(rows: Rows) -> Rows:
    """Return the last two columns: model states of ds_configs/zero_7.5b.json, in GB and GiB."""
    header, *paper = rows
    for stage, cells in enumerate(paper):
        states = _predicted("zero_7.5b", 64, f"zero_optimization.stage={stage}").heaviest
        cells[2:] = [GB.of(states.state_bytes), GIB.of(states.state_bytes)]
    return [header, *paper]


def _micro_batches(rows: Rows) -> Rows:
    """Return peaks of ds_configs/gpt2_1.5b.json in GiB, by world size and micro-batch."""
    header, *worlds = rows
    for cells in worlds:
        for column, name in enumerate(header[1:], start=1):
            change = f"train_micro_batch_size_per_gpu={re.sub(r'[^0-9]', '', name)}"
            peak = _predicted("gpt2_1.5b", int(cells[0]), change).fullest.peak_bytes
            cells[column] = f"{peak / GIB.size:.1f}"
    return rows


def _predicted(name: str, world_size: int, *overrides: str) -> Prediction:
    file = ROOT / "ds_configs" / f"{name}.json"
    run = load_run(file, overrides, World(world_size, "the table", "cuda"))
    return predict(run)


COMPUTED: dict[str, Callable[[Rows], Rows]] = {
    "memory": _memory,
    "zero_paper": _zero_paper,
    "micro_batches": _micro_batches,
}
"""Name of a table -> a function that replaces the cells that can be computed."""

if __name__ == "__main__":
    main()
