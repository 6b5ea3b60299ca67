"""``megaspeed show-batch``: the ids and the text that a run trains on at any step.

    megaspeed show-batch --config FILE --step 1000          the samples of that step
    megaspeed show-batch --config FILE --samples 64:72      samples 64 ... 71 of the stream

Nothing is replayed, because the tokens of a sample depend only on the data, the seed and its index.
"""

import argparse
from dataclasses import asdict
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    add_command,
    add_values,
    load,
    positive,
    say,
    wide_console,
    write_json,
)
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config


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
    # torch takes seconds to import, and wrong input should be reported without that delay.
    from megaspeed.data.batches import samples_table, show_samples
    from megaspeed.data.corpus import prepare_corpus

    config = read_config(options.config, options.overrides)
    samples = options.samples or _samples_of_step(options, config.train_batch_size)
    corpus = prepare_corpus(config.data, config.model.vocab_size)
    shown = list(show_samples(corpus, samples))
    step = "" if options.step is None else f"step {options.step}: "
    say(f"{step}samples {samples.start} ... {samples.stop - 1} of {options.config}")
    console = wide_console()
    console.print(samples_table(shown))
    write_json(
        options,
        {
            "step": options.step,
            "corpus": corpus.fingerprint,
            "seed": corpus.seed,
            "sequence_length": corpus.sequence_length,
            "samples": [asdict(sample) for sample in shown],
        },
    )
    return EXIT_DONE


def _samples_of_step(options: argparse.Namespace, train_batch_size: int | None) -> range:
    if options.world_size is not None:
        train_batch_size = load(options, device_type="cuda").batch.train_batch_size
    if train_batch_size is None:
        raise ConfigError(
            [
                "the samples of a step depend on train_batch_size, which the file derives from the "
                "number of processes; add --world-size, or name samples with --samples A:B"
            ],
            where=str(options.config),
        )
    return range((options.step - 1) * train_batch_size, options.step * train_batch_size)


def _samples(text: str) -> range:
    """A:B on the command line."""
    try:
        first, stop = (int(part) for part in text.split(":"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be like 64:72, not {text!r}") from error
    if not 0 <= first < stop:
        raise argparse.ArgumentTypeError(f"A must be at least 0 and less than B, not {text!r}")
    return range(first, stop)
