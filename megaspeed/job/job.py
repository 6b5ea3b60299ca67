"""Trains a run on all its ranks: from the corpus to the summary.

    corpus -> process groups -> check inputs and folder -> find the checkpoint
        -> model and its state -> run folder -> training -> loss curve and summary

Earlier files in the run folder are moved only after the checkpoint, if any, has been loaded.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from megaspeed.bar_or_lines import BarOrLines
from megaspeed.checked_run import find_data_problems
from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import METRICS
from megaspeed.checkpoint.run_state import NOT_STATED, Progress
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.data.background import Tokenization
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.errors import DataError, StreamEnded, raise_any
from megaspeed.data.prompts import read_prompts
from megaspeed.job.console import (
    ConsoleObserver,
    banner,
    crowding,
    describe_corpus,
    describe_save,
    describe_start,
    print_folded,
    print_line,
    print_warning,
    show_preparation,
    summary_table,
)
from megaspeed.job.reporting import Reporting, draw_loss_curve
from megaspeed.job.resume import AUTO, Restarts, ResumeOptions, Start, find_start
from megaspeed.job.run_folder import (
    LOSS_CURVE,
    PARTS,
    RunFolderLost,
    check_shared_folder,
    checkpoint_folder,
    continue_run_folder,
    run_lock,
    start_run_folder,
)
from megaspeed.planning.micro_batch import Choice, choose_micro_batch
from megaspeed.supervision.answers import RankFailed, broadcast, gather
from megaspeed.supervision.failure import RankLog
from megaspeed.supervision.meeting import Meeting, RanksDisagree
from megaspeed.supervision.process_end import StopSignal
from megaspeed.supervision.watch import Watch
from megaspeed.topology.activity import SAVE_TIMEOUTS, START_UP_TIMEOUTS, Activity
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.devices import Device, device_by_name
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.compilation import CannotCompile
from megaspeed.training.metrics import MetricsFile, device_name
from megaspeed.training.replicas import ReplicasDiffer
from megaspeed.training.trainer import Observer, Trainer, TrainingDiverged, TrainingSummary
from megaspeed.training.worker import Worker
from megaspeed.zero.engine import ZeroEngine

STOPPED = (RanksDisagree, CannotCompile, TrainingDiverged, ReplicasDiffer, StreamEnded)
"""Exceptions that all ranks raise, with a message for the user."""

EXPECTED = (*STOPPED, RankFailed, RunFolderLost, OSError)
"""Exceptions with a message for the user. Any other is reported here, with its traceback."""

_COLLECTIVE_TIMEOUT_SECONDS = 1800.0
"""The minimum timeout of collectives. If a run hangs, the watch usually ends it much earlier."""

_SECONDS_TO_WAIT_FOR_LOCK = 120.0
"""How long a restart waits for the lock of the run folder.

