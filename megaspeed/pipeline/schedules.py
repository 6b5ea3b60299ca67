"""Pipeline schedules: the instructions that a stage executes in one optimizer step, as plain data.

    Pipeline                       the shape of a step
      --schedule------------->     the order in which each stage computes: forwards and backwards
      --programs------------->     all instructions of a stage: messages, gathers, the step

A schedule is a function that yields forwards and backwards. Everything else follows from their
order: a stage loads a micro-batch before its first forward, sends each result when it is computed,
and receives what it needs. So a schedule can be compared, printed and simulated without a process.

**Chunks.** A stage has one or several chunks of consecutive layers. Chunk c of stage s is the
virtual stage c x stages + s, so activations pass through all stages several times, from the last
one back to the first one (Narayanan et al. 2021, section 2.2):

    stage 0                 stage 1                 stage 2
    virtual stage 0   --->  virtual stage 1   --->  virtual stage 2   --+
    +-------------------------------------------------------------------+
    +-> virtual stage 3 --> virtual stage 4   --->  virtual stage 5
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Literal

from megaspeed.config.resolve import Run
from megaspeed.pipeline.partition import parameters_of_chunks

ScheduleName = Literal["gpipe", "1f1b", "forward_only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The shape of a step: everything on which its instructions depend."""

    schedule: ScheduleName
    stages: int
    micro_batches: int
    extra_in_flight: int = 0  # beyond what 1f1b with one chunk needs
    chunks: int = 1  # of each stage
    groups: int = 1  # into which micro-batches are divided, if there are several chunks
    # A backward computes the gradients of inputs and of weights: twice as many matrix products as a
    # forward, which takes one tick. With full recomputation, it repeats the forward.
    backward_ticks: int = 2
    # What ZeRO-3 gathers together: a layer, or a chunk, maybe while the visit before it computes.
    gather_policy: Literal["layers", "chunks", "chunks_ahead"] = "layers"

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def ideal_bubble(self) -> float:
        """The fraction of a step in which stages of equal cost wait for each other.

        (Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.)
        """
        waits = self.stages - 1
        return waits / (self.chunks * self.micro_batches + waits)

    def sends_of(self, stage: int) -> int:
        """How many messages a stage sends in a step: each chunk to both sides, if there is one."""
        ends = (stage == 0) + (stage == self.stages - 1)
        return (2 * self.chunks - ends) * self.micro_batches

    def virtual(self, stage: int, chunk: int) -> int:
        """The virtual stage of a chunk, counted from 0."""
        return chunk * self.stages + stage


@dataclass(frozen=True, slots=True)
class LoadMicroBatch:
    """Fetch the micro-batch: tokens, targets and the sample indices that seed dropout.

    All stages load all micro-batches: the first stage needs the tokens, the last one the targets,
    and all need the sample indices.
    """

    micro_batch: int


@dataclass(frozen=True, slots=True, repr=False)
class ChunkInstruction:
    """An instruction for one micro-batch of the step and one chunk of the stage, both from 0."""

    micro_batch: int
    chunk: int = 0

    def __repr__(self) -> str:
        chunk = f", chunk={self.chunk}" if self.chunk else ""
        return f"{type(self).__name__}(micro_batch={self.micro_batch}{chunk})"


@dataclass(frozen=True, slots=True, repr=False)
class Forward(ChunkInstruction):
    """Run the layers of the chunk; the input and the graph are kept for ``Backward``."""


@dataclass(frozen=True, slots=True, repr=False)
class Backward(ChunkInstruction):
    """Accumulate the gradients of the chunk, and free what ``Forward`` has kept."""


@dataclass(frozen=True, slots=True, repr=False)
class ReceiveActivation(ChunkInstruction):
    """Receive the input of the chunk from the stage before; ``Forward`` waits for it."""


@dataclass(frozen=True, slots=True, repr=False)
class SendActivation(ChunkInstruction):
    """Send the output of the chunk to the stage after it."""


@dataclass(frozen=True, slots=True, repr=False)
class ReceiveGradient(ChunkInstruction):
    """Receive the gradient of the output from the stage after; ``Backward`` waits for it."""


@dataclass(frozen=True, slots=True, repr=False)
class SendGradient(ChunkInstruction):
    """Send the gradient of the input to the stage before it."""


Compute = Forward | Backward
Send = SendActivation | SendGradient
Receive = ReceiveActivation | ReceiveGradient
Message = Send | Receive


@dataclass(frozen=True, slots=True)
class Transfer:
    """Start to send and to receive, as one batch."""

    messages: tuple[Message, ...]  # at most one to and one from each neighbour


