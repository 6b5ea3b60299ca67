"""``train_micro_batch_size_per_gpu`` "auto": the largest micro-batch that is predicted to fit.

    sizes that divide the samples of a data rank     1   2   4   8   16
    predicted to fit                                 *   *   *            -> 4
    the first step runs out of memory                                     -> 2, once

``config.layout`` decides which size is the largest one to try.
"""

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import divisors
from megaspeed.planning.costs.reserved_memory import reserved_memory
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import MICRO_BATCH
from megaspeed.topology.devices import Device
from megaspeed.units import readable_memory


class Choice(NamedTuple):
    """The run with the chosen size, the next smaller size if any, and a line for the banner."""

    run: Run
    smaller: int | None
    sentence: str


def choose_micro_batch(
    run: Run, device_type: str, device: Device, gpus_per_node: int, at_most: int | None = None
) -> Choice:
    """Choose the largest size up to ``at_most`` that fits the device; the smallest if none does.

    ``run`` is resolved with the largest size that may be chosen.
    """
    assert run.stated is not None, "the size is auto"
    world = World(run.grid.world_size + run.spare_ranks, "the launch", device_type)
    samples = run.batch.micro_batch_size * run.batch.gradient_accumulation_steps
    most, memory = at_most or run.batch.micro_batch_size, device.memory_bytes
    sizes = [size for size in reversed(divisors(samples)) if size <= most]
    for size in sizes:
        with suppress(ConfigError):
            stated = run.stated.changed({MICRO_BATCH: size})
            chosen = resolve_run(stated, world, name=run.name)
            chosen = replace(chosen, notes=run.notes, load_factor=run.load_factor)
            peak = predict(chosen, device_type).fullest.peak_bytes
            needed = peak + reserved_memory(chosen, device, gpus_per_node, peak).most
            if needed <= memory:
                break
    size = chosen.batch.micro_batch_size
    smaller = next((each for each in sizes if each < size), None)
    why = "the largest size that fits" if needed <= memory else "although no size fits"
    why += "" if at_most is None else ", after a larger one ran out of memory"
    numbers = f"at most {readable_memory(needed)} of {readable_memory(memory)} predicted"
    return Choice(chosen, smaller, f"micro-batch auto: {size:,}, {why}; {numbers}")
