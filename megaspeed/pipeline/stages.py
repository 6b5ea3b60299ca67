"""What each pipeline stage of a run holds. Pure arithmetic, no torch."""

from functools import lru_cache

from megaspeed.config.resolve import Run
from megaspeed.model.flops import forward_flops_per_token
from megaspeed.model.parameters import logical_name, parameters_of
from megaspeed.pipeline.partition import partition_layers


def layers_of_stages(run: Run) -> list[range]:
    """The flat layers of each pipeline stage: the largest stage's forward operations are least."""
    costs = forward_flops_per_token(run.config.model, run.config.data.sequence_length)
    return list(_partition(tuple(costs), run.grid.pp))


@lru_cache(maxsize=1024)
def _partition(costs: tuple[float, ...], pipeline_stages: int) -> tuple[range, ...]:
    """A plan asks for the same split hundreds of times."""
    return tuple(partition_layers(costs, pipeline_stages))


def parameters_of_stages(run: Run) -> list[int]:
    """Logical parameters of each pipeline stage; a tied embedding counts where it is first used."""
    model = run.config.model
    return [
        sum(
            parameter.elements
            for name, parameter in parameters_of(model, layers).items()
            if 0 in layers or logical_name(model, name) == name
        )
        for layers in layers_of_stages(run)
    ]
