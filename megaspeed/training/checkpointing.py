"""A run's checkpoints: what of this rank goes into one, and how the run goes on from one.

    engine's state fragments --owned parts--> pieces --Saver--> files
    files --every part, copies too--> pieces (views of the engine's state) --> the engine goes on

Written once, by its owner: a copy that another tensor rank, the other end of a tied embedding or
another data rank (ZeRO-0) counts is left out. Read by everyone who holds it.
"""

import dataclasses
import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from megaspeed import __version__
from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import CHECKPOINTS, CheckpointFolder
from megaspeed.checkpoint.loading import read_pieces
from megaspeed.checkpoint.pieces import HostCopy, Piece, pieces_of
from megaspeed.checkpoint.reader import saved_shapes
from megaspeed.checkpoint.run_state import (
    NOT_STATED,
    DataIdentity,
    Layout,
    LossScale,
    Progress,
    RunState,
)
from megaspeed.checkpoint.saving import Saver, SaveReport
from megaspeed.checkpoint.tensors import KINDS, expected_tensors, key, mismatches
from megaspeed.checkpoint.together import from_rank_0
from megaspeed.checkpoint.tokenizer_files import read_tokenizer_files
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.model.parameters import logical_name
from megaspeed.topology.process_settings import work_for
from megaspeed.training.carried_files import generation_file
from megaspeed.training.resumed_run import data_changes, go_on, model_changes
from megaspeed.training.worker import Worker

_PACKAGES = ("torch", "deepspeed")
_SECONDS_FOR_A_SAVE_AFTER_AN_EXCEPTION = 10.0


