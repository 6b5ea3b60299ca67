"""What stands round the grids: the layout and the model above, what went wrong below."""

import math
import textwrap

from megaspeed.analysis.compare.result import ComparisonResult
from megaspeed.model import layer_count, parameter_shapes

_CHART_COLUMNS = 108


def layout_line(result: ComparisonResult) -> str:
    """Degrees, precision and batch."""
    run = result.run
    degrees, batch = run.degrees, run.batch
    return (
        f"{run.name}: pp {degrees.pp} x dp {degrees.dp} x tp {degrees.tp} = "
        f"{degrees.world_size} ranks ({result.device}), {run.precision}, {batch.train_batch_size} "
        f"samples of {run.config.data.sequence_length:,} tokens a step in "
        f"{batch.gradient_accumulation_steps} micro-batches of {batch.micro_batch_size}"
    )


def model_line(result: ComparisonResult) -> str:
    """Architecture and size."""
    model = result.run.config.model
    shapes = parameter_shapes(model, range(layer_count(model))).values()
    tied = "tied" if model.tie_word_embeddings else "untied"
    return (
        f"{model.architecture}: {sum(math.prod(shape) for shape in shapes):,} parameters, "
        f"{model.num_hidden_layers} blocks x {model.hidden_size:,}, {model.num_attention_heads} "
        f"heads, vocabulary {model.vocab_size:,} ({tied})"
    )


def chart_title(result: ComparisonResult) -> str:
    """Both in lines that fit above a picture."""
    lines = (layout_line(result), model_line(result))
    return "\n".join(textwrap.fill(line, _CHART_COLUMNS) for line in lines)


def notes(result: ComparisonResult) -> list[str]:
    """Everything that went wrong, a line each."""
    lines = [f"THE LOSSES DISAGREE: {text}" for text in result.disagreements]
    for row in result.rows:
        label = row.variant.label
        if row.status == "failed":
            lines.append(f"{label} FAILED: {row.reason}")
        elif row.status == "refused":
            lines.append(f"{label} was not run: {row.variant.refused}")
        elif row.skipped_steps:
            lines.append(
                f"{label} skipped {row.skipped_steps} of {result.steps + 1} steps, because the "
                "loss or the gradient norm was not finite"
            )
    return lines
