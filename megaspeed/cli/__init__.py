"""The ``megaspeed`` command.

    megaspeed train    --config FILE [--world-size N]     trains, with one process for each rank
    megaspeed check    --config FILE [--world-size N]     every mistake in a configuration, at once
    megaspeed verify   --config FILE --world-size N       these degrees against one plain process
    megaspeed schedule --config FILE --world-size N       the pipeline's timetable, as a grid
    megaspeed compare  --config FILE --world-size N       the ZeRO stages, trained side by side
    megaspeed report RUN...                               one HTML page of one or several runs
    megaspeed compare-runs A B                            the first step where two runs differ
    megaspeed plan     --config FILE --world-size N       memory, traffic and rank map, worked out
    megaspeed doctor   --config FILE                      can a run start here; checks all ranks
    megaspeed show-batch --config FILE --step K           the ids and the text of any step
    megaspeed checkpoint show|verify DIR                  what checkpoints hold; are they whole
    megaspeed import-hf DIR OUT                           a Hugging Face model to start a run from
    megaspeed export-hf CHECKPOINT OUT                    a checkpoint as a Hugging Face model
    megaspeed generate --checkpoint DIR --prompt TEXT     some continuations of prompts
    megaspeed evaluate --checkpoint DIR INPUT...          loss, perplexity and bits per byte of text
    megaspeed train-tokenizer FILE... --output DIR        a byte-level BPE for your text
    megaspeed tokenize FILE... --output DIR               text of any size to files of tokens

Each file of this folder that has ``add_to`` adds one or two commands and what they do.
Exit codes: 0 done, 1 the run or the check failed, 2 the input is wrong, 3 the run hung.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import megaspeed

try:
    from megaspeed.cli import (
        check,
        checkpoint,
        compare,
        doctor,
        evaluate,
        generate,
        hugging_face,
        plan,
        report,
        show_batch,
        tokenize,
        train,
        train_tokenizer,
        verify,
    )
    from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, say
    from megaspeed.config.errors import ConfigError
    from megaspeed.data.errors import DataError
except KeyboardInterrupt:  # Ctrl-C in the seconds that this takes
    sys.exit("megaspeed: stopped")

COMMANDS = (
    train,
    check,
    verify,
    compare,
    report,
    plan,
    doctor,
    show_batch,
    checkpoint,
    hugging_face,
    generate,
    evaluate,
    train_tokenizer,
    tokenize,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = parse(arguments)
    try:
        code: int = options.run(options)
    except (ConfigError, DataError) as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:  # a full disk, a folder that has gone
        say(f"megaspeed {options.command}: {error}", error=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(f"megaspeed {options.command}: stopped", error=True)
        return EXIT_FAILED
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megaspeed", description="3D-parallel GPT pretraining on DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=f"megaspeed {megaspeed.__version__}")
    # The deepspeed launcher passes it before the command; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for command in COMMANDS:
        command.add_to(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":  # whose other options the main job parses
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options
