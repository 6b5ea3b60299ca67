"""Whether this CPU is much slower in bf16 than in fp32.

torch multiplies bf16 matrices with oneDNN, which needs AVX-512 on x86 and bf16 instructions on ARM.
On other CPUs torch has only a plain loop, which mostly uses one thread.
"""

import time
from collections.abc import Iterator

import torch

from megaspeed.config.run import RunConfig

_WIDTH, _ROUNDS = 320, 3  # 0.15 s on a CPU without the instructions, 0.01 s on others
_SLOW = 2.0


def bf16_warning(config: RunConfig, device: str) -> Iterator[str]:
    """Yield a warning with the measured factor and a fix if a run in bf16 is slow on this CPU.

    Nothing is measured if the run is not in bf16, or if ``device`` (a type or a name) is not "cpu".
    """
    if not config.bf16.enabled or device != "cpu":
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine hide the factor
    try:
        slowdown = _product_seconds(torch.bfloat16) / _product_seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)
    if slowdown > _SLOW:
        yield (
            f"bf16.enabled is true, but matrix products in bf16 take {slowdown:.0f} times as long "
            "as in fp32 on this CPU (measured with one thread); to train in fp32, "
            "--set bf16.enabled=false"
        )


def _product_seconds(dtype: torch.dtype) -> float:
    """Return the fewest processor seconds of a linear layer's forward and backward."""
    x, weight = torch.ones(2, _WIDTH, _WIDTH, dtype=dtype)
    times = []
    for _ in range(_ROUNDS):
        start = time.thread_time()  # not wall time: other processes may use this processor, too
        for a, b in ((x, weight.t()), (x, weight), (x.t(), weight)):
            torch.mm(a, b)
        times.append(time.thread_time() - start)
    return min(times)
