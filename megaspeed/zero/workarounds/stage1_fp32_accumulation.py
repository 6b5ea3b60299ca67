"""DeepSpeed 0.19.8, runtime/engine.py:2304-2310: bf16 parameters with fp32 gradient accumulation at
ZeRO-1 select ``BF16_Optimizer``, whose gradients live elsewhere, which has no
``coalesce_grad_reduction``, and whose norm masks other parameters than the other stages' do.

``DeepSpeedZeroOptimizer`` does the same job (it is chosen when the optimizer is offloaded), so the
choice is overruled and stages 1 and 2 are one code path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine


@contextmanager
def always_the_zero_optimizer() -> Iterator[None]:
    """An engine built within this block takes ``DeepSpeedZeroOptimizer`` for stages 1 and 2."""
    original = DeepSpeedEngine._do_optimizer_sanity_check

    def choose(engine: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        original(engine, basic_optimizer)
        return ZERO_OPTIMIZATION

    DeepSpeedEngine._do_optimizer_sanity_check = choose
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = original
