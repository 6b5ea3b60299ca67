"""The combinations of settings that the equality test runs.

every ZeRO stage with every set of axes that are in use     4 stages x 8 sets
every layout of up to 8 ranks                               17 layouts
every two values of two settings, pp, dp and tp among them  pairwise (Cohen et al. 1997)

A second table has shards and replicas (``HYBRID``), a third one several chunks on each pipeline
stage (``CHUNKED``), a fourth one a context axis (``CONTEXT``), and a fifth one a mixture of experts
(``EXPERTS``), again with all pairs.
``runs_of_rows.py`` turns a row of any table into a run.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

LAYOUTS = [
    (pp, dp, tp)
    for pp, dp, tp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4))
    if pp * dp * tp <= 8
]

SETTINGS: Mapping[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "zero_stage": (0, 1, 2, 3),
    "architecture": ("gpt2", "llama"),
    "tied": (True, False),
    "schedule": ("gpipe", "1f1b"),
    "gradient_reduction": ("per_step", "per_micro_batch"),
    "sequence_parallel": (False, True),
    "activation_checkpointing": ("none", "selective", "full"),
    "dropout": (0.0, 0.1),
    "micro_batches": (2, 4),
    "reset_at_documents": (False, True),
    "optimizer": ("AdamW", "Muon"),
    "z_loss": (0.0, 0.01),
}


HYBRID: Mapping[str, Sequence[Any]] = {
    "layout": [
        (pp, replicate, shard, tp)
        for pp, replicate, shard, tp in itertools.product((1, 2), (1, 2, 4), (1, 2, 3, 4), (1, 2))
        if pp * replicate * shard * tp <= 8
    ],
    "zero_stage": (1, 2, 3),
    "overlap_comm": (False, True),
    "gradient_reduction": ("per_step", "per_micro_batch"),
    "micro_batches": (1, 2),
    "tied": (True, False),
    "schedule": ("1f1b", "gpipe"),
    "sequence_parallel": (False, True),
    "reduced_in": ("fp32", "bf16"),
    "optimizer": ("AdamW", "Muon"),
}
_SWITCHES: Mapping[str, Sequence[Any]] = {
    "tied": (True, False),
    "sequence_parallel": (False, True),
    "activation_checkpointing": ("none", "selective", "full"),
    "dropout": (0.0, 0.1),
    "reset_at_documents": (False, True),
    "overlap_comm": (False, True),
    "optimizer": ("AdamW", "Muon"),
}
CHUNKED: Mapping[str, Sequence[Any]] = {
    "layout": [
        (pp, dp, tp)
        for pp, dp, tp in [*itertools.product((2, 3, 4), (1, 2), (1, 2)), (2, 4, 1)]
        if pp * dp * tp <= 8
    ],
    "zero_stage": (3, 2, 1, 0),
    "chunks": (2, 3),
    "groups": (1, 2, "auto"),
    "micro_batches": (4, 7, 9),
    "replicate": (1, 2),
    "gradient_reduction": ("auto", "per_micro_batch", "per_step"),
    "architecture": ("gpt2", "llama"),
    **_SWITCHES,
    "gathers_ahead": (True, False),
    "persistent": (0, 100),  # elements of a parameter that ZeRO-3 keeps gathered, at most
}
CONTEXT: Mapping[str, Sequence[Any]] = {
    "layout": [
        (pp, dp, tp) for pp, dp, tp in itertools.product((1, 2), repeat=3) if pp * dp * tp <= 4
    ],
    "context": (2, 4),
    "method": ("ulysses", "all_gather"),
    "zero_stage": (3, 2, 1, 0),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "replicate": (1, 2),
    "gradient_reduction": ("per_micro_batch", "per_step"),
    "architecture": ("gpt2", "llama"),
    "key_value_heads": (2, 8, 1),  # of 8
    **_SWITCHES,
}
EXPERTS: Mapping[str, Sequence[Any]] = {
    "layout": [
        (pp, dp, tp)
        for pp, dp, tp in itertools.product((1, 2), (1, 2, 4), (1, 2))
        if pp * dp * tp <= 8
    ],
    "context": (1, 2),
    "expert": (1, 2, 4, 8),  # ranks that share the 8 experts
    "exchange": ("all_to_all", "all_gather", "auto"),  # auto: nothing is exchanged
    "architecture": ("qwen3_moe",),
    "zero_stage": (3, 2, 1, 0),
    "activation_checkpointing": ("none", "selective", "full", "full_offloaded"),
    "schedule": ("1f1b", "interleaved"),
    "replicate": (1, 2),
    "gradient_reduction": ("per_micro_batch", "per_step"),
    "micro_batches": (2, 4),
    "reset_at_documents": (False, True),
    "active": (2, 1),  # experts that each token uses
    "normalized": (False, True),  # whether their scores are divided by their sum
    "auxiliary": (0.01, 0.0),
    "bias_rate": (0.01, 0.0),
    "optimizer": ("AdamW", "Muon"),
}
_DEGREES = {3: ("pp", "dp", "tp"), 4: ("pp", "replicate", "shard", "tp"), 0: ()}


def axes_in_use(layout: tuple[int, int, int]) -> tuple[bool, bool, bool]:
    """Return whether pp, dp and tp have more than one rank."""
    pp, dp, tp = layout
    return pp > 1, dp > 1, tp > 1


def is_possible(row: Row) -> bool:
    """Return whether a (partial) row can run.

    There are at most 8 ranks. Sequence parallelism needs a tensor axis, an interleaved schedule a
    pipeline. A group has a micro-batch for each pipeline stage. Two replicas need an even data
    degree, and ZeRO-0 has only replicas. If a token uses one expert, its normalized score is always
    1, so the gradient of the router would be only rounding. Ranks that share experts need a method
    of exchange, and ``expert`` must divide the ranks of a pipeline stage.
    """
    pp, dp, tp = row["layout"] if len(row.get("layout", ())) == 3 else (1, 4, 2)
    if len(row.get("layout", ())) == 4:
        tp = row["layout"][-1]
    if "layout" in row and pp == 1 and row.get("schedule") == "interleaved":
        return False
    if "layout" in row and pp * dp * tp * row.get("context", 1) > 8:
        return False
    if row.get("sequence_parallel") and tp == 1:
        return False
    if row.get("active") == 1 and row.get("normalized"):
        return False
    if {"expert", "exchange"} <= row.keys() and (row["expert"] == 1) != (row["exchange"] == "auto"):
        return False
    if {"layout", "context"} <= row.keys() and dp * row["context"] * tp % row.get("expert", 1):
        return False
    if row.get("groups") == 2 and 2 * pp > row.get("micro_batches", 9):
        return False
    return row.get("replicate", 1) == 1 or (dp % 2 == 0 and row.get("zero_stage") != 0)


def pairs_of(row: Row) -> set[Pair]:
    """Return every pair of values that a row covers. A layout counts as its degrees."""
    layout = row.get("layout", ())
    degrees = zip(_DEGREES[len(layout)], layout, strict=True)
    values = [(name, value) for name, value in row.items() if name != "layout"]
    return set(itertools.combinations(sorted([*values, *degrees], key=lambda item: item[0]), 2))


def possible_pairs(settings: Mapping[str, Sequence[Any]] = SETTINGS) -> set[Pair]:
    """Return every pair of values that can run together."""
    two = itertools.combinations(settings, 2)
    rows = ({a: x, b: y} for a, b in two for x, y in itertools.product(settings[a], settings[b]))
    return set().union(*(pairs_of(row) for row in rows if any(_with_ranks(row, settings))))


def _with_ranks(row: Row, settings: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Yield the possible rows that a (partial) row becomes if its numbers of ranks are chosen."""
    open_settings = [name for name in ("layout", "context") if name in settings and name not in row]
    for values in itertools.product(*(settings[name] for name in open_settings)):
        filled = {**row, **dict(zip(open_settings, values, strict=True))}
        if is_possible(filled):
            yield filled


