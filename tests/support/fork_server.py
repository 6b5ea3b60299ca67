"""The process that ranks and test programs are forked from. It has imported all that they use.

    python -m pytest -n 3 --start--> fork server --fork--> rank 0, rank 1, a launcher, ...
            |                             ^
            +--start--> worker 0, 1, 2 ---+ its address

By default, multiprocessing starts a fork server for each process that forks. The imports of a fork
server take seconds. Therefore, the workers of pytest-xdist and the programs that they start share
one here.
"""

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

IMPORTED_ONCE = [
    "tests.support.rank_worker",
    "torch._dynamo",
    "megaspeed.measurement.verification.verify",
    "megaspeed.doctor.examination",
    "megaspeed.planning.prediction",
    "megaspeed.measurement.compare",
    "megaspeed.job.pretrain",
    "megaspeed.job.supervisor",
    "matplotlib.backends.backend_agg",
    # DeepSpeed imports these at its first engine.
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    # These are small, but without this line every rank of every test imports them.
    "deepspeed.comm.mori",
    "encodings.idna",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "megaspeed.checkpoint.inspection",
    "matplotlib.figure",
    # A rank imports the test file that defines its function.
    "pytest",
    "tests.support.tiny",
    "tests.zero.one_rank",
    "torch.utils.serialization.config",
    "tests.support.frozen_imports",
]

# Ranks share the few cores of the machine. They see no GPU, so a test is the same on every machine.
RANK_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as in a run
}

_client: Any = forkserver._forkserver


def start_fork_server() -> str:
    """Start a fork server if this process has none. Return its address."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    with environment_with(RANK_VARIABLES):
        _client.ensure_running()
    address: str = _client._forkserver_address
    return address


def use_fork_server(address: str) -> None:
    """Make multiprocessing in this process use a fork server that another process started."""
    # A pipe of our own, which does not keep the server alive.
    if _client._forkserver_alive_fd is None:
        _, _client._forkserver_alive_fd = os.pipe()
    _client._forkserver_address = address
    _client.ensure_running = lambda: None


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
