"""The grid of a run for a world size, which uses all processes or leaves some spare.

parallel.data   parallel.spare_ranks   grid
a number        false                  pipeline x data x tensor = world
"auto"          false                  data = world / (pipeline x tensor)
a number        true                   pipeline x data x tensor <= world
"auto"          true                   the largest data that fits the batch sizes
"""

from megaspeed.config.batch import StatedBatch, solve_batch
from megaspeed.config.degrees import World, grid_in
from megaspeed.config.run import RunConfig
from megaspeed.topology.grid import Grid


def layout_in(config: RunConfig, world: World) -> Grid | None:
    """The grid; None if there is none. With spare ranks, the batch sizes fit it, too."""
    parallel = config.parallel
    if not parallel.spare_ranks:
        return grid_in(parallel, world)
    stated = StatedBatch.of(config)
    most = world.size // (parallel.pipeline * parallel.tensor)
    degrees = range(most, 0, -1) if parallel.data == "auto" else [parallel.data]
    for dp in degrees:
        if dp <= most and solve_batch(stated, dp) is not None:
            return Grid(parallel.pipeline, dp, parallel.tensor)
    return None
