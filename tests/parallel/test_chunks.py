"""Interleaved schedules train like one process, at every ZeRO stage.

layers            0 1 2   3 4    5 6    7 8
pipeline stage    0       1      0      1        pp 2, two chunks on each stage
chunk             0       0      1      1
"""

from pathlib import Path

import pytest

from megaspeed.pipeline.schedules import pipeline_of
from tests.parallel.covering import CHUNKED, Row, pairs_of, possible_pairs, rows_of
from tests.parallel.references import FEW_STEPS, References, train_and_compare
from tests.parallel.runs_of_rows import run_of
from tests.support.rank_pool import RankPool

ROWS = rows_of(CHUNKED)
# ZeRO-3 gathers the chunk of the next visit ahead only if there are three.
ROWS += [
    {**row, "chunks": 3, "gathers_ahead": True}
    for row in ROWS
    if row["zero_stage"] == 3 and not (row["chunks"] == 3 and row["gathers_ahead"])
]


def name_of(row: Row) -> str:
    (pp, dp, tp), rest = row["layout"], list(row.items())[2:]
    return f"pp{pp}-dp{dp}-tp{tp}-zero{row['zero_stage']}-{'-'.join(str(v) for _, v in rest)}"


def test_every_possible_pair_of_settings_is_covered(documents: Path) -> None:
    assert possible_pairs(CHUNKED) == set().union(*map(pairs_of, ROWS))
    gathers = {pipeline_of(run_of(row, documents)).gather_policy for row in ROWS}
    assert gathers == {"layers", "chunks", "chunks_ahead"}


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_chunks_equal_one_process(
    row: Row, pool: RankPool, references: References, documents: Path
) -> None:
    comparison = train_and_compare(pool, references, run_of(row, documents), FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest
