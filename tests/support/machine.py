"""How slow this machine is: the factor by which limits of time in tests are multiplied.

    product = seconds of 64 matrix products / 0.1 s
    start   = seconds to start and end Python with numpy / 0.08 s
    busy    = processor seconds of both / 0.18 s x (1 + waiting processes per processor / 4)
    factor  = the largest of 1, product, start, busy, but at most 20

Product and start contain whatever slows this machine now: its processors, the limit of a container,
other processes. Busy contains the other processes of the last minute. The process that runs pytest
measures once. Its workers and their ranks get the factor in an environment variable. A factor above
20 would make the tests that wait for a limit take hours.

At factor 1, the complete suite takes 16 minutes on two processors. Two processors of an AMD EPYC
(Zen 3, 2.4 GHz) that are shared with other programs have a factor of about 2.5 if they are idle.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

_PRODUCT_SECONDS, _START_SECONDS = 0.1, 0.08  # at factor 1
_PROCESSES = 4  # of a test run, for each processor
_TURNS = 3
_LARGEST = 20.0

_VARIABLE = "MEGASPEED_TEST_FACTOR"
_PROGRAM = """
import time
import numpy

matrix = numpy.ones((512, 512), numpy.float32)
matrix @ matrix
begin = time.perf_counter()
for _ in range(64):
    matrix @ matrix
print(time.perf_counter() - begin)
"""


def limit(seconds: float) -> float:
    """Return a limit of time for this machine, from the limit at factor 1."""
    return seconds * factor()


def factor() -> float:
    """Return the factor of this machine, from 1 to 20. The first call measures it."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = f"{_measure():.2f}"
    return float(os.environ[_VARIABLE])


def use_factor(measured: float) -> None:
    """Use the factor that another process has measured."""
    os.environ[_VARIABLE] = str(measured)


def factor_of(turns: Sequence[tuple[float, float]], used: float, load: float) -> float:
    """Return the factor, by the formulas above.

    Args:
        turns: the seconds of the products and of a process start. The fastest of each counts,
            because the first start reads files.
        used: processor seconds of a turn.
        load: other processes that want to run, for each processor.
    """
    products, starts = zip(*turns, strict=True)
    busy = used / (_PRODUCT_SECONDS + _START_SECONDS) * (1 + load / _PROCESSES)
    slowest = max(min(products) / _PRODUCT_SECONDS, min(starts) / _START_SECONDS, busy)
    return min(max(1.0, slowest), _LARGEST)


def _measure() -> float:
    load = os.getloadavg()[0] / (os.cpu_count() or 1)  # before the turns, which are load, too
    before = os.times()
    turns = [_take_turn() for _ in range(_TURNS)]
    after = os.times()
    used = after.children_user - before.children_user
    used += after.children_system - before.children_system
    return factor_of(turns, used / _TURNS, load)


def _take_turn() -> tuple[float, float]:
    """Return the seconds of 64 products on one thread, and of the start and end of the process."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    begin = time.perf_counter()
    command = [sys.executable, "-c", _PROGRAM]
    product = float(subprocess.check_output(command, env={**os.environ, **threads}))
    return product, time.perf_counter() - begin - product
