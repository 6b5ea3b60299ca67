"""Fixtures and hooks of all tests."""

import gc
import math
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.fork_server import start_fork_server, use_fork_server
from tests.support.machine import factor, limit, use_factor
from tests.support.slots import slot, slots_file, spread
from tests.support.summary import print_summary

if TYPE_CHECKING:
    from tests.support.rank_pool import RankPool

# Use the same examples in every run. ``--hypothesis-profile=default`` draws others.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,  # other processes may use the processors
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "with workers of pytest-xdist: how many tests run at once, besides those that wait"
    parser.addoption("--computing", type=int, metavar="NUMBER", help=how)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Measure the machine and start the fork server, once for all workers of pytest-xdist."""
    node.workerinput["slots"] = slots_file().name
    node.workerinput["factor"] = factor()
    node.workerinput["fork_server"] = start_fork_server()


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout, which then uses the scaled limit
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        use_factor(config.workerinput["factor"])
        use_fork_server(config.workerinput["fork_server"])
    if config.option.timeout is None:
        config.option.timeout = math.ceil(limit(float(config.getini("timeout"))))
    # torch looks up the name of every address that it connects to, for its logs. If a name server
    # does not answer, torch waits 5 s. One second is enough, and then torch stops looking up names.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # A process that a shell starts in the background ignores Ctrl-C, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # ``nohup`` makes a process ignore the end of its terminal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()


def pytest_report_header() -> str:
    return f"machine: limits of time are multiplied by {factor():.2f} (tests/support/machine.py)"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    print_summary(terminalreporter)


def pytest_collection_finish() -> None:
    """Make the garbage collector ignore all objects that imports have created."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout starts to count
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    worker: dict[str, Any] = getattr(item.config, "workerinput", {})
    number = item.config.option.computing
    needs_one = "slots" in worker and number is not None and not _waits(item)
    with slot(Path(worker["slots"]), number) if needs_one else nullcontext():
        return (yield)


def _waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("waits") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks, so ``make quick`` can omit them. Scale limits for hangs."""
    if config.option.computing is not None:
        items[:] = spread(items, _waits, lambda item: item.nodeid.partition("::")[0])
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
        if (marker := item.get_closest_marker("timeout")) is not None:
            item.add_marker(pytest.mark.timeout(limit(marker.args[0])), append=False)


@pytest.fixture(scope="session")
def pool() -> "Iterator[RankPool]":
    """Return eight rank processes for the complete session. See ``tests/support/rank_pool.py``."""
    # Imported here, so that xdist itself does not import torch.
    from tests.support.rank_pool import RankPool

    with RankPool(size=8) as ranks:
        yield ranks


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Ranks share the cores with this process. Threads that wait for each other would spin."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _time_to_examine_files() -> None:
    """A check stops looking at files after 2.5 s. On a slow machine, it needs longer for a few."""
    from megaspeed import checked_run

    checked_run._LONGEST_SECONDS = limit(checked_run._LONGEST_SECONDS)
