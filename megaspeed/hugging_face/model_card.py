"""The README.md of an export. It states only what the checkpoint and its run have recorded."""

from collections.abc import Iterator
from pathlib import Path

from megaspeed.checkpoint.folders import METRICS
from megaspeed.checkpoint.run_state import RunState
from megaspeed.files.json_values import read_records
from megaspeed.units import markdown_table


def model_card(checkpoint: Path, title: str, model: str) -> bytes:
    """The card of a checkpoint's export. ``model`` states its size and precision."""
    state = RunState.read(checkpoint)
    described = state.model_dump_json(indent=2, exclude={"progress": {"recent"}})  # many numbers
    facts = [("model", model), *_training(checkpoint, state), *state.software.items()]
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# {title}\n\nThis model was exported from a checkpoint of megaspeed.\n\n"
        + "\n".join(markdown_table(("fact", "value"), facts))
        + "\n\n<details><summary>Run state, with the configuration</summary>\n\n"
        f"```json\n{described}\n```\n\n</details>\n"
    ).encode()


def _training(checkpoint: Path, state: RunState) -> Iterator[tuple[str, str]]:
    """Facts about the training: each name with its value."""
    progress = state.progress
    yield "checkpoint", state.origin
    if state.imported_from is None:
        yield "steps", f"{progress.step:,}"
        yield "tokens", f"{progress.tokens:,}"
    if progress.loss is not None:
        yield "training loss of the last step (nats a token)", f"{progress.loss:.4f}"
    file = checkpoint.absolute().parent.parent / METRICS
    records = read_records(file) if file.is_file() else ()
    finite = [each for each in records if each and each.get("validation_loss") is not None]
    for last in [each for each in finite if each["step"] <= progress.step][-1:]:
        name = f"validation loss after step {last['step']:,} (nats a token)"
        yield name, f"{last['validation_loss']:.4f}"
