"""One rank of a run: its pipeline stage's engine, its links to other stages, its program.

    counts of samples and steps -> ``StepInputs`` -> micro-batches, learning rate
    micro-batches -> [program -> executor -> engine] -> reduced gradients
    reduced gradients, learning rate -> [engine] -> loss, gradient norm, skipped

The worker computes one step or one evaluation. The trainer decides when, and on which samples.
"""

import math
import resource
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.data.token_stream import StreamShard
from megaspeed.model.gpt import DTYPES
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.executor import Executor, InsteadOfLoss
from megaspeed.pipeline.p2p import Links
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    Instruction,
    OptimizerStep,
    Pipeline,
    passes_of,
    pipeline_of,
)
from megaspeed.pipeline.simulation import check_schedule
from megaspeed.supervision.process_end import StopSignal
from megaspeed.tensor_parallel.context import share_sequences
from megaspeed.tensor_parallel.drawing import Draw
from megaspeed.tensor_parallel.parallelize import parallelize
from megaspeed.topology.context import ParallelContext
from megaspeed.training.balance import Balance, split_sums
from megaspeed.training.compilation import Compilation, agree_to_compile
from megaspeed.training.faults import inject_into_model
from megaspeed.training.learning_rate import learning_rate
from megaspeed.training.rank_model import (
    backward_scale,
    context_axis,
    expert_axis,
    make_optimizer,
    parameter_groups,
    plain_model,
    set_matmul_precision,
    tensor_axis,
    vocab_parallel_loss,
)
from megaspeed.zero.build import build_engine
from megaspeed.zero.reductions import all_gather_numbers

Load = Callable[[int], MicroBatch]
StopReason = signal.Signals | Exception
"""Why a run ends early: a signal, or why a stream has no tokens for the next step."""

_SECONDS_BETWEEN_LOOKS = 0.5


