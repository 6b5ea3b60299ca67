"""What every test may ask for."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.fork_server import start_fork_server, use_fork_server

if TYPE_CHECKING:
    from tests.support.rank_pool import RankPool

# The same examples at every run. `--hypothesis-profile=default` draws others.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,  # other processes may take the processors
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Starts the fork server, once for all workers of pytest-xdist."""
    node.workerinput["fork_server"] = start_fork_server()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        use_fork_server(config.workerinput["fork_server"])
    # torch looks up the name of every address that it connects to, for its logs, and waits 5 s for
    # a name server that does not answer. One second is enough, and then torch gives up on names.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # What a shell starts in the background ignores Ctrl-C, and so does all that is started there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # And `nohup` ignores the end of the terminal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()


def pytest_collection_finish() -> None:
    """Lets the garbage collector ignore all objects that imports have made."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start ranks, so that `make quick` leaves them out."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")


@pytest.fixture(scope="session")
def pool() -> "Iterator[RankPool]":
    """Eight rank processes for the whole session; see `tests/support/rank_pool.py`."""
    from tests.support.rank_pool import RankPool  # here, so that xdist itself imports no torch

    with RankPool(size=8) as ranks:
        yield ranks


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Ranks share the cores with this process; threads that wait for each other would spin."""
    import torch

    torch.set_num_threads(1)
