"""The Python API: ``megaspeed.load_config``, ``megaspeed.plan`` and ``megaspeed.train``.

``examples/api.py`` shows how to use it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run, read_config
from megaspeed.config.resolve import default_run_dir
from megaspeed.config.run import RunConfig

Overrides = Mapping[str, Any] | Sequence[str]
"""Changes of keys: ``{"training.steps": 10}``, or as for ``--set``: ``["training.steps=10"]``.

A value of a mapping may be a mapping itself, which changes only the keys that it has.
"""


def load_config(path: str | os.PathLike[str], overrides: Overrides = ()) -> RunConfig:
    """Read a JSON file, with the files that it extends, and check it.

    Raises:
        ConfigError: with all mistakes that can be seen without the number of processes.
    """
    return read_config(_file(path), _as_settings(overrides))


def plan(
    path: str | os.PathLike[str],
    *,
    world_size: int,
    overrides: Overrides = (),
    device: str | None = None,
    cluster: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the figures of ``megaspeed plan --json``: layers, memory, traffic and time.

    No process is started.

    Args:
        path: the JSON file of the run.
        world_size: number of processes of the run.
        overrides: changes of single keys.
        device: an accelerator such as ``"h100-80gb"``. If omitted: no times and no verdict.
        cluster: other options of the machines that ``megaspeed plan`` has, such as ``"nic_gbps"``.

    Raises:
        ConfigError: with all mistakes in the configuration or in the cluster.
    """
    from megaspeed.files.json_values import json_value
    from megaspeed.planning.cluster import CPU, read_cluster
    from megaspeed.planning.forecast import complete_training
    from megaspeed.planning.plan import plan
    from megaspeed.planning.variants import Training

    path, settings = _file(path), _as_settings(overrides)
    stated = {} if device is None else {"device": device}
    machines = read_cluster({**(cluster or {}), **stated})
    machines.ranks(world_size)
    if machines.device == CPU:
        problem = "only the command megaspeed plan measures the device cpu; name an accelerator"
        raise ConfigError([problem], "the cluster")
    run = load_run(path, settings, World(world_size, "world_size", "cuda"))
    training = Training(run=run, stated=read_config(path, settings))
    planned = plan(training, machines.cluster(), machines.gpus_per_node)
    figures: dict[str, Any] = planned.as_json()
    if planned.forecast is not None:
        figures["training"] = json_value(complete_training(planned.forecast, machines))
    return figures


def train(
    path: str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    world_size: int | None = None,
    resume: str | os.PathLike[str] = "auto",
    fresh: bool = False,
) -> Path:
    """Train a run to its last step. Prints what ``megaspeed train`` prints.

    Call it from the main thread. Ctrl-C, or the interrupt of a notebook, saves a checkpoint and
    ends the training, and the function returns.

    Args:
        path: the JSON file of the run.
        overrides: changes of single keys.
        world_size: number of processes to start on this machine. If omitted, this process trains
            alone, or as one rank of the launcher that has started it.
        resume: ``"auto"``, ``"never"``, or a checkpoint, as for ``--resume``.
        fresh: whether to move the files of an earlier run away first, as with ``--fresh``.

    Returns:
        The folder of the run, with ``metrics.jsonl``, ``loss.png`` and ``checkpoints/``.

    Raises:
        ConfigError: with all mistakes that can be seen without the number of processes.
        RuntimeError: the training failed, or its input is wrong. The reason is printed.
    """
    config = load_config(path, overrides)
    arguments = ["--config", os.fspath(path), "--resume", os.fspath(resume)]
    arguments += ["--fresh"] if fresh else []
    settings = _as_settings(overrides)
    arguments += ["--set", *settings] if settings else []
    if world_size is None:
        from megaspeed.job.pretrain import main

        code = main(arguments)
    else:
        command = [sys.executable, "-m", "megaspeed.cli", "train", "--world-size", str(world_size)]
        with subprocess.Popen([*command, *arguments]) as launcher:
            try:
                code = launcher.wait()
            except KeyboardInterrupt:
                launcher.send_signal(signal.SIGINT)
                code = launcher.wait()
    if code != 0:
        raise RuntimeError(f"the training of {path} ended with exit code {code}; see above")
    return Path(config.training.run_dir or default_run_dir(Path(path).stem))


def _file(path: str | os.PathLike[str]) -> Path:
    if isinstance(path, Mapping):
        raise TypeError("name the path of a JSON file, not a dict; write it to a file first")
    return Path(path)


def _as_settings(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    return list(overrides)