@dataclass(frozen=True, slots=True)
class Gather:
    """Start to gather the parameters of a chunk from ZeRO-3's partitions.

    A backward does not read the embedding, nor the weight of the head.
    """

    chunk: int
    forward: bool  # whether a forward needs them; otherwise only backwards do


@dataclass(frozen=True, slots=True)
class Release:
    """Free what the last ``Gather`` of the chunk has gathered."""

    chunk: int


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """An instruction that runs once a step, after the last backward."""


@dataclass(frozen=True, slots=True)
class ReduceGradients(StepInstruction):
    """Average the accumulated gradients over the data axis."""


@dataclass(frozen=True, slots=True)
class ReduceTiedGradients(StepInstruction):
    """Sum the gradients of weights that the first and the last stage share."""


@dataclass(frozen=True, slots=True)
class OptimizerStep(StepInstruction):
    """Clip, and update the parameters. The first forward of the next step clears the gradients."""


Instruction = (
    LoadMicroBatch
    | Forward
    | Backward
    | Transfer
    | Gather
    | Release
    | ReduceGradients
    | ReduceTiedGradients
    | OptimizerStep
)
StageProgram = list[Instruction]


class ScheduleError(ValueError):
    """The plan of a step breaks a rule: that of the pipeline, or that of the data axis."""


Schedule = Callable[[Pipeline, int], Iterator[Compute]]
"""Yields what one stage of a pipeline computes in one step."""


