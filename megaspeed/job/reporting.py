"""Reports the numbers of ``metrics.jsonl`` to TensorBoard and Weights & Biases; the loss curve.

    observer --write--> queue --(one thread for each service)--> event files, W&B

A slow or failed service does not slow training: ``write`` never waits, a full queue drops records,
and a service that raises an exception is dropped with one warning. ``metrics.jsonl`` still has
everything. Only rank 0 reports and draws.
"""

import dataclasses
import functools
import html
import importlib.util
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.run import ReportTo
from megaspeed.files.json_values import read_records
from megaspeed.job.run_folder import TENSORBOARD, WANDB
from megaspeed.training.metrics import Metrics, PartMetrics, SampleMetrics

CLOSING_SECONDS = 30.0
"""How long a run waits at its end until its services have received all records."""

_CLOSING_SECONDS_OF_A_FAILURE = 5.0

_WAITING_RECORDS = 10_000

ServiceRecord = tuple[int, Mapping[str, float | str]]
"""The step of a record, and its numbers and samples by name. Both services show HTML."""

ServiceRecords = Iterator[ServiceRecord]
"""All records. Ends at the end of the run."""

Service = Callable[[Run, int, ServiceRecords], None]
"""Sends all records of a run that starts or resumes at a step; called in a separate thread."""


def write_tensorboard(run: Run, begin: int, records: ServiceRecords) -> None:
    """Write event files to ``tensorboard/`` in the run folder.

    TensorBoard hides records of steps after ``begin`` that an earlier start has written.
    """
    # Imported here, because the import takes a second and most runs do not need it.
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run.run_dir / TENSORBOARD), purge_step=begin + 1) as writer:
        for step, values in records:
            for name, value in values.items():
                add = writer.add_text if isinstance(value, str) else writer.add_scalar
                add(name, value, step)


def log_to_wandb(run: Run, begin: int, records: ServiceRecords) -> None:
    """Log a W&B run. W&B's environment variables (``WANDB_PROJECT``, ...) have their usual effect.

    A resumed run continues the same W&B run: its id is stored in the run folder.
    """
    import wandb

    offline = os.environ.get("WANDB_MODE", "online") != "online"
    if not offline and not wandb.login(prompt=False):
        raise RuntimeError(
            "there are no credentials: call `wandb login`, or set WANDB_MODE=offline and upload "
            "later with `wandb sync`"
        )
    folder = run.run_dir / WANDB
    folder.mkdir(exist_ok=True)
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "megaspeed"),
        name=os.environ.get("WANDB_NAME", run.name),
        id=os.environ.get("WANDB_RUN_ID") or _stored_id(folder / "run_id"),
        dir=str(run.run_dir),
        config=run.as_json(),
        resume="allow",
        settings=wandb.Settings(
            console="off",  # otherwise it would replace the standard output of this process
            silent=True,
            init_timeout=CLOSING_SECONDS,
            finish_timeout=CLOSING_SECONDS / 2,
        ),
    ) as logged:
        # Not wandb's own step counter: it drops the steps that a resumed run repeats.
        logged.define_metric("*", step_metric="step")
        for step, values in records:
            texts = {k: wandb.Html(text) for k, text in values.items() if isinstance(text, str)}
            logged.log({"step": step, **values, **texts})


def _stored_id(file: Path) -> str:
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return file.read_text(encoding="utf-8")


SERVICES: Mapping[ReportTo, Service] = {"tensorboard": write_tensorboard, "wandb": log_to_wandb}


def check_packages(run: Run) -> None:
    """Raise ConfigError if ``training.report_to`` names a service whose package is missing."""
    problems = [
        f"training.report_to names {name!r}, but the Python package {name} is not installed; "
        f"install it with: pip install {name}"
        for name in run.config.training.report_to
        if importlib.util.find_spec(name) is None
    ]
    if problems:
        raise ConfigError(problems, where=run.name)


