"""What stands round the grids: the layout and the model above, what went wrong below."""

from megaspeed.analysis.compare.result import ComparisonResult
from megaspeed.model.parameters import parameters_of


def layout_line(result: ComparisonResult) -> str:
    """Degrees, precision and batch."""
    return f"{_ranks(result)}, {_batch(result)}"


def model_line(result: ComparisonResult) -> str:
    """Architecture and size."""
    model = result.run.config.model
    elements = sum(parameter.elements for parameter in parameters_of(model).values())
    tied = "tied" if model.tie_word_embeddings else "untied"
    return (
        f"{model.architecture}: {elements:,} parameters, "
        f"{model.num_hidden_layers} blocks x {model.hidden_size:,}, {model.num_attention_heads} "
        f"heads, vocabulary {model.vocab_size:,} ({tied})"
    )


def chart_title(result: ComparisonResult) -> str:
    """All of it in lines short enough to stand above a picture."""
    return "\n".join((_ranks(result), _batch(result), model_line(result)))


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


def _ranks(result: ComparisonResult) -> str:
    grid = result.run.grid
    return (
        f"{result.run.name}: pp {grid.pp} x dp {grid.dp} x tp {grid.tp} = "
        f"{grid.world_size} ranks ({result.device}), {result.run.precision}"
    )


def _batch(result: ComparisonResult) -> str:
    batch = result.run.batch
    return (
        f"{batch.train_batch_size} samples of {result.run.config.data.sequence_length:,} tokens a "
        f"step in {batch.gradient_accumulation_steps} micro-batches of {batch.micro_batch_size}"
    )
