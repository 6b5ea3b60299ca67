"""The plan of the data axis for the ranks of one pipeline stage."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

from megaspeed.config.resolve import BYTES_OF, Run, RunKey
from megaspeed.data_axis.buckets import (
    Bucket,
    buckets_of,
    multiplies_once,
    reduction_of_matrices,
)
from megaspeed.data_axis.gathers import (
    Gather,
    PartitionsOf,
    PassOfChunk,
    gathers_of_passes,
    held_in_pass,
    persistent_parameters,
)
from megaspeed.data_axis.orthogonalization import Orthogonalization
from megaspeed.data_axis.parameters import local_parameters
from megaspeed.pipeline.partition import chunks_of_stages


class DataAxis:
    """What the ranks of a pipeline stage reduce and gather. All of them have the same plan.

    Args:
        pipeline_stage: number of the stage, from 0.
        device_type: "cuda" or "cpu", where gloo's collectives differ from NCCL's.
    """

    def __init__(self, run: Run, pipeline_stage: int, device_type: str) -> None:
        self._zero = run.config.zero_optimization
        self._element_bytes = BYTES_OF[run.precision]
        # On a CPU, offloaded partitions are where the parameters are.
        on_device = device_type == "cpu" or not self._zero.offloads_parameters
        self._partitions = PartitionsOf(run.grid, self._element_bytes, on_device)
        self.parameters = local_parameters(run, pipeline_stage)
        """The parameters of a rank, in the order of the model."""
        grid = run.grid
        self.matrix_reduction = reduction_of_matrices(run, device_type, grid.copies)
        """How the gradients of matrices are reduced, except those of experts."""
        self.expert_reduction = reduction_of_matrices(run, device_type, grid.expert_copies)
        """How the gradients of experts are reduced."""
        self.buckets = buckets_of(
            run, self.parameters, self.matrix_reduction, self.expert_reduction
        )
        """Parameters whose gradients are reduced together. Each parameter is in one of them."""
        self.persistent: Gather | None = None
        """ZeRO-3: the small parameters that stay gathered."""
        if run.zero_stage == 3:
            kept = persistent_parameters(self._zero, self.parameters)
            self.persistent = Gather.of([*kept], self._partitions)
        self.orthogonalization: Orthogonalization | None = None
        """Muon: which rank orthogonalizes which matrix."""
        self.expert_orthogonalization: Orthogonalization | None = None
        """The same for experts; None if ``orthogonalization`` includes them."""
        if run.muon is not None:
            self.orthogonalization = Orthogonalization(run, self.buckets)
        if run.muon is not None and grid.ep is not None and grid.ep * grid.tp > 1:
            self.expert_orthogonalization = Orthogonalization(run, self.buckets, of_experts=True)
        self.is_local = on_device and grid.shard == 1 == grid.expert_copies.shard
        """Whether gathers copy nothing, because the partitions are the parameters."""

    @property
    def orthogonalizations(self) -> list[Orthogonalization]:
        """The plans of Muon; none if AdamW updates everything."""
        plans = (self.orthogonalization, self.expert_orthogonalization)
        return [plan for plan in plans if plan is not None]

    @cached_property
    def passes(self) -> Mapping[PassOfChunk, Sequence[Gather]]:
        """ZeRO-3: what each layer of a pass gathers, in the order of the pass."""
        if self.persistent is None:
            return {}
        kept = self.persistent.parameters
        return gathers_of_passes(self._zero, self.parameters, kept, self._partitions)

    @cached_property
    def gathers_after_step(self) -> Sequence[Gather]:
        """What the shards gather once a step, because the optimizer has changed it: at ZeRO-1 and 2
        each bucket, in the order in which a forward needs them, beside the next forward; at ZeRO-3
        what stays gathered, when the first pass of the next step begins.
        """
        if self.persistent is not None:
            return [self.persistent]
        needed_in_order = dict.fromkeys(self.bucket_of[each.name] for each in self.parameters)
        return [
            Gather(
                parameters=bucket.parameters,
                sizes=[bucket.elements],
                axes=[bucket.reduction.axis],
                element_bytes=self._element_bytes,
            )
            for bucket in needed_in_order
            if bucket.shards > 1
        ]

    @cached_property
    def compressed(self) -> Sequence[Bucket]:
        return [bucket for bucket in self.buckets if bucket.compression is not None]

    @cached_property
    def orthogonalized(self) -> Sequence[Bucket]:
        return [bucket for bucket in self.buckets if bucket.group == "orthogonalized"]

    @cached_property
    def bucket_of(self) -> Mapping[str, Bucket]:
        """Full name of a parameter -> its bucket."""
        return {p.name: bucket for bucket in self.buckets for p in bucket.parameters}

    def held(self, own: PassOfChunk, following: PassOfChunk | None) -> list[list[Gather]]:
        """Return what is held while each layer of the pass ``own`` computes, and last what is held
        after it. Its last layers gather ahead for the pass ``following``; None if there is none.
        """
        coming = self.passes[following] if following else []
        return held_in_pass(self._zero, self.passes[own], coming)

    def gathered(
        self, before: PassOfChunk | None, own: PassOfChunk, following: PassOfChunk | None
    ) -> Iterator[Gather]:
        """Yield what the pass ``own`` gathers, between the passes ``before`` and ``following``;
        None at the start and at the end of a step.
        """
        held = [] if before is None else self.held(before, own)[-1]
        for hold in self.held(own, following):
            yield from (layer for layer in hold if layer not in held)
            held = hold

    def chunk_gathers(self, chunk: int, *, forward: bool) -> list[Gather]:
        """Return the gathers of a complete chunk. Without a ``forward``, they omit what backwards
        do not read: the embedding and the weight of the head.
        """
        return list(dict.fromkeys(self.passes["forward" if forward else "backward", chunk]))


def data_axis_of(run: Run, pipeline_stage: int, device_type: str) -> DataAxis:
    """Return the plan of a pipeline stage on "cuda" or "cpu", which is cached."""
    return _data_axis_of(data_axis_key(run, pipeline_stage), pipeline_stage, device_type)


def data_axis_key(run: Run, pipeline_stage: int) -> RunKey:
    """Return all values on which the plan depends."""
    parallel = run.config.parallel
    values = (
        *(run.config.model, run.grid, run.config.zero_optimization, run.sequence_parallel),
        *(run.precision, run.accumulation_dtype, run.config.communication_data_type),
        *(parallel.gradient_compression, parallel.gradient_reduction, multiplies_once(run)),
        # Neither the micro-batch nor its number, so that most variants of a what-if share a plan.
        *(run.batch.gradient_accumulation_steps > 1, parallel.micro_batch_groups == 1),
        # The last two are for what a rank holds (``StageStates``).
        run.muon and (run.muon.per_head_muon, run.muon.nesterov, run.muon_dtype),
        chunks_of_stages(run)[pipeline_stage],
    )
    return RunKey(values, run)


@lru_cache(maxsize=256)
def _data_axis_of(key: RunKey, pipeline_stage: int, device_type: str) -> DataAxis:
    return DataAxis(key.run, pipeline_stage, device_type)