A network file system may keep the lock of a dead host for 90 s.
"""

_WITHOUT_LIMIT = timedelta(days=100)
_SECONDS_FOR_RANK_0 = 1.0

_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|ALLOC_FAILED")


def check_agreement(corpus: PreparedCorpus, context: ParallelContext) -> None:
    """Check that all ranks have the same texts and tokenizer; a collective over all ranks.

    Each node reads its own files. If they differed, ranks would train on different text, or hang in
    a collective that the others do not call. Raises RanksDisagree on every rank. The message names
    what differs and on which ranks.
    """
    validation = None if corpus.validation is None else corpus.validation.fingerprint
    own = {
        "the training text (data.train)": corpus.fingerprint,
        "the validation text (data.validation)": validation,
        "the tokenizer (data.tokenizer)": corpus.tokenizer_fingerprint or NOT_STATED,
        "what tokenizes streams (versions)": str(sorted(s.folder.name for s in corpus.streams)),
    }
    by_rank: list[dict[str, str | None]] = [{} for _ in range(context.grid.world_size)]
    dist.all_gather_object(by_rank, own, context.world_group)
    differing = [
        f"{what} of ranks {ranks} differs from rank 0's"
        for what in own
        if (ranks := [r for r, other in enumerate(by_rank) if other[what] != by_rank[0][what]])
    ]
    if differing:
        raise RanksDisagree(
            f"All ranks must train on the same input, but {'; '.join(differing)}. "
            "Give every node the same files, byte for byte."
        )


def choose_together(
    run: Run, context: ParallelContext, local_ranks: int, at_most: int | None
) -> Choice:
    """Choose the micro-batch for the device with the least memory; a collective over all ranks.

    The ranks of a CPU share the memory of their host.
    """
    group, kind, name = context.checkpoint_group, context.device.type, device_name(context.device)
    memory = psutil.virtual_memory().total // local_ranks
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(context.device).total_memory
    memories = gather(group, lambda: memory)
    known = device_by_name(name) or Device(name=name, memory_bytes=0)
    device = broadcast(group, lambda: dataclasses.replace(known, memory_bytes=min(memories)))
    return choose_micro_batch(run, kind, device, local_ranks, at_most)


@dataclass(kw_only=True)
class Job:
    """One rank's part of a run."""

    run: Run  # the resolved configuration
    config_file: str  # its path
    options: ResumeOptions  # the options of the command line about resuming
    meeting: Meeting  # the ranks of this run
    activity: Activity  # what this rank is doing, for the watch
    stop: StopSignal  # the stop signals that this process has received
    console: Console  # quiet on all ranks but rank 0
    launchers: Sequence[int]  # process numbers of the launchers above this process
    log: RankLog = field(init=False)  # this rank's log file
    watch: Watch = field(init=False)  # watches the other ranks
    tokenization: Tokenization = field(init=False)  # of streams, while this rank trains
    choice: Choice | None = None  # of the micro-batch, if its size is "auto"
    opened: bool = False  # whether this start has opened the run folder

    def __post_init__(self) -> None:
        self.log = RankLog(self.run.run_dir, self.meeting.launch.rank)
        self.watch = Watch(
            self.meeting,
            self.run.grid,
            self.activity,
            self.stop,
            self.log,
            launchers=self.launchers,
            hang_timeout_seconds=self.run.config.training.hang_timeout_seconds,
        )

    def train(self) -> TrainingSummary | None:
        """Train the run; all its ranks call this.

        Returns how the run ended; None if nothing was left to train. Then no file has changed. An
        exception that is not in ``EXPECTED`` is reported before it propagates.
        """
        run, during = self.run, self.activity.during
        with during("preparing the corpus", timeouts=math.inf):
            start = time.perf_counter()
            corpus = self._prepare_corpus()
            print_folded(self.console, describe_corpus(corpus, time.perf_counter() - start))
        with during("creating the process groups", timeouts=START_UP_TIMEOUTS):
            hang_timeout = run.config.training.hang_timeout_seconds
            context = ParallelContext.create(
                run.grid,
                self.meeting.launch,
                timeout_seconds=max(
                    _COLLECTIVE_TIMEOUT_SECONDS, 2 * START_UP_TIMEOUTS * hang_timeout
                ),
                store=self.meeting.store,
                activity=self.activity,
            )
        kind = context.device.type
        streams = [*corpus.streams] if self.meeting.launch.local_rank == 0 else []
        with (
            context,
            self.watch.failures.reported(expected=EXPECTED),
            Tokenization(streams) as self.tokenization,
        ):
            summary = self._train_in(context, corpus)
            if summary is not None and summary.failure is not None:
                with during("the loss curve", timeouts=math.inf):
                    # The others wait for rank 0, because launchers end all ranks if one fails.
                    broadcast(context.checkpoint_group, lambda: self._print_summary(summary, kind))
                raise summary.failure
        if summary is not None and context.rank == 0:
            with during("the loss curve", timeouts=math.inf):
                self._print_summary(summary, kind)
        return summary

    def _prepare_corpus(self) -> PreparedCorpus:
        """Prepare the corpus, and wait until all ranks have it.

        Rank 0 takes the lock of its cache first. Then the first rank of each other host begins,
        because it may have another cache. The other ranks wait for the first rank of their host.
        """
        launch, store, config = self.meeting.launch, self.meeting.store, self.run.config
        first = min([launch.rank, *(other.rank for other in self.meeting.local_ranks)])
        begun, ready = "rank 0 prepares the corpus", f"corpus of rank {first}"
        lost = suppress(RuntimeError)  # the store may be gone

        def progress(phase: str, done: int, total: int) -> None:
            if launch.rank == 0:
                with lost:
                    store.set(begun, phase)  # now that it holds the lock
            show_preparation(bar, phase, done, total)

        if launch.rank != 0:
            with lost:
                store.wait([begun if launch.rank == first else ready], _WITHOUT_LIMIT)
        try:
            if config.training.sample_prompts:  # now, because the preparation may take long
                raise_any(find_data_problems(config))
            with BarOrLines(0, quiet=self.console.quiet) as bar:
                bar.show(0, "preparing the corpus")
                corpus = prepare_corpus(
                    config.data,
                    config.model.vocab_size,
                    reports_waits=launch.rank == 0,
                    progress=progress,
                )
            read_prompts(config.training, corpus.tokenizer, corpus.sequence_length)
        except DataError as error:
            if launch.rank != 0:  # rank 0 probably has the same error, and reports it first
                time.sleep(_SECONDS_FOR_RANK_0)
            problems = [*find_data_problems(config), *error.problems]
            raise ConfigError([*dict.fromkeys(problems)], self.config_file) from error
        finally:  # also after an error, so that the others do not wait
            with lost:
                if launch.rank == 0:
                    store.set(begun, "")
                if launch.rank == first:
                    store.set(ready, "")
        with lost:  # the process groups wait for less long
            if store.add("ranks with a corpus", 1) == launch.world_size:
                store.set("all have a corpus", "")
            store.wait(["all have a corpus"], _WITHOUT_LIMIT)
        return corpus

    def _train_in(self, context: ParallelContext, corpus: PreparedCorpus) -> TrainingSummary | None:
        restarts = Restarts(self.meeting)
        if self.run.stated is not None:
            local_ranks = self.meeting.launch.local_world_size
            self.choice = choose_together(self.run, context, local_ranks, restarts.smaller_size)
            self.run = self.choice.run
        run, during, group = self.run, self.activity.during, context.checkpoint_group
        with during("comparing the ranks", timeouts=START_UP_TIMEOUTS):
            check_agreement(corpus, context)
            check_shared_folder(run.run_dir, context)
        self.log.open()
        waited = _SECONDS_TO_WAIT_FOR_LOCK if restarts.number else 0.0
        with run_lock(run.run_dir, context, wait_seconds=waited) as check_folder:
            options = self.options
            if broadcast(
                group, lambda: restarts.opened and bool(checkpoint_folder(run).newest_first())
            ):
                options = dataclasses.replace(options, source=AUTO, fresh=False)
            with during("checking checkpoints", timeouts=SAVE_TIMEOUTS):
                start = find_start(options, run, context)
                run = self.run = dataclasses.replace(run, steps=start.last_step or run.steps)
            for line in (*restarts.describe(start.step), *describe_start(start, run)):
                print_line(self.console, line)
            if start.is_end_of(run):
                return None
            if not self.console.quiet:
                for part in banner(run, context.device, start):
                    print_folded(self.console, part)
                if self.choice is not None:
                    print_folded(self.console, self.choice.sentence)
            with (
                during("building the model", timeouts=START_UP_TIMEOUTS),
                self._memory_explained(context, None),
            ):
                worker = Worker(run, context)
            if worker.uncompiled_reason is not None:
                reason = (
                    f"not compiled, because torch.compile cannot work: {worker.uncompiled_reason}"
                )
                print_line(self.console, Text(reason))
            with (
                Checkpointing(worker, corpus) as checkpointing,
                # Again, because ``Checkpointing`` waits for a pending save when it closes.
                self.watch.failures.reported(expected=EXPECTED),
                self._memory_explained(context, worker.engine),
            ):
                begin = self._begin(start, options, checkpointing, context)
                restarts.note_opened()
                self.opened = True
                return self._train_from(begin, worker, corpus, checkpointing, check_folder)

    @contextmanager
    def _memory_explained(
        self, context: ParallelContext, engine: ZeroEngine | None
    ) -> Iterator[None]:
        """Add an explanation to an exception if its cause is that memory ran out."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            is_memory = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error))
            smaller = None if self.choice is None else self.choice.smaller
            is_first_step = self.activity.steps == 0 and str(self.activity).startswith("step ")
            if is_memory and smaller is not None and is_first_step:
                error.add_note(Restarts(self.meeting).back_off(smaller))
            if is_memory:
                with suppress(Exception):  # there may be no memory for an explanation either
                    from megaspeed.measurement.watched_step import explain_out_of_memory

                    error.add_note(explain_out_of_memory(self.run, context, engine))
            raise

    def _begin(
        self,
        start: Start,
        options: ResumeOptions,
        checkpointing: Checkpointing,
        context: ParallelContext,
    ) -> Progress:
        """Load the checkpoint, if there is one, and open the run folder."""
        begin = Progress()
        if start.checkpoint is not None:
            with self.activity.during(f"loading {start.checkpoint}", timeouts=SAVE_TIMEOUTS):
                begin = checkpointing.load(
                    start.checkpoint,
                    allow_data_change=options.allow_data_change,
                    allow_optimizer_change=options.allow_optimizer_change,
                )
        broadcast(
            context.checkpoint_group, lambda: self._open_run_folder(start, context), CheckpointError
        )
        if start.checkpoint is not None and not start.in_place:
            # Otherwise a run that fails before its first save would restart at step 0.
            with self.activity.during("saving the first checkpoint", timeouts=SAVE_TIMEOUTS):
                checkpointing.save(begin)
                for report in checkpointing.close():
                    print_line(self.console, describe_save(report))
        return begin

    def _open_run_folder(self, start: Start, context: ParallelContext) -> None:
        moved, device = None, device_name(context.device)
        if start.in_place:
            moved = continue_run_folder(self.run, start.step, device)
            what = f"the records after step {start.step}"
        else:
            moved, what = start_run_folder(self.run, device), "an earlier run's files"
        if moved is not None:
            print_line(self.console, Text(f"{what} are now in {moved}"))

    def _train_from(
        self,
        begin: Progress,
        worker: Worker,
        corpus: PreparedCorpus,
        checkpointing: Checkpointing,
        check_folder: Callable[[], object],
    ) -> TrainingSummary:
        run, stop, failed = self.run, self.stop, self.tokenization.failure
        if worker.context.rank != 0:
            return Trainer(worker, corpus, checkpointing, stop, Observer(), failed).train(begin)
        crowded = crowding(worker.context.device.type, self.meeting.launch.local_world_size)
        with (
            Reporting(run, begin.step, partial(print_warning, self.console)) as reporting,
            MetricsFile(run.run_dir / METRICS) as metrics,
            MetricsFile(run.run_dir / PARTS) as parts,
        ):
            records = (metrics.write, reporting.write)
            observer = ConsoleObserver(
                run, self.console, records, parts.write, begin, crowded, check_folder
            )
            return Trainer(worker, corpus, checkpointing, stop, observer, failed).train(begin)

    def _print_summary(self, summary: TrainingSummary, device_type: str) -> None:
        """Draw the loss curve, and print the last figures."""
        metrics, picture = self.run.run_dir / METRICS, self.run.run_dir / LOSS_CURVE
        files = f"metrics: {metrics}   loss curve: {picture}"
        try:
            draw_loss_curve(metrics, picture, title=self.run.name)
        except Exception as error:  # a failure to draw does not fail the run
            print_warning(
                self.console, f"the loss curve could not be drawn: {type(error).__name__}: {error}"
            )
            files = f"metrics: {metrics}"
        if summary.profile is not None:
            print_line(self.console, Text(summary.profile))
        self.console.print(summary_table(self.run, summary, device_type))
        print_line(self.console, Text(files))