class Checkpointing:
    """Saves and loads one run. All ranks call every method but ``finished`` together.

    Args:
        worker: this rank of the run.
        corpus: the run's data, which a later run is compared with.
    """

    def __init__(self, worker: Worker, corpus: PreparedCorpus) -> None:
        self._worker = worker
        self._run: Run = worker.run
        self._data = data_identity(corpus)
        training = self._run.config.training
        self._saver = Saver(
            CheckpointFolder(self._run.run_dir / CHECKPOINTS),
            worker.context.checkpoint_group,
            keep_last=training.keep_last,
            expected=expected_tensors(self._run.config.model),
            # Read now: a cache may be emptied while the run goes on.
            beside=read_tokenizer_files(corpus.tokenizer if worker.context.rank == 0 else None),
        )
        self._host_copy = HostCopy()
        self._background: ThreadPoolExecutor | None = None
        if training.async_save:
            device = worker.context.device
            self._background = ThreadPoolExecutor(
                1, "checkpoint", initializer=work_for, initargs=(device,)
            )
        self._in_flight: Future[SaveReport] | None = None
        self._finished: list[SaveReport] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for a save that is under way.

        Meanwhile the other ranks' threads wait for this rank's, and the process groups must exist.
        After an exception it waits for 10 seconds at most, because the save never ends if another
        rank has failed too.
        """
        if error is None:
            self.close()
        elif self._in_flight is not None:
            wait([self._in_flight], timeout=_SECONDS_FOR_A_SAVE_AFTER_AN_EXCEPTION)

    def save(self, progress: Progress) -> None:
        """Saves the run as it stands between two steps.

        With ``training.async_save`` it waits for an earlier save that is still under way, enqueues
        the copies of the state to host memory, and returns. It does not wait for a GPU: the saving
        thread does.
        """
        start = time.perf_counter()
        state = self._state(progress)
        pieces = list(self._pieces(owned=True))
        if self._background is None:
            self._finished.append(self._saver.save(pieces, state))
            return
        self._wait()
        copies, wait_for_copies = self._host_copy.take(pieces)
        stall = time.perf_counter() - start

        def write() -> SaveReport:
            wait_for_copies()
            report = self._saver.save(copies, state)
            seconds = time.perf_counter() - start
            return dataclasses.replace(report, seconds=seconds, stall_seconds=stall)

        self._in_flight = self._background.submit(write)

    def finished(self) -> list[SaveReport]:
        """Saves that have ended since this was last asked; waits for nothing."""
        if self._in_flight is not None and self._in_flight.done():
            self._wait()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> list[SaveReport]:
        """Waits for a save that is under way; what ``finished`` would return then."""
        self._wait()
        return self.finished()

    def load(self, checkpoint: Path, *, allow_data_change: bool = False) -> Progress:
        """Makes this run go on from a checkpoint that is whole.

        From an imported model it begins: step 0, moments of zeros.

        Args:
            checkpoint: its folder.
            allow_data_change: take it although it was trained on other data.

        Raises:
            CheckpointError: on every rank, with everything in which the run does not fit.
        """
        group = self._saver.group
        saved = from_rank_0(group, lambda: self._fitting_state(checkpoint, allow_data_change))
        read_pieces(checkpoint, self._pieces(saved.kinds, owned=False), group)
        self._zero_moments_but(saved.kinds)
        kept = from_rank_0(group, lambda: generation_file(checkpoint, self._saver.beside))
        self._saver = dataclasses.replace(self._saver, beside={**self._saver.beside, **kept})
        self._worker.engine.take_state(saved.progress.steps_taken)
        if saved.loss_scale is not None:
            self._worker.engine.take_loss_scale(saved.loss_scale.model_dump())
        return go_on(saved, self._data)

    def _wait(self) -> None:
        if self._in_flight is not None:
            self._finished.append(self._in_flight.result())
            self._in_flight = None

    def _fitting_state(self, checkpoint: Path, allow_data_change: bool) -> RunState:
        saved = RunState.read(checkpoint)
        problems = model_changes(saved, self._run)
        expected = expected_tensors(self._run.config.model, saved.kinds)
        problems += mismatches(expected, saved_shapes(checkpoint))
        if saved.data is not None and not allow_data_change:
            problems += data_changes(saved.data, self._data)
        if problems:
            listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, start=1))
            raise CheckpointError(
                f"{checkpoint} ({saved.origin}) is not of this run (at "
                f"{layout_of(self._run)}):\n{listed}"
            )
        return saved

    def _state(self, progress: Progress) -> RunState:
        counters = self._worker.engine.loss_scale()
        return RunState(
            progress=progress,
            data=self._data,
            training_seed=self._run.config.training.seed,
            layout=layout_of(self._run),
            loss_scale=None if counters is None else LossScale.model_validate(counters),
            config=self._run.as_json(),
            software={
                "megaspeed": __version__,
                **{name: importlib.metadata.version(name) for name in _PACKAGES},
            },
        )

    def _zero_moments_but(self, read: Sequence[str]) -> None:
        """Of a kind that was not read, every element is as before the first step."""
        for fragment in self._worker.engine.state_fragments():
            for kind in KINDS:
                if kind not in read:
                    getattr(fragment, kind).zero_()

    def _pieces(self, kinds: Sequence[str] = KINDS, *, owned: bool) -> Iterator[Piece]:
        """What this rank writes (owned), or what it reads: everything it holds of these kinds."""
        worker = self._worker
        engine = worker.engine
        for fragment in engine.state_fragments():
            name = engine.names[fragment.parameter]
            shard = worker.shards[name]
            part = self._written_part(engine.owned_elements(fragment.parameter)) if owned else None
            for kind in kinds:
                yield from pieces_of(
                    key(kind, logical_name(self._run.config.model, name)),
                    shard,
                    fragment.start,
                    getattr(fragment, kind),
                    part=part,
                )

    def _written_part(self, owned_elements: int) -> range:
        """Of the leading elements that this rank counts, those that it writes.

        At ZeRO-0 every data rank holds all of them, and each writes its share.
        """
        if self._run.zero_stage > 0:
            return range(owned_elements)
        rank, ranks = self._worker.context.dp_rank, self._worker.context.dp_size
        return range(owned_elements * rank // ranks, owned_elements * (rank + 1) // ranks)


def data_identity(corpus: PreparedCorpus) -> DataIdentity:
    """What of the prepared data decides which tokens a sample is."""
    return DataIdentity(
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer_fingerprint or NOT_STATED,
        sequence_length=corpus.sequence_length,
        seed=corpus.seed,
    )


def layout_of(run: Run) -> Layout:
    """The layout of a run, as a checkpoint remembers it."""
    return Layout(
        pp=run.grid.pp,
        dp=run.grid.dp,
        tp=run.grid.tp,
        zero_stage=run.zero_stage,
        schedule=run.config.parallel.schedule,
        sequence_parallel=run.config.parallel.sequence_parallel,
        precision=run.precision,
    )
