"""``megaspeed train``: starts a process for each rank on this machine, and trains.

    megaspeed train --config F                    a rank for each visible GPU; one on a CPU
    megaspeed train --config F --world-size 4     4 ranks
    srun megaspeed train --config F               one rank, because srun has started all of them

Ranks are started by torch's launcher, which torchrun uses, too. The process that starts them
forwards stop signals to them, prints nothing, and ends with the exit code of the first rank that
failed. So what a rank reports is the last thing on the console.
"""

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, load, world_size
from megaspeed.config.document import add_config_options, with_config_option
from megaspeed.config.errors import ConfigError
from megaspeed.supervision.process_end import (
    STOP_SIGNALS,
    end_process,
    end_with_parent,
    launcher_processes,
)
from megaspeed.topology.grid import TopologyError
from megaspeed.topology.launch import LaunchError, read_launch_environment

# torch reads it when it is imported. Without it, every rank prints dozens of lines about its
# connection to the store when a job ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_STOPPED = "MEGASPEED_STOPPED"
"""The variable with the stop signal after which torch's launcher must not restart ranks."""
_STARTER = "MEGASPEED_STARTER"
"""The variable with the process number of the command that has started this rank."""


def add_to(commands: Any) -> None:
    """Add the command. All options but ``--world-size`` are those of the main job."""
    # The main job's own parser prints the help, too. It needs torch, so it is not used here.
    text = "start a process for each rank on this machine, and train"
    parser = commands.add_parser("train", help=text, add_help=False)
    parser.set_defaults(run=run)
    parser.add_argument("--world-size", type=world_size)


def run(options: argparse.Namespace) -> int:
    """Start the ranks. If this process is a rank already, or the only one, it trains instead."""
    arguments, ranks = options.rest, options.world_size
    try:
        launch = read_launch_environment(os.environ)
    except LaunchError:
        return train_rank(arguments, as_command=True)  # it reports the error
    launched = launch.source != "single process"
    if launched and ranks not in (None, launch.world_size):
        raise ConfigError(
            [
                f"--world-size is {ranks}, but another launcher has started {launch.world_size} "
                f"processes ({launch.source}); omit --world-size"
            ],
            "the command line",
        )
    if launched or {"-h", "--help"} & set(arguments):
        return train_rank(arguments, as_command=True)
    if ranks is None:
        import torch

        ranks = max(1, torch.cuda.device_count())
    if ranks == 1:
        return train_rank(arguments, as_command=True)
    end_process(_start(arguments, ranks))  # the interpreter would take a second to shut torch down


def train_rank(arguments: Sequence[str] | None = None, *, as_command: bool = False) -> NoReturn:
    """Train one rank, and end this process.

    Args:
        arguments: the command line of the main job; this process's own if omitted.
        as_command: whether messages and help name ``megaspeed train``.
    """
    if _STOPPED in os.environ:
        sys.exit(128 + int(os.environ[_STOPPED]))
    starter = os.environ.pop(_STARTER, None)  # a supervisor's child must not inherit it
    if starter is not None:
        end_with_parent(int(starter))
    words = with_config_option(sys.argv[1:] if arguments is None else arguments)
    gc.disable()  # the objects that imports make live as long as the process
    launchers = launcher_processes()  # one that ends while torch is loaded would not be found later
    from megaspeed.job.supervisor import run_supervised
    from megaspeed.supervision.process_end import keep_output_open

    def train() -> int:
        # Imported here, because a supervisor does not need them.
        from megaspeed.job.pretrain import main

        gc.freeze()
        gc.enable()
        return main(words, as_command=as_command, launchers=launchers)

    keep_output_open()
    try:
        # This calls ``train`` here, unless the configuration makes this process a supervisor.
        code = run_supervised(train, words, by_megaspeed=starter is not None)
    except KeyboardInterrupt:  # before the ranks are connected
        code = 128 + signal.SIGINT
    end_process(code)


def _start(arguments: Sequence[str], ranks: int) -> int:
    """Start the ranks and wait for them. Return the exit code of the first that failed.

    Raises:
        ConfigError: the configuration is wrong, so no rank is started.
    """
    parser = argparse.ArgumentParser("megaspeed train", add_help=False)
    add_config_options(parser)
    options, _ = parser.parse_known_args(arguments, argparse.Namespace(world_size=ranks))
    import psutil
    import torch
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megaspeed.topology.process_settings import allow_open_files

    run = load(options, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        allow_open_files(0, ranks)  # torch's launcher needs some, and shows its stack
    except TopologyError as error:
        raise ConfigError([str(error)], "this machine") from error
    logging.disable(logging.CRITICAL)  # torch's launcher logs what the ranks have reported
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does

    def forward(number: int, frame: FrameType | None) -> None:
        os.environ[_STOPPED] = str(number)
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, forward)
    logs = tempfile.TemporaryDirectory(prefix="megaspeed-")  # torch would not remove its own
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=run.config.training.restart if run.stated is None else 0,
        logs_specs=DefaultLogsSpecs(log_dir=logs.name),
        signals_to_handle="SIGQUIT",  # by default it would end the ranks 30 s after a stop signal
    )
    os.environ[_STARTER] = str(os.getpid())
    command = ("-u", "-m", "megaspeed.cli", "train", *arguments)
    try:
        with logs:
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return next((each.exitcode for each in failures if each.exitcode > 0), EXIT_FAILED)
    except SignalException as error:
        return 128 + error.sigval.value
    return EXIT_DONE
