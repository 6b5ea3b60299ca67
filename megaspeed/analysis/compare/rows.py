"""Makes the rows of a comparison, and starts and ends the processes of each row.

    ZeRO-0, ZeRO-1    one row: gradients are reduced once a step
    ZeRO-2, ZeRO-3    two rows if a step has several micro-batches: reducing after each of them
                      takes less memory, reducing once sends less
    DDP, FSDP2        DDP reduces once a step; FSDP2 has the same two rows as ZeRO-3

    compare --> deepspeed's runner --> deepspeed's launch --> rank 0, rank 1, ...
                \\_____________ one process group of the operating system __________/

If the row ends, takes too long, or Ctrl-C is pressed, the complete process group is ended.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from megaspeed.analysis.compare.rank_program import Baseline, RankFailure, Task
from megaspeed.analysis.compare.result import Engine, RankRecord, Row, StageBytes
from megaspeed.analysis.costs.stage_memory import predict_memory
from megaspeed.analysis.costs.traffic import predict_traffic
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import GradientReduction, Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import free_port

_SECONDS_TO_END = 5.0
_KILLED = re.compile(r"exits with return code = -(\d+)")
# Variables of a launcher that has started this process. They do not apply to the ranks of a row.
_OTHER_LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|SLURM_NTASKS|SLURM_PROCID|SLURM_LOCALID|SLURM_STEP_ID"
)


class RowFailed(RuntimeError):
    """The training of a row did not finish. The text states why."""


def zero_rows(run: Run, zero_stages: Sequence[int], device_type: str) -> list[Row]:
    """One row for each ZeRO stage, or two if ``gradient_reduction`` makes a difference.

    Args:
        run: the layout, the model and the batch, which all rows share.
        zero_stages: of 0, 1, 2, 3.
        device_type: "cpu" or "cuda".
    """
    return [
        _row(run, "zero", f"ZeRO-{stage}", stage, reduction, device_type)
        for stage in sorted(set(zero_stages))
        for reduction in _reductions(run, stage)
    ]


def baseline_rows(run: Run, baselines: Sequence[Baseline], device_type: str) -> list[Row]:
    """The rows of torch's own data parallelism: DDP, then FSDP2.

    Raises:
        ConfigError: they cannot train this run.
    """
    if not baselines:
        return []
    problems = []
    if run.grid.pp > 1 or run.grid.tp > 1:
        problems.append(
            "DDP and FSDP2 have only a data axis, and this layout has parallel.pipeline "
            f"{run.grid.pp} and parallel.tensor {run.grid.tp}; set both to 1, or omit --baselines"
        )
    if run.precision == "fp16":
        problems.append(
            "DDP and FSDP2 are run without a loss scale, and fp16.enabled is true; set "
            "bf16.enabled instead, or omit --baselines"
        )
    if problems:
        raise ConfigError(problems, where=f"{run.name} with --baselines {' '.join(baselines)}")
    rows = []
    if "ddp" in baselines:
        # DDP keeps complete gradients, so it would gain nothing by reducing more than once.
        rows.append(_row(run, "ddp", "DDP", run.zero_stage, None, device_type))
    if "fsdp" in baselines:
        for reduction in _reductions(run, 3):
            rows.append(_row(run, "fsdp", "FSDP2", run.zero_stage, reduction, device_type))
    return rows


def _reductions(run: Run, zero_stage: int) -> tuple[GradientReduction | None, ...]:
    """The settings that differ at this ZeRO stage; (None,) if they do not."""
    several = run.batch.gradient_accumulation_steps > 1 and run.grid.dp > 1
    return ("per_micro_batch", "per_step") if zero_stage >= 2 and several else (None,)


def _row(
    run: Run,
    engine: Engine,
    name: str,
    zero_stage: int,
    reduction: GradientReduction | None,
    device_type: str,
) -> Row:
    """A row for ``run`` at this ZeRO stage. Without ``reduction``, it reduces once a step."""
    label = name if reduction is None else f"{name} {reduction}"
    config = run.config
    zero = config.zero_optimization.model_copy(update={"stage": zero_stage})
    parallel = config.parallel.model_copy(update={"gradient_reduction": reduction or "per_step"})
    try:
        resolved = resolve_run(
            config.model_copy(update={"zero_optimization": zero, "parallel": parallel}),
            name=run.name,
            world_size=run.grid.world_size,
            world_source="--world-size",
            device_type=device_type,
        )
    except ConfigError as error:
        return Row(label=label, engine=engine, run=None, reason=" ".join(error.problems))
    predicted = _predict(resolved, device_type) if engine == "zero" else None
    return Row(label=label, engine=engine, run=resolved, predicted=predicted)


def _predict(run: Run, device_type: str) -> list[StageBytes]:
    stages = range(run.grid.pp)
    memory = [predict_memory(run, stage, device_type=device_type) for stage in stages]
    return [
        StageBytes(
            states=memory[stage].states,
            peak=memory[stage].peak,
            traffic=predict_traffic(run, stage),
        )
        for stage in stages
    ]


def train_rows(
    rows: Sequence[Row],
    corpus: PreparedCorpus,
    *,
    steps: int,
    device_type: str,
    folder: Path,
    timeout_seconds: float,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Iterator[Row]:
    """Train the rows, one after the other. Yields each with its figures or a reason of failure.

    Args:
        rows: from ``zero_rows`` and ``baseline_rows``.
        corpus: the prepared training data.
        steps: number of optimizer steps whose time is measured, at least 2. The first warms up.
        device_type: "cpu" or "cuda".
        folder: an existing folder. The output of each row's ranks goes to a file in its ``logs``.
        timeout_seconds: time limit of one row.
        on_row: called with each row before it starts.
    """
    for row in rows:
        on_row(row)
        if row.run is None:
            yield row
            continue
        task = Task(
            engine=row.engine,
            run=row.run,
            corpus=corpus,
            steps=steps,
            device_type=device_type,
            timeout_seconds=timeout_seconds,
        )
        log = folder / "logs" / f"{row.label.lower().replace(' ', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix="megaspeed-compare-") as exchange:
                records = _launch(task, Path(exchange), log)
        except RowFailed as failure:
            yield replace(row, reason=f"{failure}; see {log}")
        else:
            yield replace(row, ranks=records)


def _launch(task: Task, folder: Path, log: Path) -> list[RankRecord]:
    """Train ``task`` with one process of this machine for each rank. Returns the records by rank.

    Raises:
        RowFailed: a rank failed or was killed, or the time limit was exceeded.
    """
    (folder / "task").write_bytes(pickle.dumps(task))
    with log.open("w") as output, ended_on_termination():
        process = subprocess.Popen(
            _command(task, folder),
            env=_environment(task.device_type),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            in_time = _wait(process, task.timeout_seconds)
        finally:
            _end_all(process)
    files = [folder / f"rank{rank}" for rank in range(task.run.grid.world_size)]
    outcomes = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    records = [outcome for outcome in outcomes if isinstance(outcome, RankRecord)]
    if len(records) == len(files):
        return records
    failures = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
    raise RowFailed(_reason(failures, log, None if in_time else task.timeout_seconds))


def _command(task: Task, folder: Path) -> list[str]:
    world_size = task.run.grid.world_size
    devices = ["--num_accelerators", str(world_size)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if task.device_type == "cuda" and all(index.strip().isdigit() for index in visible):
        # Without this, the launcher takes GPUs 0 to N - 1, even if the variable names others.
        devices = ["--include", f"localhost:{','.join(visible[:world_size])}"]
    return [
        # The program `deepspeed` of this environment, independent of PATH.
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", str(folder / "no hostfile")),  # none: this machine alone
        *devices,
        *("--master_port", str(free_port())),
        *("--no_local_rank", "--module", "megaspeed.analysis.compare.rank_program", str(folder)),
    ]


def _environment(device_type: str) -> Mapping[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not _OTHER_LAUNCHERS.fullmatch(k)}
    if device_type == "cpu":
        # Ranks share the cores. By default, torch would start a thread for every core in each rank.
        inherited.setdefault("OMP_NUM_THREADS", "1")
        inherited["CUDA_VISIBLE_DEVICES"] = ""
    return inherited


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float) -> bool:
    """Whether the process ended within that time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_seconds)
        return True
    return False


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, if it still runs, and all processes that it has started."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            _wait(process, _SECONDS_TO_END)
    finally:  # also if a second Ctrl-C interrupts the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_on_termination() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that they end all started processes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(failures: list[RankFailure], log: Path, timeout_seconds: float | None) -> str:
    """The reason of the first failure. Others often fail only because one rank has ended."""
    if failures:
        first = min(failures, key=lambda failure: (not failure.out_of_memory, failure.at_seconds))
        what = "out of memory: " if first.out_of_memory else ""
        return f"{what}{first.reason}"
    if timeout_seconds is not None:
        return f"not done after {timeout_seconds:g} s; --timeout sets the time limit of a row"
    killed = _KILLED.search(log.read_text(errors="replace"))
    if killed is None:
        return "the launcher ended before the ranks did"
    number = int(killed[1])
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cause = ", as the system does if memory runs out" if number == signal.SIGKILL else ""
    return f"a rank was killed by {name}{cause}"