class StepInputs:
    """The inputs of each optimizer step: this rank's micro-batches, and the learning rate.

        samples consumed so far -> micro-batches of the step, this data rank's rows
        steps taken so far      -> learning rate

    Both are functions of these counts and have no state. So a step can be repeated or skipped, and
    a checkpoint needs only the counts.
    """

    def __init__(self, run: Run, corpus: PreparedCorpus, context: ParallelContext) -> None:
        self._run, self._context = run, context
        self.shape = LoaderShape(
            micro_batch_size=run.batch.micro_batch_size,
            gradient_accumulation_steps=run.batch.gradient_accumulation_steps,
            dp_rank=context.dp_rank,
            dp_size=context.grid.dp,
            part=context_axis(run, context).tokens,
        )
        """How the samples of a step are divided."""
        self._loader = TrainingLoader(corpus, self.shape, context.device)
        self._arrived: set[StreamShard] = set()  # the shards for which all ranks have waited

    def load(self, samples: int, train_batch_size: int | None = None) -> Load:
        """Return a function that maps a micro-batch index to the micro-batch.

        The step is the one after ``samples`` samples, including those of skipped steps. It has
        ``train_batch_size`` samples, by default the batch of the run.
        """
        return partial(self._loader.micro_batch, samples, train_batch_size=train_batch_size)

    def wait_for_tokens(
        self, samples: int, train_batch_size: int, why_not: Callable[[], StopReason | None]
    ) -> StopReason | None:
        """Wait until every rank has the shards of streams that a step needs: the one after
        ``samples`` samples, with ``train_batch_size`` samples.

        If one rank began the step alone, it would wait for the others in a collective. So all ranks
        call this together and return the same: None, or if the step cannot begin, what ``why_not``
        has returned on one of them.
        """
        new = self._loader.shards(samples, train_batch_size) - self._arrived
        self._arrived |= new
        if not new:
            return None
        context = self._context
        part, group = context.timeline.part("data_loading"), context.world_group
        with context.activity.during("waiting for tokens", timeouts=math.inf), part:
            for shard in new:
                shard.stream.report_wait(shard.number)
            while True:
                why = why_not()  # read first: a shard may be complete although no other follows
                is_missing = any(shard.is_missing for shard in new)
                # A failure elsewhere in the stream does not matter to the shards of this step.
                ends = isinstance(why, signal.Signals) or (is_missing and why is not None)
                own = (is_missing, ends)
                missing, ending = zip(*all_gather_numbers(own, group, context.device), strict=True)
                if not any(missing):
                    return None
                if any(ending):
                    reasons: list[StopReason | None] = [why]
                    dist.broadcast_object_list(reasons, group=group, group_src=ending.index(1))
                    return reasons[0]
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def learning_rate(self, steps_taken: int) -> float:
        """The rate of the step after ``steps_taken`` others; a skipped step is not counted."""
        config = self._run.config
        return learning_rate(
            config.optimizer, config.scheduler, step=steps_taken, steps=self._run.steps
        )

    def close(self) -> None:
        self._loader.close()


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step, the same on every rank."""

    loss: float  # mean over all predicted tokens of the step, in nats
    # before clipping, over all logical parameters. A step is skipped if it is not finite.
    grad_norm: float
    skipped: bool  # whether it was skipped because loss or norm was not finite, or was refused
    # for each pipeline stage, the largest peak memory of its ranks so far, read when the gradients
    # of this step were complete
    peak_memory_bytes: tuple[int, ...] = ()
    # the highest number of a stop signal that a rank has received; 0 if none has
    stop_signal: int = 0
    # for each rank, what its ``Timeline.pop_seconds`` returned about an earlier step
    timelines: Sequence[Sequence[float]] = ()
    # by block, how many tokens each expert got; empty if there are no experts
    loads: Sequence[list[int]] = ()
    # mean over sequences, summed over blocks, without its coefficient
    auxiliary_loss: float = 0.0
    z_loss: float | None = None  # mean over predicted tokens, without its coefficient


@dataclass(frozen=True)
class NonFinite:
    """What was not finite (infinite or NaN) on one rank in one step."""

    # those with a loss that is not finite; only on the last pipeline stage
    micro_batches: tuple[int, ...]
    parameter: str | None  # the first one with a reduced gradient that is not finite; None if none


class Worker:
    """Builds this rank's part of the run and computes steps and evaluations with the other ranks.

    Every method is a collective: all ranks call it together.
    """

    def __init__(self, run: Run, context: ParallelContext) -> None:
        set_matmul_precision(run.config.training, context.device)
        self.run = run
        self.context = context
        model, optimizer = run.config.model, run.config.optimizer
        axis, sequence_axis = tensor_axis(run, context), context_axis(run, context)
        module = plain_model(run, chunks_of_stages(run)[context.pp_rank])
        self.shards = parallelize(module, model, axis, expert_axis(run, context))
        """Full name -> the part of the parameter that this rank holds."""
        if sequence_axis.size > 1:
            share_sequences(module, sequence_axis, axis)
        self.engine = build_engine(
            run,
            context,
            module,
            self.shards,
            # Functions, because ``zero`` may not import this folder.
            parameter_groups=lambda named: parameter_groups(named, model, optimizer),
            make_optimizer=lambda groups: make_optimizer(groups, optimizer),
            loss=vocab_parallel_loss(run, axis),
        )
        if run.config.training.z_loss:
            self.engine.loss.z_sum = torch.zeros((), device=context.device)
        self.balance: Balance | None = None
        """The balance of the experts of this rank; None if the model has no experts."""
        if model.num_experts is not None:
            self.balance = Balance(module, model, context.device)
        inject_into_model(context.activity, context.rank, self.engine)
        self._begin_phase(run)
        self._links = self._connect()
        if self._links is not None:
            # torch's flight recorder has no messages of gloo, which a report of a hang needs.
            context.activity.pending = self._links.pending
        self._losses: dict[int, Tensor] = {}
        compiles, self.uncompiled_reason = agree_to_compile(run, context)
        """Why nothing is compiled although ``training.compile`` is auto; None if there is no reason
        to report."""
        self.compilation: Compilation | None = None
        """None if nothing is compiled."""
        if compiles:
            self.compilation = Compilation(
                context.activity,
                keeps_order=run.grid.tp > 1,
                # Sequence parallelism sums the gradients of copies over the tensor ranks.
                same_kernels=run.grid.tp > 1 and not run.sequence_parallel,
            )
            self.compilation.compile_blocks(module)
            loss = self.engine.loss
            loss.chunk_losses = self.compilation.compiled(loss.chunk_losses)

    def use_batch(self, train_batch_size: int) -> None:
        """Take the next steps with this batch of the run's schedule. First it is the largest."""
        phase = self.run.phases[train_batch_size]
        if phase is not self.phase:
            self._begin_phase(phase)

    def _begin_phase(self, phase: Run) -> None:
        self.phase = phase
        """The run with the batch of the present step."""
        self.engine.loss_factor = backward_scale(phase)
        self.pipeline = pipeline_of(phase)
        check_schedule(self.pipeline)
        *self.program, last = stage_program(self.pipeline, self.context.pp_rank)
        """The instructions of a step before its ``OptimizerStep``."""
        assert isinstance(last, OptimizerStep)

    def train_step(
        self,
        load: Load,
        learning_rate: float,
        stop: StopSignal | None = None,
        refuses: Callable[[float, float], bool] | None = None,
    ) -> StepResult:
        """Run one optimizer step on the micro-batches that ``load`` returns.

        ``stop`` is read when the gradients of this step are reduced. If ``refuses`` returns True
        for the loss and the gradient norm of the step, all ranks skip it.
        """
        executor = self.compute_gradients(load)
        return self.update_weights(executor, learning_rate, stop, refuses)

    def compute_gradients(
        self, load: Load, program: Iterable[Instruction] | None = None
    ) -> Executor:
        """Load the micro-batches, run forwards and backwards, and reduce the gradients.

        ``program`` is ``self.program``, which may look at the rank after each instruction.
        """
        self.engine.train(True)
        if self.pipeline.gather_policy == "layers":
            self.engine.expect(passes_of(self.pipeline, self.context.pp_rank))
        executor = self._executor(self.pipeline, load)
        executor.run(program or self.program)
        return executor

    def update_weights(
        self,
        executor: Executor,
        learning_rate: float,
        stop: StopSignal | None = None,
        refuses: Callable[[float, float], bool] | None = None,
    ) -> StepResult:
        """Take the optimizer step with the gradients that ``compute_gradients`` has reduced."""
        with executor.executing(OptimizerStep()):
            executor.finish()
            signal_number = 0 if stop is None else stop.received or 0
            timeline = self.context.timeline.pop_seconds()  # of an earlier step: does not wait
            z_sum = self.engine.loss.z_sum
            notes = (peak_memory(self.context.device), signal_number, z_sum, *timeline)
            counts = None if self.balance is None else self.balance.pop_counts()
            outcome = self.engine.step(
                *(executor.loss_sum, learning_rate, notes, counts),
                refuses and (lambda losses, norm: refuses(self._mean(losses), norm)),
            )
            if z_sum is not None:
                z_sum.zero_()
            if self.balance is not None:
                self.balance.end_step(taken=not outcome.skipped)
        self._losses = executor.losses
        peaks, signals, z_sums, *timelines = zip(*outcome.notes, strict=True)
        loads, auxiliary = split_sums(outcome.sums, self.run.config.model.num_experts or 0)
        return StepResult(
            loss=self._mean(outcome.losses),
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            peak_memory_bytes=self._by_pipeline_stage(peaks),
            stop_signal=int(max(signals)),
            timelines=list(zip(*timelines, strict=True)),
            loads=loads,
            auxiliary_loss=auxiliary / self.phase.batch.train_batch_size,
            z_loss=None if z_sum is None else self._mean(z_sums),
        )

    def timelines_of_last_step(self) -> Sequence[Sequence[float]]:
        """For each rank, the times of the last step, if it was timed; no later step returns them.

        Waits until the device has finished that step.
        """
        own = self.context.timeline.pop_seconds(wait=True)
        return all_gather_numbers(own, self.context.world_group, self.context.device)

    @torch.no_grad()
    def evaluate(self, load: Load, micro_batches: int, predicted_tokens: int) -> float:
        """Mean loss over ``predicted_tokens`` targets, without dropout and without a step."""
        context, executor = self.context, self._forward(load, micro_batches)
        rows = all_gather_numbers((executor.loss_sum,), context.world_group, context.device)
        return self._loss_of([loss for (loss,) in rows]) / predicted_tokens

    @torch.no_grad()
    def next_tokens(self, batches: Sequence[MicroBatch], draw: Draw) -> list[int]:
        """The likeliest or a drawn token of each row at its only counted target.

        All data ranks have the same rows. The host reads once.
        """
        context, size = self.context, len(batches) * self.run.batch.micro_batch_size
        next_token = partial(self.engine.loss.next_token, draw=draw)
        found = self._forward(batches.__getitem__, len(batches), next_token).losses
        # Pipeline stages before the last one contribute scores of -inf, which are never largest.
        found = found or {0: torch.tensor([[-math.inf], [0.0]]).expand(2, size)}
        own = torch.cat([*found.values()], dim=1).flatten()
        ranks = all_gather_numbers([*own], context.world_group, context.device)
        # Of equal scores, the smallest id: the layout must not decide.
        best = (max((rank[n], -rank[size + n]) for rank in ranks) for n in range(size))
        return [-int(token) for _, token in best]

    def _forward(
        self, load: Load, micro_batches: int, instead_of_loss: InsteadOfLoss | None = None
    ) -> Executor:
        """Run a forward of each micro-batch, without dropout."""
        self.engine.train(False)
        trained, chunks = self.pipeline, self.pipeline.chunks
        groups = max(1, micro_batches // trained.stages) if chunks > 1 else 1
        pipeline = replace(
            trained, schedule="forward_only", micro_batches=micro_batches, groups=groups
        )
        executor = self._executor(pipeline, load, instead_of_loss)
        executor.run(stage_program(pipeline, self.context.pp_rank))
        executor.finish()
        return executor

    def non_finite(self) -> list[NonFinite]:
        """For each rank, what was not finite in the last step. Waits for the device."""
        losses = {m: float(loss) for m, loss in self._losses.items()}
        own = NonFinite(
            micro_batches=tuple(m for m, loss in losses.items() if not math.isfinite(loss)),
            parameter=self.engine.non_finite_parameter,
        )
        found = [own] * self.context.grid.world_size
        dist.all_gather_object(found, own, self.context.world_group)
        return found

    def _executor(
        self, pipeline: Pipeline, load: Load, instead_of_loss: InsteadOfLoss | None = None
    ) -> Executor:
        return Executor(
            self.engine,
            self._links,
            pipeline,
            self.context.pp_rank,
            load=load,
            instead_of_loss=instead_of_loss,
            activity=self.context.activity,
            timeline=self.context.timeline,
        )

    def _mean(self, losses: Sequence[float]) -> float:
        """Return the mean loss of a step's tokens, from the loss sums of all ranks."""
        return self._loss_of(losses) / self.phase.tokens_per_step

    def _loss_of(self, losses: Sequence[float]) -> float:
        """Add up the loss sums of all ranks. Ranks before the last pipeline stage send 0.

        Tensor ranks hold copies of one loss, so only the first tensor rank counts.
        """
        return sum(losses[:: self.context.grid.tp])  # tp is the innermost axis

    def _by_pipeline_stage(self, peaks: Sequence[float]) -> tuple[int, ...]:
        """The maximum of the ranks' peaks in each pipeline stage."""
        stage_size = self.context.grid.dp_cp * self.context.grid.tp  # pp is the outermost axis
        starts = range(0, self.context.grid.world_size, stage_size)
        return tuple(int(max(peaks[start : start + stage_size])) for start in starts)

    def _connect(self) -> Links | None:
        context, run = self.context, self.run
        if context.pp_group is None:
            return None
        sequence = run.config.data.sequence_length // context.grid.cp
        if run.sequence_parallel:
            sequence //= context.grid.tp
        return Links.connect(
            context.pp_group,
            shape=(run.batch.micro_batch_size, sequence, run.config.model.hidden_size),
            dtype=DTYPES[run.precision],
            device=context.device,
        )


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of torch's allocator on a GPU, of the resident set on a CPU.

    The resident set includes libraries. Reading the peak does not wait for the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
