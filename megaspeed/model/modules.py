"""Plain torch modules from the rows of the model's table."""

from collections.abc import Mapping

from torch import nn

from megaspeed.model.parameters import Row


def make_modules(rows: Mapping[str, Row]) -> dict[str, nn.Module]:
    """Name within the layer -> module, with weights as torch initialises them."""
    return {name: _make_module(row) for name, row in rows.items()}


def _make_module(row: Row) -> nn.Module:
    if row.columns is None:
        norm = nn.LayerNorm if row.kind == "layer_norm" else nn.RMSNorm
        return norm(row.rows, eps=row.eps)
    if row.kind == "embedding":
        return nn.Embedding(row.rows, row.columns)
    return nn.Linear(row.columns, row.rows, bias=row.bias)