def covering_rows() -> list[Row]:
    """Return rows with every ZeRO stage at every set of axes. Other settings cover all pairs."""
    missing = possible_pairs()
    rows: list[Row] = []
    for axes in itertools.product((False, True), repeat=3):
        layouts = [layout for layout in LAYOUTS if axes_in_use(layout) == axes]
        for zero_stage in SETTINGS["zero_stage"]:
            used = Counter(row["layout"] for row in rows)
            starts = [{"layout": layout, "zero_stage": zero_stage} for layout in layouts]
            start = max(starts, key=lambda row: (-used[row["layout"]], _new(row, missing)))
            rows.append(_filled(start, missing, rows))
            missing -= pairs_of(rows[-1])
    return rows


def rows_of(settings: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return rows that cover all pairs of these settings."""
    missing = possible_pairs(settings)
    rows: list[Row] = []
    while missing:
        row = _filled({}, missing, rows, settings)
        if not _new(row, missing):
            row = _filled(_with_pair(min(missing, key=str), settings), missing, rows, settings)
        rows.append(row)
        missing -= pairs_of(rows[-1])
    return rows


def _with_pair(pair: Pair, settings: Mapping[str, Sequence[Any]]) -> Row:
    """Return a partial row that has these two values, and can run."""
    degrees = _DEGREES[len(settings["layout"][0])]
    others = dict(each for each in pair if each[0] not in degrees)
    for row in _with_ranks(others, settings):
        if pair in pairs_of(row):
            return row
    raise AssertionError(f"no row has {pair}")


def _new(row: Row, missing: set[Pair]) -> int:
    return len(pairs_of(row) & missing)


def _filled(
    row: Row,
    missing: set[Pair],
    rows: Sequence[Row],
    settings: Mapping[str, Sequence[Any]] = SETTINGS,
) -> Row:
    """Fill each open setting of the row with the value that covers most of the missing pairs. Among
    equals, take the value that the fewest rows have.
    """
    for name in settings:
        if name in row:
            continue
        values = [value for value in settings[name] if is_possible({**row, name: value})]
        used = Counter(other[name] for other in rows)
        new = {value: _new({**row, name: value}, missing) for value in values}
        row = {**row, name: max(values, key=lambda value: (new[value], -used[value]))}
    return {name: row[name] for name in settings}