class Reporting:
    """Sends each record to every service that ``training.report_to`` names."""

    def __init__(
        self,
        run: Run,
        step: int,
        warn: Callable[[str], None],
        services: Mapping[ReportTo, Service] = SERVICES,
    ) -> None:
        self._warn = warn
        self._closing = threading.Event()
        self._slow: set[ReportTo] = set()  # the services whose queue was full
        self._senders: dict[ReportTo, tuple[threading.Thread, queue.Queue[ServiceRecord]]] = {}
        for name in dict.fromkeys(run.config.training.report_to):
            waiting: queue.Queue[ServiceRecord] = queue.Queue(_WAITING_RECORDS)
            send = functools.partial(services[name], run, step)
            # A daemon thread, so a service that hangs does not keep the process alive.
            thread = threading.Thread(target=self._send, args=(name, send, waiting), daemon=True)
            self._senders[name] = thread, waiting
            thread.start()

    def write(self, metrics: Metrics) -> None:
        """Queue one record; never waits."""
        if self._senders and not isinstance(metrics, PartMetrics):
            values: dict[str, float | str] = dict(_numbers(dataclasses.asdict(metrics)))
            if isinstance(metrics, SampleMetrics):
                texts = (html.escape(prompt + text) for prompt, text in metrics.samples)
                values = {f"samples/{n}": f"<pre>{text}</pre>" for n, text in enumerate(texts)}
            for name, (thread, waiting) in self._senders.items():
                # A service that failed has a warning already.
                if waiting.full() and thread.is_alive():
                    self._slow.add(name)
                elif not waiting.full():
                    waiting.put_nowait((metrics.step, values))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        seconds = CLOSING_SECONDS if kind is None else _CLOSING_SECONDS_OF_A_FAILURE
        deadline = time.monotonic() + seconds
        self._closing.set()
        for name, (thread, _) in self._senders.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() or name in self._slow:
                self._warn(f"{name} was too slow for all records; metrics.jsonl has all")

    def _send(
        self,
        name: str,
        send: Callable[[ServiceRecords], None],
        waiting: "queue.Queue[ServiceRecord]",
    ) -> None:
        try:
            send(self._until_closed(waiting))
        except (Exception, SystemExit) as error:
            self._warn(
                f"{name} receives no more records of this run; training continues, and "
                f"metrics.jsonl has all: {type(error).__name__}: {error}"
            )

    def _until_closed(self, waiting: "queue.Queue[ServiceRecord]") -> ServiceRecords:
        while True:
            try:
                yield waiting.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set():
                    return


def _numbers(record: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield the finite numbers of a record by name, without the step; one for each list element."""
    for name, value in record.items():
        values = value if isinstance(value, list) else [value]
        for index, number in enumerate(values):
            if name != "step" and isinstance(number, int | float) and math.isfinite(number):
                yield (f"{name}/{index}" if isinstance(value, list) else name), float(number)


def smoothed(values: Sequence[float], n: int) -> list[float]:
    """Return the mean of each value and of up to ``n`` values before it and after it."""
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - n), min(len(values), i + n + 1)) for i in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in ends]


def draw_loss_curve(metrics_file: Path, picture: Path, *, title: str) -> None:
    """Draw the loss curve of a run: training and validation losses over tokens.

    The training loss is also drawn smoothed: as the mean of a tenth of the steps around each.

    Lines that are no records, and validations whose step is not recorded, are skipped.
    """
    # Imported here, because the import takes long and only the end of a run needs it.
    from matplotlib.figure import Figure

    tokens: dict[int, int] = {}  # by step
    losses: dict[str, list[tuple[int, float]]] = {"loss": [], "validation_loss": []}
    for record in read_records(metrics_file):
        if record is None or "step" not in record:
            continue
        step = record["step"]
        if "tokens" in record:
            tokens[step] = record["tokens"]
        for name, points in losses.items():
            if step in tokens and record.get(name) is not None:
                points.append((tokens[step], record[name]))

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    training, validation = ([*zip(*each, strict=True)] or [(), ()] for each in losses.values())
    n = len(losses["loss"]) // 20
    axes.plot(*training, lw=0.8, alpha=0.4, label="training")
    smooth = smoothed(training[1], n)
    axes.plot(training[0], smooth, color="C0", label=f"training, mean of {1 + 2 * n} steps")
    axes.plot(*validation, "o-", color="C1", lw=1, label="validation")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a "$" in the run's name is no formula
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
