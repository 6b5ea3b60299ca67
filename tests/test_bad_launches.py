"""Bad input under a launcher of two ranks: one message in total, and the launch ends soon."""

import os
import resource
import sys
from pathlib import Path

import pytest

from megaspeed.config.document import merge
from tests.config.workshop import Workshop
from tests.support.forked import Forked
from tests.support.launched import free_port, launch
from tests.support.machine import limit

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "pretrain.py"
MOST_SECONDS = limit(15)
"""The limit of a launch with a core for each rank."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "megaspeed": [sys.executable, "-m", "megaspeed.cli", "train", "--world-size", "2"],
}
TIMES = {"forked": 1, "torchrun": 2, "megaspeed": 1}
"""How often a message is printed. torchrun repeats it at the end of its page about the failure."""

MISTAKES = {
    "an unknown key": ("forked", "1 problem in "),
    "a wrong --set": ("forked", "1 problem in "),
    "a small vocabulary": ("forked", "1 problem in "),
    "a model that is no file": ("megaspeed", "1 problem in "),
}
"""Mistake -> (launcher, the message that is reported once)."""


def options_with(mistake: str, workshop: Workshop) -> list[str]:
    """Return the options of a launch with this mistake."""
    values = {
        "an unknown key": merge(workshop.good, {"model": {"hiden_size": 3}}),
        "a small vocabulary": merge(
            workshop.with_data(tokenizer=str(workshop.tokenizer)), {"model": {"vocab_size": 100}}
        ),
        "a model that is no file": workshop.with_model(workshop.folder / "nothing"),
    }
    options = ["--config", str(workshop.write(values.get(mistake, workshop.good)))]
    return [*options, *(["--set", "training.steps"] if mistake == "a wrong --set" else [])]


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def launched(launcher: str, folder: Path, *options: str) -> str:
    """Launch a command that must end by itself, with a bad exit code and without a traceback.

    Return what it writes to its standard error.
    """
    folder.mkdir()
    before = processor_seconds()
    if launcher == "forked":  # tests/test_launchers.py launches deepspeed in this way
        out, err = folder / "out", folder / "err"
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MEGASPEED_CACHE": f"{folder}/cache"}
        code = Forked([SCRIPT, *options], folder, variables, out, err, ranks=2).wait(120)
        said, reported = out.read_text(), err.read_text()
    else:
        torchrun = ["--master-port", str(free_port()), str(SCRIPT)]
        start = [*LAUNCHERS[launcher], *(torchrun if launcher == "torchrun" else [])]
        ended = launch([*start, *options], folder, folder / "runs")
        code, said, reported = ended.code, ended.out, ended.err
        # Two ranks share two cores, so the launch takes half of this time.
        assert (processor_seconds() - before) / 2 < MOST_SECONDS
    assert code == (1 if launcher == "torchrun" else 2), said + reported
    # torchrun prints a traceback with its own files. .venv may be in the root folder.
    for part in ("megaspeed", "scripts"):
        assert f'File "{ROOT / part}' not in said + reported, reported
    assert not (folder / "runs").exists() and not (folder / "cache").exists()
    return reported


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_once_under_a_launcher(
    mistake: str, workshop: Workshop, tmp_path: Path
) -> None:
    launcher, message = MISTAKES[mistake]
    options = options_with(mistake, workshop)
    reported = launched(launcher, tmp_path / "launch", *options)
    assert reported.count(message) == TIMES[launcher], reported
    assert "[rank" not in reported, "rank 0 reports what all ranks have"


def test_a_pipe_as_configuration_holds_no_launcher_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reported = launched("forked", tmp_path / "launch", "--config", str(pipe))
    assert reported.count(f"{pipe} is a named pipe; name a JSON file") == 1


@pytest.mark.parametrize("launcher", ["torchrun", "forked"])
def test_a_wrong_option_is_reported_once(launcher: str, tmp_path: Path) -> None:
    wrong = ("--resum", "auto", "x")
    reported = launched(launcher, tmp_path / "launch", "--config", "a.json", *wrong)
    assert reported.count("error: unrecognized arguments: x") == TIMES[launcher]


def test_launchers_that_disagree_are_reported_once(
    tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "16")
    reported = launched("forked", tmp_path / "launch", "--config", str(workshop.write({})))
    message = "the world size is 2 from RANK/WORLD_SIZE, but SLURM_NTASKS=16"
    assert reported.count(message) == TIMES["forked"]
