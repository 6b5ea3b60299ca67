"""A picture of the predicted parts of the step time."""

from pathlib import Path

from megaspeed.planning.forecast import Forecast
from megaspeed.planning.plan import Plan
from megaspeed.planning.what_if import WhatIf

# The palette of Okabe & Ito: distinguishable with any colour vision, and in print.
_COLOURS = ("#0072B2", "#CC79A7", "#E69F00", "#BBBBBB", "#56B4E9", "#D55E00", "#009E73", "#000000")
_MOST_BARS = 8


def draw_parts(plan: Plan, found: WhatIf | None, picture: Path) -> None:
    """Write a PNG with a bar for each forecast, divided into the parts of its step.

    The bars are the fastest variants of ``found``. If there are none, each bar is a ZeRO stage of
    the run.
    """
    # Imported here: matplotlib takes long to import.
    from matplotlib.figure import Figure

    bars = _bars(plan, found)
    figure = Figure(figsize=(8.4, 1.6 + 0.36 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    for row, forecast in enumerate(bars.values()):
        left = 0.0
        for (part, seconds), colour in zip(forecast.parts().items(), _COLOURS, strict=False):
            label = part if row == 0 else None
            axes.barh(row, seconds, left=left, color=colour, label=label, height=0.7)
            left += seconds
        axes.text(left, row, f" {forecast.seconds:.3g} s", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("seconds of one step, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plan.run.name, fontsize=9, loc="left", parse_math=False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(picture, dpi=160, format="png")


def _bars(plan: Plan, found: WhatIf | None) -> dict[str, Forecast]:
    if found is None or not found.layouts:
        return {
            f"ZeRO-{each.zero_stage}": each.forecast
            for each in plan.zero_stages
            if each.forecast is not None
        }
    return {
        f"{layout.run.grid}, ZeRO-{layout.run.zero_stage}": layout.forecast
        for layout in found.fastest_of_each_grid()[:_MOST_BARS]
    }
