"""The loss curve of a run as a picture, drawn from its ``metrics.jsonl``."""

import json
from pathlib import Path


def draw_loss_curve(metrics_file: Path, picture: Path, *, title: str) -> None:
    """Writes a PNG with the training loss of each step and the validation losses, over tokens.

    Args:
        metrics_file: what the run recorded, one JSON object a line.
        picture: where the PNG goes.
        title: printed above the curve.
    """
    # Imported here: drawing is the last thing a run does, and matplotlib takes long to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    tokens_of_step = {r["step"]: r["tokens"] for r in records if "tokens" in r}
    steps = [r for r in records if r.get("loss") is not None]
    validations = [r for r in records if r.get("validation_loss") is not None]

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([r["tokens"] for r in steps], [r["loss"] for r in steps], lw=1, label="training")
    axes.plot(
        [tokens_of_step[r["step"]] for r in validations],
        [r["validation_loss"] for r in validations],
        "o-",
        label="validation",
    )
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