def gpipe(pipeline: Pipeline, stage: int) -> Iterator[Compute]:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.2).

    A stage keeps the activations of all micro-batches. Backwards run in the order of the forwards,
    so gradients are summed in the same order as with one process.
    """
    yield from _forwards(pipeline)
    yield from _backwards(pipeline)


def one_forward_one_backward(pipeline: Pipeline, stage: int) -> Iterator[Compute]:
    """Warm-up, then one forward and one backward in turn, then cool-down.

    With one chunk: PipeDream-Flush (Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters", section 2.2.1). It has the same bubble as GPipe, but needs less
    memory: a stage keeps the activations of at most ``stages - stage`` micro-batches. But a
    gradient is sent only when the stage before needs it, which then waits for the message. With
    ``extra_in_flight`` more forwards in the warm-up, at most one for each stage after this one,
    gradients arrive earlier.

    With several chunks, micro-batches are divided into groups of equal sizes, or sizes that differ
    by one. Within a group a stage runs chunk 0 for all micro-batches, then chunk 1, and so on; in
    the backward, the chunks in reverse order. The bubble is (stages - 1) / (chunks x micro-batches)
    of the computation for any number of groups. Groups of ``stages`` micro-batches are the
    interleaved schedule (section 2.2.2), which keeps the fewest activations. With one group, each
    chunk has one run of forwards and one of backwards, as in the breadth-first schedule
    (Lamy-Poirier 2022, arXiv 2211.05953), which keeps more activations.
    """
    forwards, backwards = _forwards(pipeline), _backwards(pipeline)
    # After this many forwards, the first micro-batch has passed the last virtual stage, and its
    # gradient is what this stage needs next.
    after = pipeline.stages - 1 - stage
    first_group = -(-pipeline.micro_batches // pipeline.groups)
    if pipeline.chunks == 1:
        warmup = after + min(pipeline.extra_in_flight, after)
    else:
        warmup = 2 * after + (pipeline.chunks - 1) * first_group
    yield from forwards[:warmup]
    yield from chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    yield from backwards[max(0, len(forwards) - warmup) :]


def forward_only(pipeline: Pipeline, stage: int) -> Iterator[Compute]:
    """Evaluation: one forward of every micro-batch."""
    yield from _forwards(pipeline)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward}
)
"""The training schedules by their name in the JSON (``parallel.schedule``)."""


@lru_cache(maxsize=64)  # the same for all stages
def _forwards(pipeline: Pipeline) -> tuple[Forward, ...]:
    chunks = range(pipeline.chunks)
    return tuple(Forward(i, chunk) for g in _groups(pipeline) for chunk in chunks for i in g)


@lru_cache(maxsize=64)
def _backwards(pipeline: Pipeline) -> tuple[Backward, ...]:
    chunks = range(pipeline.chunks)[::-1]
    return tuple(Backward(i, chunk) for g in _groups(pipeline) for chunk in chunks for i in g)


def _groups(pipeline: Pipeline) -> Iterator[range]:
    """The micro-batches of each group; the first groups have one more if they cannot be equal."""
    size, larger = divmod(pipeline.micro_batches, pipeline.groups)
    start = 0
    for group in range(pipeline.groups):
        end = start + size + (group < larger)
        yield range(start, end)
        start = end


def pipeline_of(run: Run) -> Pipeline:
    parallel = run.config.parallel
    assert parallel.micro_batch_groups != "auto", "a resolved run states it"
    return Pipeline(
        schedule=parallel.schedule,
        stages=run.grid.pp,
        micro_batches=run.batch.gradient_accumulation_steps,
        extra_in_flight=parallel.extra_in_flight,
        chunks=parallel.virtual_stages,
        groups=parallel.micro_batch_groups,
        backward_ticks=3 if parallel.recomputes_fully else 2,
        gather_policy=_gather_policy(run),
    )


def _gather_policy(run: Run) -> Literal["layers", "chunks", "chunks_ahead"]:
    """What ZeRO-3 gathers together. Chunks are gathered ahead if any three of a stage fit into
    ``stage3_max_live_parameters``: one computes forwards, one backwards, and one comes next.
    """
    chunks, zero = run.config.parallel.virtual_stages, run.config.zero_optimization
    # Otherwise the partitions are the parameters, and there is nothing to gather.
    shards = max(run.grid.shard, run.grid.expert_copies.shard)
    is_partitioned = shards > 1 or zero.offloads_parameters
    if run.zero_stage < 3 or chunks == 1 or not is_partitioned:
        return "layers"
    bound = zero.stage3_max_live_parameters
    # With two chunks, gathering ahead would hold all weights of the stage.
    if chunks == 2 or zero.stage3_prefetch_bucket_size == 0:
        return "chunks"
    if bound is not None:
        largest = max(sum(sorted(sizes)[-3:]) for sizes in parameters_of_chunks(run))
        if largest > bound:
            return "chunks"
    return "chunks_ahead"


@lru_cache(maxsize=256)
def order_of(pipeline: Pipeline, stage: int) -> tuple[Compute, ...]:
    schedule = SCHEDULES.get(pipeline.schedule, forward_only)
    return tuple(schedule(pipeline, stage))


@lru_cache(maxsize=4096)
def peak_in_flight(pipeline: Pipeline, stage: int) -> int:
    """The largest number of forwards of a stage whose activations are kept at the same time.

    Each is of one micro-batch and one chunk, and kept until its backward. An evaluation keeps one.
    """
    most = kept = 0
    for compute in order_of(pipeline, stage):
        kept += 1 if isinstance(compute, Forward) else -1
        most = max(most, kept)
    return 1 if pipeline.schedule == "forward_only" else most


def input_of(pipeline: Pipeline, stage: int, compute: Compute) -> Receive | None:
    """What a stage must receive before it can compute this; None if it needs no message."""
    virtual = pipeline.virtual(stage, compute.chunk)
    if isinstance(compute, Forward):
        return ReceiveActivation(compute.micro_batch, compute.chunk) if virtual > 0 else None
    is_last = virtual == pipeline.virtual_stages - 1
    return None if is_last else ReceiveGradient(compute.micro_batch, compute.chunk)


def output_of(pipeline: Pipeline, stage: int, compute: Compute) -> Send | None:
    """What a stage sends when it has computed this; None if no virtual stage needs it."""
    virtual = pipeline.virtual(stage, compute.chunk)
    if isinstance(compute, Backward):
        return SendGradient(compute.micro_batch, compute.chunk) if virtual > 0 else None
    is_last = virtual == pipeline.virtual_stages - 1
    return None if is_last else SendActivation(compute.micro_batch, compute.chunk)


def peer(pipeline: Pipeline, stage: int, message: Message) -> int:
    """The stage at the other end of a message of ``stage``. The stages form a ring."""
    is_after = isinstance(message, SendActivation | ReceiveGradient)
    return (stage + (1 if is_after else -1)) % pipeline.stages


def received_as(pipeline: Pipeline, stage: int, sent: Send) -> Receive:
    """The receive of the stage to which ``stage`` sends this message."""
    virtual = pipeline.virtual(stage, sent.chunk)
    if isinstance(sent, SendActivation):
        return ReceiveActivation(sent.micro_batch, (virtual + 1) // pipeline.stages)
    return ReceiveGradient(sent.micro_batch, (virtual - 1) // pipeline.stages)


End = Literal["micro_batch", "visit", "step"]
"""What ends with a backward of a chunk: a micro-batch, its visit, or all its work of the step."""
ENDS: tuple[End, ...] = ("micro_batch", "visit", "step")
"""The end of one is also the end of those before it."""

Pass = Literal["forward", "backward"]


def passes_of(pipeline: Pipeline, stage: int) -> list[tuple[Pass, int]]:
    """The passes through the chunks of a stage, in order."""
    return [
        ("forward" if isinstance(compute, Forward) else "backward", compute.chunk)
        for compute in order_of(pipeline, stage)
    ]
