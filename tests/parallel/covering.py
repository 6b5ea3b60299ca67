"""Which combinations of settings the equality test runs: every layout with every ZeRO stage, and
every pair of values of any two settings at least once (pairwise covering, Cohen et al. 1997).
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, object], tuple[str, object]]

LAYOUTS = [
    (pp, dp, tp)
    for pp, dp, tp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4))
    if pp * dp * tp <= 8
]

SETTINGS: Mapping[str, tuple[object, ...]] = {
    "layout": tuple(LAYOUTS),
    "zero_stage": (0, 1, 2, 3),
    "architecture": ("gpt2", "llama"),
    "tied": (True, False),
    "schedule": ("gpipe", "1f1b"),
    "gradient_reduction": ("per_step", "per_micro_batch"),
    "sequence_parallel": (False, True),
    "activation_checkpointing": ("none", "full"),
    "dropout": (0.0, 0.1),
    "micro_batches": (2, 4),
    "reset_at_documents": (False, True),
}


def is_possible(row: Mapping[str, Any]) -> bool:
    """Whether a (partial) row can be run: sequence parallelism needs a tensor axis."""
    layout = row.get("layout")
    return not (row.get("sequence_parallel") and layout is not None and layout[2] == 1)


def pairs_of(row: Mapping[str, object]) -> set[Pair]:
    """Every pair of settings that a row covers."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def possible_pairs() -> set[Pair]:
    """Every pair of values of two settings that can be run together."""
    pairs = set()
    for (a, values_a), (b, values_b) in itertools.combinations(sorted(SETTINGS.items()), 2):
        for x, y in itertools.product(values_a, values_b):
            if is_possible({a: x, b: y}):
                pairs.add(((a, x), (b, y)))
    return pairs


def covering_rows() -> list[Row]:
    """Every layout with every ZeRO stage, then what it takes to cover the pairs still missing."""
    missing = possible_pairs()
    rows: list[Row] = []
    starts = itertools.product(SETTINGS["layout"], SETTINGS["zero_stage"])
    for layout, zero_stage in starts:
        rows.append(_filled({"layout": layout, "zero_stage": zero_stage}, missing, rows))
        missing -= pairs_of(rows[-1])
    while missing:
        rows.append(_filled(dict(min(missing, key=repr)), missing, rows))
        missing -= pairs_of(rows[-1])
    return rows


def _filled(row: Row, missing: set[Pair], rows: Sequence[Row]) -> Row:
    """The row with each open setting at the value that covers most of the missing pairs; among
    equals, the value that fewest rows have had.
    """
    for name in SETTINGS:
        if name in row:
            continue
        values = [value for value in SETTINGS[name] if is_possible({**row, name: value})]
        used = Counter(other[name] for other in rows)
        new = {value: len(pairs_of({**row, name: value}) & missing) for value in values}
        row = {**row, name: max(values, key=lambda value: (new[value], -used[value]))}
    return row
