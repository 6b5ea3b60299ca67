"""megaspeed pretrains GPT models on DeepSpeed with four parallel axes in any combination.

The axes are ``pp`` (pipeline), ``dp`` (data, with ZeRO stages 0 to 3), ``cp`` (context) and ``tp``
(tensor). Any layout of ranks trains the same model as one process. Each folder imports only from
the folders above it:

    version, units    the version; counts and bytes as people read them
    files/            files and folders that are complete or absent
    topology/         rank arithmetic, and the process groups of a rank

    config/           the JSON of a run, strictly checked
    model/            the GPT as plain torch.nn, and the table of its parameters
    tensor_parallel/  layers split over tp, and ``parallelize``, which puts them into the model
    pipeline/         the plan of the pipeline: schedules, their check, the executor
    data_axis/        the plan of the data axis: buckets of gradients, gathers, their check
    zero/             executes that plan with DeepSpeed
    planning/         predicts memory, traffic, step time and cost, without torch

    supervision/      what happens if a rank fails, hangs or is stopped
    data/             corpus, tokenizer, sampler, loader
    checked_run       loads the JSON of a run, and looks at its data
    checkpoint/       checkpoints that do not depend on the layout
    hugging_face/     models of transformers: import, export, generation, evaluation
    training/         the rank's model, optimizer groups, learning rate, the loop, metrics
    job/              the main job: starts, resumes, supervises and reports a run
    measurement/      trains to find something out: verify, compare, bench, scaling
    doctor/           checks whether a run can start
    reports/          compares the folders of runs, or shows them on one page
    cli/              the ``megaspeed`` command, a file for one to three subcommands

``docs/architecture.md`` follows one micro-batch from the loader to the optimizer.

Three functions do from Python what the commands do; ``megaspeed/api.py`` describes them. They are
loaded at their first use, so ``import megaspeed`` stays light.

    megaspeed.load_config("run.json", overrides={"training.steps": 10}).training.steps
    megaspeed.plan("run.json", world_size=8)["pipeline_stages"]
    megaspeed.train("run.json", world_size=2)
"""

from importlib import import_module
from typing import Any

from megaspeed.version import __version__

__all__ = ["__version__", "load_config", "plan", "train"]  # see __getattr__


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("megaspeed.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
