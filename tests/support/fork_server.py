"""The process that ranks and warm programs are forked from, with everything imported that they use.

    python -m pytest -n 3 --start--> fork server --fork--> rank 0, rank 1, a launcher, ...
            |                             ^
            +--start--> worker 0, 1, 2 ---+ its address

multiprocessing starts one for each process that forks. Here the workers of pytest-xdist and what is
forked for them share one, because its imports take seconds.
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
    "megaspeed.analysis.verification.verify",
    "megaspeed.analysis.doctor.examination",
    "megaspeed.analysis.planning.prediction",
    "megaspeed.analysis.watched_step",
    "megaspeed.training.pretrain",
    "megaspeed.training.restarts",
    "matplotlib.backends.backend_agg",
    # DeepSpeed imports these at its first engine.
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    # Small, but otherwise every rank of every test imports them.
    "deepspeed.comm.mori",
    "encodings.idna",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "megaspeed.checkpoint.inspection",
    "matplotlib.figure",
    # A rank imports the test file that its function is in.
    "pytest",
    "tests.support.tiny",
    "tests.zero.one_rank",
    "torch.utils.serialization.config",
    "tests.support.frozen_imports",
]

# Ranks share the machine's few cores, and see no GPU, so that a test is the same on every machine.
RANK_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as in a run
}

_client: Any = forkserver._forkserver


def start_fork_server() -> str:
    """The address of the fork server, which is started if this process knows of none."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    with environment_with(RANK_VARIABLES):
        _client.ensure_running()
    address: str = _client._forkserver_address
    return address


def use_fork_server(address: str) -> None:
    """Lets multiprocessing in this process fork from a server that another process has started."""
    if _client._forkserver_alive_fd is None:  # a pipe that the server's own end does not depend on
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
