"""The bars of a picture of a step: boxes of computations, and the lines below them."""

from collections import defaultdict

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

Spans = dict[int, set[tuple[float, float]]]  # row -> (start, end)

BLACK = (0.0, 0.0, 0.0)


def bars(figure: Figure, *, boxes: bool, panel: int = 0) -> dict[tuple[float, ...], Spans]:
    """Return the spans of each colour of a panel: boxes, or the lines below them."""
    found: dict[tuple[float, ...], Spans] = defaultdict(lambda: defaultdict(set))
    for each in figure.axes[panel].collections:
        assert isinstance(each, PolyCollection)
        colour = tuple(each.get_facecolor()[0][:3])
        for path in each.get_paths():
            box = path.get_extents()
            if (box.height > 0.5) == boxes:
                found[colour][round(box.y0)].add((box.x0, box.x1))
    return found
