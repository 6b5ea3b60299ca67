"""Saves and loads the checkpoints of a run.

    engine's state fragments --owned parts--> pieces --Saver--> files
    files --all parts--> pieces (views of the engine's state) --> the engine continues

Exactly one rank, the owner, writes each element. Every rank that holds a copy reads it. There are
copies of parameters that tensor ranks share, and of a tied embedding. Replicas hold copies of all.

A checkpoint also has the run's tokenizer, and the generation_config.json of an imported model.
"""

import dataclasses
import importlib.metadata
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import (
    CHECKPOINTS,
    GENERATION,
    TOKENIZER,
    CheckpointFolder,
    read_tokenizer_files,
)
from megaspeed.checkpoint.run_state import (
    NOT_STATED,
    DataIdentity,
    Layout,
    LossScale,
    Progress,
    RunState,
)
from megaspeed.checkpoint.tensors import (
    FACTOR,
    FEEDBACK,
    HostCopy,
    Piece,
    compression_tensors,
    expected_tensors,
    key,
    kinds_of,
    mismatches,
    pieces_of,
)
from megaspeed.checkpoint.writing import Saver, SaveReport
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, logical_name, parameter_named
from megaspeed.supervision.answers import broadcast
from megaspeed.topology.process_settings import use_device
from megaspeed.training.resumed_run import (
    data_changes,
    model_changes,
    optimizer_changes,
    resumed_progress,
)
from megaspeed.training.worker import Worker
from megaspeed.version import __version__

_PACKAGES = ("torch", "deepspeed")
_SECONDS_FOR_A_SAVE_AFTER_AN_EXCEPTION = 10.0


