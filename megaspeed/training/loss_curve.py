"""The loss curve of a run as a picture, drawn from its ``metrics.jsonl``."""

from pathlib import Path

from megaspeed.training.metrics import read_records


def draw_loss_curve(metrics_file: Path, picture: Path, *, title: str) -> None:
    """Writes a PNG with the training loss of each step and the validation losses, over tokens.

    A line that is not a record, and a validation whose step is not recorded, are left out.

    Args:
        metrics_file: what the run recorded, one JSON object a line.
        picture: where the PNG goes.
        title: printed above the curve.
    """
    # Imported here: drawing is the last thing a run does, and matplotlib takes long to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens_of_step: dict[int, int] = {}
    training, validation = [], []
    for record in read_records(metrics_file):
        if record is None or "step" not in record:
            continue
        step = record["step"]
        if "tokens" in record:
            tokens_of_step[step] = record["tokens"]
        if step not in tokens_of_step:
            continue
        if record.get("loss") is not None:
            training.append((tokens_of_step[step], record["loss"]))
        if record.get("validation_loss") is not None:
            validation.append((tokens_of_step[step], record["validation_loss"]))

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for points, style, label in ((training, "-", "training"), (validation, "o-", "validation")):
        axes.plot([x for x, _ in points], [y for _, y in points], style, lw=1, label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a "$" in the run's name is no formula
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
