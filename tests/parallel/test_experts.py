"""A mixture of experts trains like one process at every layout.

The single process uses the choices of the ranks, which must be its own: no choice is flipped. Its
auxiliary loss is computed by autograd, and its biases from its own counts.
"""

from pathlib import Path

import pytest

from tests.parallel.covering import EXPERTS, Row, pairs_of, possible_pairs, rows_of
from tests.parallel.references import FEW_STEPS, References, train_and_compare
from tests.parallel.runs_of_rows import run_of
from tests.support.rank_pool import RankPool

ROWS = rows_of(EXPERTS)


def name_of(row: Row) -> str:
    return "-".join(map(str, (*row["layout"][:2], *list(row.values())[1:])))


def test_every_possible_pair_of_settings_is_covered() -> None:
    assert possible_pairs(EXPERTS) == set().union(*map(pairs_of, ROWS))
    assert len(ROWS) <= 20


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_experts_equal_one_process(
    row: Row, pool: RankPool, references: References, documents: Path
) -> None:
    run = run_of(row, documents)
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest
    assert comparison.flipped == 0 < comparison.choices
    exact = {difference.name: difference.relative for difference in comparison.experts[:2]}
    assert exact == {"biases of routers": 0.0, "tokens of each expert": 0.0}
    has_loss = run.config.model.router_aux_loss_coef > 0.0
    assert len(comparison.auxiliary_losses) == FEW_STEPS * has_loss
