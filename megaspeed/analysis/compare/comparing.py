"""Row after row: launches each variant, and goes on however one of them ends."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megaspeed.analysis.compare.launching import RowFailed, run_task
from megaspeed.analysis.compare.rank_record import Task
from megaspeed.analysis.compare.result import Row, finished_row, predict_stages
from megaspeed.analysis.compare.variants import Variant
from megaspeed.data.corpus import PreparedCorpus

LOGS = "logs"


def run_variants(
    variants: Sequence[Variant],
    corpus: PreparedCorpus,
    *,
    steps: int,
    device_type: str,
    folder: Path,
    timeout_seconds: float,
    on_row: Callable[[Variant], None] = lambda variant: None,
) -> Iterator[Row]:
    """Trains every variant, one after the other; each row as soon as it is there.

    Args:
        variants: in the order of the rows.
        corpus: what they train on.
        steps: optimizer steps whose time is taken, at least 2; the first one warms up.
        device_type: "cpu" or "cuda".
        folder: an existing folder; what the ranks print goes to a file for each row in its
            ``logs``.
        timeout_seconds: how long one row may take.
        on_row: told of each variant before it starts.
    """
    # All before the first launch: formulas take no time, and a mistake in them must not lose rows.
    predictions = [predict_stages(variant, device_type) for variant in variants]
    for variant, predicted in zip(variants, predictions, strict=True):
        on_row(variant)
        if variant.run is None:
            yield Row(variant=variant)
            continue
        task = Task(
            engine=variant.engine,
            run=variant.run,
            corpus=corpus,
            steps=steps,
            device_type=device_type,
            timeout_seconds=timeout_seconds,
        )
        log = _log_of(variant, folder)
        try:
            with tempfile.TemporaryDirectory(prefix="megaspeed-compare-") as exchange:
                records = run_task(task, Path(exchange), log, timeout_seconds=timeout_seconds)
        except RowFailed as failure:
            yield Row(variant=variant, reason=f"{failure}; see {log}")
        else:
            yield finished_row(variant, records, predicted)


def _log_of(variant: Variant, folder: Path) -> Path:
    logs = folder / LOGS
    logs.mkdir(exist_ok=True)
    return logs / f"{variant.label.lower().replace(' ', '-')}.log"
