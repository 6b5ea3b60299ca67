"""megaspeed pretrains GPT models on DeepSpeed with five parallel axes in any combination.

The axes are ``pp`` (pipeline), ``dp`` (data, with ZeRO stages 0 to 3), ``cp`` (context), ``tp``
(tensor) and ``ep`` (experts). Any layout of ranks trains the same model as one process.
``docs/architecture.md`` lists the folders, and follows one micro-batch from the loader to the
optimizer.

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
