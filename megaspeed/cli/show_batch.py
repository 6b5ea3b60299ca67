"""``megaspeed show-batch``: the ids and the text that a run trains on at any step.

    megaspeed show-batch --config FILE --step 1000          the samples of that step
    megaspeed show-batch --config FILE --samples 64:72      samples 64 ... 71 of the stream

Nothing is replayed, because the tokens of a sample depend only on the data, the seed and its index.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaspeed.cli.options import (
    EXIT_DONE,
    add_command,
    add_values,
    busy,
    load,
    positive,
    say,
    write_json,
)
from megaspeed.config.batch_schedule import BatchSchedule
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config
from megaspeed.config.run import RunConfig
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.sampler import Rows, TrainingOrder
from megaspeed.data.tokenizer import load_tokenizer

_WIDTH = 120
"""Columns of the table if stdout is not a terminal."""
_IDS_SHOWN = 12
_CHARACTERS_SHOWN = 300


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    text = "show what a run trains on at any step"
    parser = add_command(commands, "show-batch", run, text, needs_world_size=False)
    which = parser.add_mutually_exclusive_group(required=True)
    add_values(
        which,
        ("--step", positive, "K", None, "step of a run that began at sample 0; from 1"),
        ("--samples", _samples, "A:B", None, "samples A ... B-1 of the stream; from 0"),
    )


def run(options: argparse.Namespace) -> int:
    """Prepare the corpus as training does, and show the samples."""
    config = read_config(options.config, options.overrides)
    samples = options.samples or _samples_of_step(options, config)
    with busy("preparing the corpus"):
        corpus = prepare_corpus(config.data, config.model.vocab_size)
    shown = list(show_samples(corpus, samples))
    step = "" if options.step is None else f"step {options.step}: "
    say(f"{step}samples {samples.start} ... {samples.stop - 1} of {options.config}")
    width = None if sys.stdout.isatty() else _WIDTH
    Console(width=width, highlight=False, markup=False).print(samples_table(shown))
    figures = {
        "step": options.step,
        "corpus": corpus.fingerprint,
        "seed": corpus.seed,
        "sequence_length": corpus.sequence_length,
        "samples": [asdict(sample) for sample in shown],
    }
    write_json(options, figures)
    return EXIT_DONE


def _samples_of_step(options: argparse.Namespace, config: RunConfig) -> range:
    if options.world_size is not None:
        config = load(options, device_type="cuda").config
    if config.train_batch_size is None and config.train_batch_size_schedule is None:
        raise ConfigError(
            [
                "the samples of a step depend on train_batch_size, which the file derives from the "
                "number of processes; add --world-size, or name samples with --samples A:B"
            ],
            where=str(options.config),
        )
    schedule = BatchSchedule.of(config.train_batch_size_schedule, config.train_batch_size)
    length = config.data.sequence_length
    *_, last = schedule.stretches(length, last_step=options.step)
    end = last.tokens // length + last.steps * last.batch
    return range(end - last.batch, end)


def _samples(text: str) -> range:
    """A:B on the command line."""
    try:
        first, stop = (int(part) for part in text.split(":"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be like 64:72, not {text!r}") from error
    if not 0 <= first < stop:
        raise argparse.ArgumentTypeError(f"A must be at least 0 and less than B, not {text!r}")
    return range(first, stop)


@dataclass(frozen=True)
class ShownSample:
    """One sample."""

    sample: int  # its index in the stream
    source: str  # the component it is drawn from, as the configuration names it
    component: int  # the component's number
    draw: int  # number of earlier samples from that component
    epoch: int  # the epoch of the component
    sequence: int  # the sequence's number within the component, counted over all its files
    file: str  # the file with its tokens
    first_token: int  # the index of its first token in that file
    ids: list[int]  # the S tokens and the target of the last one
    text: str | None  # the ids decoded; None if no tokenizer is known


def show_samples(corpus: PreparedCorpus, samples: Iterable[int]) -> Iterator[ShownSample]:
    """Yield the samples, in the given order."""
    order = TrainingOrder.of(corpus.train, corpus.seed, corpus.sequence_length)
    rows = Rows(corpus.train, corpus.sequence_length)
    tokenizer = None if corpus.tokenizer is None else load_tokenizer(str(corpus.tokenizer))
    for sample in samples:
        place = order.place_of(sample)
        component = corpus.train.components[place.component]
        file = component.files[place.file]
        ids: list[int] = rows.at(place).tolist()
        text = None
        if tokenizer is not None:
            text = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
        yield ShownSample(
            sample=sample,
            source=component.name,
            component=place.component,
            draw=place.draw,
            epoch=place.draw // order.sequences_of(place.component),
            sequence=place.sequence,
            file=str(file.path),
            first_token=file.first_token + place.first_token,
            ids=ids,
            text=text,
        )


def samples_table(samples: Iterable[ShownSample]) -> Table:
    """Return a row for each sample, with ids and text shortened."""
    table = Table(show_lines=True, expand=True)
    table.add_column("sample", justify="right")
    table.add_column("from", ratio=3)
    table.add_column("ids", ratio=3)
    table.add_column("text", ratio=5)
    for shown in samples:
        ids = " ".join(map(str, shown.ids[:_IDS_SHOWN]))
        if len(shown.ids) > _IDS_SHOWN:
            ids += f" ... ({len(shown.ids)} ids)"
        table.add_row(
            str(shown.sample),
            Text(
                f"{shown.source}\nepoch {shown.epoch}, sequence {shown.sequence:,}\n"
                f"token {shown.first_token:,} of {shown.file}",
                overflow="fold",
            ),
            Text(ids),
            Text("no tokenizer is known" if shown.text is None else _cut_text(shown.text)),
        )
    return table


def _cut_text(text: str) -> str:
    cut = text if len(text) <= _CHARACTERS_SHOWN else f"{text[:_CHARACTERS_SHOWN]} ..."
    # Replaces incomplete characters at an edge, and control codes that a terminal would execute.
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in cut)