class Checkpointing:
    """Saves and loads one run. All ranks call every method except ``finished`` together."""

    def __init__(self, worker: Worker, corpus: PreparedCorpus) -> None:
        self._worker = worker
        self._run: Run = worker.run
        self._data = data_identity(corpus)
        model, training = self._run.config.model, self._run.config.training
        self._saver = Saver(
            CheckpointFolder(self._run.run_dir / CHECKPOINTS),
            worker.context.checkpoint_group,
            keep_last=training.keep_last,
            keep_every=training.keep_every,
            expected=expected_tensors(model, self._run.config.optimizer.type)
            | compression_tensors(model, self._run.compression, self._run.grid),
            # Read now, because the cache may be emptied while the run continues.
            beside=read_tokenizer_files(corpus.tokenizer if worker.context.rank == 0 else None),
        )
        self._host_copy = HostCopy()
        self._background: ThreadPoolExecutor | None = None
        if training.async_save:
            device = worker.context.device
            self._background = ThreadPoolExecutor(
                1, "checkpoint", initializer=use_device, initargs=(device,)
            )
        self._in_flight: Future[SaveReport] | None = None
        self._finished: list[SaveReport] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for a save that is in progress.

        The process groups must exist until the save has ended, because the saving threads of the
        ranks wait for each other. After an exception, this waits for at most 10 seconds, because
        the save never ends if another rank has failed too.
        """
        if error is None:
            self.close()
        elif self._in_flight is not None:
            wait([self._in_flight], timeout=_SECONDS_FOR_A_SAVE_AFTER_AN_EXCEPTION)

    def save(self, progress: Progress) -> None:
        """Save the state of the run between two steps.

        With ``training.async_save``, this waits for an earlier save, enqueues the copies of the
        state to host memory, and returns. Only the saving thread waits for the GPU.
        """
        start = time.perf_counter()
        state = self._state(progress)
        pieces = [*self._pieces(state.optimizer, owned=True), *_compression_pieces(self._worker)]
        pieces += self._bias_pieces(owned=True)
        if self._background is None:
            self._finished.append(self._saver.save(pieces, state))
            return
        self._wait()  # the save before still reads the host memory that the copies overwrite
        copies, wait_for_copies = self._host_copy.take(pieces)
        stall = time.perf_counter() - start

        def write() -> SaveReport:
            wait_for_copies()
            report = self._saver.save(copies, state)
            seconds = time.perf_counter() - start
            return dataclasses.replace(report, seconds=seconds, stall_seconds=stall)

        self._in_flight = self._background.submit(write)

    def finished(self) -> list[SaveReport]:
        """Report of the saves that have ended since the last call. Does not wait."""
        if self._in_flight is not None and self._in_flight.done():
            self._wait()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> list[SaveReport]:
        """Wait for a save that is in progress, then return what ``finished`` returns."""
        self._wait()
        return self.finished()

    def load(
        self,
        checkpoint: Path,
        *,
        allow_data_change: bool = False,
        allow_optimizer_change: bool = False,
    ) -> Progress:
        """Load a complete checkpoint, so that the run continues from it.

        A run that loads an imported model starts at step 0. Optimizer state that the checkpoint
        does not have starts at zero.
        Raises CheckpointError on every rank; lists all differences that prevent the run from
        continuing.
        """
        from megaspeed.checkpoint.reading import read_pieces  # takes a second, see reading.py

        group = self._saver.group
        saved = broadcast(
            group,
            lambda: self._fitting_state(checkpoint, allow_data_change, allow_optimizer_change),
            CheckpointError,
        )
        for fragment in self._worker.engine.state_fragments():
            for values in fragment.tensors.values():
                values.zero_()  # what the checkpoint does not have remains zero
        pieces = [*self._pieces(saved.optimizer, owned=False)]
        if saved.model_section().router_bias_rate > 0.0:
            pieces += self._bias_pieces(owned=False)
        read_pieces(checkpoint, pieces, group)
        _load_compression(self._worker, checkpoint, saved, group)
        kept = broadcast(
            group, lambda: generation_file(checkpoint, self._saver.beside), CheckpointError
        )
        self._saver = dataclasses.replace(self._saver, beside={**self._saver.beside, **kept})
        self._worker.engine.load_state(saved.progress.steps_taken)
        if saved.loss_scale is not None:
            self._worker.engine.load_loss_scale(saved.loss_scale.model_dump())
        return resumed_progress(saved, self._data)

    def _wait(self) -> None:
        if self._in_flight is not None:
            self._finished.append(self._in_flight.result())
            self._in_flight = None

    def _fitting_state(
        self, checkpoint: Path, allow_data_change: bool, allow_optimizer_change: bool
    ) -> RunState:
        from megaspeed.checkpoint.reading import saved_shapes

        saved = RunState.read(checkpoint)
        problems = model_changes(saved, self._run)
        model = self._run.config.model
        rate = saved.model_section().router_bias_rate
        model = model.model_copy(update={"router_bias_rate": rate})
        expected = expected_tensors(model, saved.optimizer) | saved.compression_tensors(model)
        problems += mismatches(expected, saved_shapes(checkpoint))
        if saved.data is not None and not allow_data_change:
            problems += data_changes(saved.data, self._data)
        if not allow_optimizer_change:
            problems += optimizer_changes(saved, self._run)
        if problems:
            listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, start=1))
            raise CheckpointError(
                f"{checkpoint} ({saved.origin}) does not match this run (at "
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

    def _pieces(self, optimizer: str | None, *, owned: bool) -> Iterator[Piece]:
        """Pieces of this rank's state: views of the engine's tensors.

        Args:
            optimizer: of the run of the checkpoint, as in ``kinds_of``. State that the checkpoint
                or this run does not have is omitted.
            owned: True for the pieces that this rank writes to a checkpoint; False for all pieces
                that it holds, which it reads from a checkpoint.
        """
        worker = self._worker
        engine, model = worker.engine, self._run.config.model
        for fragment in engine.state_fragments():
            saved = kinds_of(parameter_named(model, fragment.name), optimizer)
            part = self._written_part(fragment.name) if owned else None
            for kind in (kind for kind in saved if kind in fragment.tensors):
                yield from pieces_of(
                    key(kind, logical_name(model, fragment.name)),
                    worker.shards[fragment.name],
                    fragment.start,
                    fragment.tensors[kind],
                    part=part,
                )

    def _bias_pieces(self, *, owned: bool) -> Iterator[Piece]:
        """The biases of routers. The first data rank of a pipeline stage writes them."""
        context, balance = self._worker.context, self._worker.balance
        is_first = context.dp_rank == context.cp_rank == context.tp_rank == 0
        return balance.pieces() if balance is not None and (is_first or not owned) else iter(())

    def _written_part(self, name: str) -> range:
        """Which elements this rank writes of those that it owns of a parameter.

        Each replica holds all of them, and writes its share.
        """
        worker, grid = self._worker, self._run.grid
        copies = grid.copies_of(experts=parameter_named(self._run.config.model, name).is_expert)
        rank, ranks = worker.context.rank_along(copies.replica_axis), copies.replicate
        owned = worker.engine.owned_elements[name]
        return range(owned * rank // ranks, owned * (rank + 1) // ranks)


def data_identity(corpus: PreparedCorpus) -> DataIdentity:
    return DataIdentity(
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer_fingerprint or NOT_STATED,
        sequence_length=corpus.sequence_length,
        seed=corpus.seed,
    )


def layout_of(run: Run) -> Layout:
    return Layout(
        **dataclasses.asdict(run.grid),
        zero_stage=run.zero_stage,
        schedule=run.config.parallel.schedule,
        sequence_parallel=run.sequence_parallel,
        precision=run.precision,
    )


def generation_file(checkpoint: Path, beside: Mapping[str, bytes]) -> dict[str, bytes]:
    """The generation_config.json of a checkpoint, if it fits the tokenizer of the run.

    The file contains token ids, which mean different tokens in another tokenizer. Returns name ->
    content of the file; nothing if there is none, or the tokenizer has changed.
    """
    file, tokenizer = checkpoint / GENERATION, checkpoint / TOKENIZER
    if not (file.is_file() and tokenizer.is_file() and TOKENIZER in beside):
        return {}
    same = _fingerprint(tokenizer.read_bytes()) == _fingerprint(beside[TOKENIZER])
    return {GENERATION: file.read_bytes()} if same else {}


def _fingerprint(tokenizer_json: bytes) -> str:
    # The token that ends a document is not part of the fingerprint.
    return TextTokenizer(Tokenizer.from_buffer(tokenizer_json), end_of_text=0).fingerprint


def _compression_pieces(worker: Worker) -> Iterator[Piece]:
    """The pieces of compressed gradients that this rank writes: views of its state."""
    context, engine = worker.context, worker.engine
    for held in engine.gradients.feedback():
        tensor = key(f"{FEEDBACK}{context.sender_rank}", held.name)
        yield from pieces_of(tensor, worker.shards[held.name], held.start, held.values)
    if context.shard_rank == context.replica_rank == 0 and not context.grid.is_hybrid:
        for factor in engine.gradients.factors():
            yield _factor_piece(worker, *factor)


def _load_compression(
    worker: Worker, checkpoint: Path, saved: RunState, group: dist.ProcessGroup
) -> None:
    """Load the state of compressed gradients (``zero/compression.py``); a collective of ``group``.

        the run has             feedback                              PowerSGD's Q
        the same dp, pp, tp     the same on each rank                 the same
        another dp              each rank gets the mean of all        the same
        another pp              each rank gets its part of it         the same
        another tp              each rank gets its part of it         as before the first step
        shards and replicas     each replica gets its own or the mean as before the first step
        no compression, dp 1    is dropped: no step would send it     is dropped

    A step sends the mean over the data ranks of gradient and feedback. So if each rank gets the
    mean of the feedback, all that was not sent is still sent. A tied weight on two pipeline stages
    has feedback on both. If one stage holds the weight now, it gets the sum. If the weight was on
    one stage and is on two now, the first stage gets all.
    """
    from megaspeed.checkpoint.reading import read_pieces  # takes a second

    there = saved.compression_tensors(worker.run.config.model)
    if not there or worker.run.compression is None:
        return
    assert saved.layout is not None, "a run has saved these tensors"
    gradients = worker.engine.gradients
    factors = [_factor_piece(worker, *each) for each in gradients.factors()]
    fitting = [piece for piece in factors if there.get(piece.key) == tuple(piece.full_shape)]
    grid, before = worker.run.grid, saved.layout.grid
    if before.tp == grid.tp and not grid.is_hybrid:
        read_pieces(checkpoint, fitting, group)
    joins_ends = grid.pp == 1 and worker.run.config.model.tie_word_embeddings
    ranks = [*range(before.senders)]
    if before.senders == grid.senders:
        ranks = [worker.context.sender_rank]
    # What all senders hold, divided by dp, is what was not sent of the mean.
    share = grid.dp_cp / before.dp_cp * before.senders / grid.senders / len(ranks)
    feedback = {held.name: held for held in gradients.feedback()}
    for rank in ranks:
        pieces: list[Piece] = []
        read: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, held in feedback.items():
            sources = (name, HEAD_WEIGHT) if joins_ends and name == EMBEDDING_WEIGHT else (name,)
            for source in sources:
                tensor = key(f"{FEEDBACK}{rank}", source)
                if tensor in there:
                    read.append((held.values, torch.zeros_like(held.values)))
                    pieces += pieces_of(tensor, worker.shards[name], held.start, read[-1][1])
        read_pieces(checkpoint, pieces, group)
        for values, part in read:
            values.add_(part, alpha=share)


def _factor_piece(worker: Worker, name: str, factor: torch.Tensor) -> Piece:
    tensor = key(f"{FACTOR}{worker.context.tp_rank}", name)
    return Piece(tensor, tuple(factor.shape), (0, 0), factor)
