"""Laws of the sources of `data.train` and `data.validation`."""

from collections.abc import Iterator

from megaspeed.config.data import Source
from megaspeed.config.rules.rule import Rule, rule
from megaspeed.config.run import RunConfig


@rule("data.train")
def training_weights_are_all_or_none(config: RunConfig) -> Iterator[str]:
    yield from _all_or_none("data.train", config.data.train_sources)


@rule("data.validation")
def validation_weights_are_all_or_none(config: RunConfig) -> Iterator[str]:
    yield from _all_or_none("data.validation", config.data.validation_sources or ())


def _all_or_none(setting: str, sources: tuple[Source, ...]) -> Iterator[str]:
    without = [index for index, source in enumerate(sources) if source.weight is None]
    if 0 < len(without) < len(sources):
        yield (
            f"{setting} must state a weight for all of its sources or for none, and states it for "
            f"{len(sources) - len(without)} of {len(sources)}; {setting}[{without[0]}] "
            f"({sources[without[0]]}) is the first without one"
        )


SOURCE_RULES: tuple[Rule[RunConfig], ...] = (
    training_weights_are_all_or_none,
    validation_weights_are_all_or_none,
)
