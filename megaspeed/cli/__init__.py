"""The ``megaspeed`` command. ``megaspeed --help`` lists its subcommands.

The file of a command is imported when the command is called, so every command, and every rank,
loads only what it needs. Its function ``add_to`` adds its commands.
Exit codes: 0 done, 1 the run or the check failed, 2 the input is wrong, 3 the run hung,
128 + the number of the signal that stopped the command (Ctrl-C: 130).
"""

import sys

try:
    import argparse
    import os
    import signal
    from collections.abc import Sequence
    from contextlib import nullcontext
    from importlib import import_module

    import megaspeed
    from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, say
    from megaspeed.config.document import with_config_option, with_hint
    from megaspeed.config.errors import ConfigError
    from megaspeed.data.errors import DataError
    from megaspeed.supervision.process_end import ended_on_termination
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.stderr.write("megaspeed: stopped\n")
    sys.exit(130)

FILES = {
    "train": "train",
    "check": "check",
    "verify": "verify",
    "compare": "measuring",
    "bench": "measuring",
    "scaling": "measuring",
    "report": "report",
    "compare-runs": "report",
    "plan": "plan",
    "schedule": "plan",
    "doctor": "doctor",
    "show-batch": "show_batch",
    "checkpoint": "checkpoint",
    "import-hf": "hugging_face",
    "export-hf": "hugging_face",
    "generate": "text_model",
    "evaluate": "text_model",
    "train-tokenizer": "train_tokenizer",
    "tokenize": "tokenize",
}
"""Command -> the file of this folder that adds it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    command = "megaspeed"
    try:
        options = parse(arguments)
        command += f" {options.command}"
        # A run saves after a signal.
        with nullcontext() if options.command == "train" else ended_on_termination():
            code: int = options.run(options)
    except (ConfigError, DataError) as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:  # a full disk, a folder that was deleted
        say(f"{command}: {error}", error=True)
        return EXIT_FAILED
    except KeyboardInterrupt as stop:
        say(f"{command}: stopped", error=True)
        return 128 + signal.Signals[str(stop) or "SIGINT"]
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. For ``train``, ``rest`` has those that the main job parses."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="megaspeed", description="3D-parallel GPT pretraining on DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=f"megaspeed {megaspeed.__version__}")
    # The deepspeed launcher puts this option before the command. The environment has the number.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    # If the first word is no command (an option, a mistake), all commands are listed.
    named = next((word for word in words if not word.startswith("--local")), "")
    for file in [FILES[named]] if named in FILES else dict.fromkeys(FILES.values()):
        import_module(f"megaspeed.cli.{file}").add_to(commands)
    if named in FILES and "--config CONFIG" in commands.choices[named].format_usage():
        first = words.index(named) + 1
        words = [*words[:first], *with_config_option(words[first:])]
    options, rest = parser.parse_known_args(words)
    if rest and options.command != "train":
        commands.choices[named].error(with_hint(f"unrecognized arguments: {' '.join(rest)}"))
    options.rest = with_config_option(rest)
    return options
