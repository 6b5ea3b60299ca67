"""One JSON file as an immutable object: DeepSpeed's keys and megaspeed's four sections."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megaspeed.config.batch_schedule import BatchSchedule
from megaspeed.config.deepspeed_keys import DeepSpeedKeys
from megaspeed.config.model import ContextMethod, ExpertExchange, ModelConfig
from megaspeed.config.section import LARGEST_SECONDS, LARGEST_WORLD, PathText, Section, TokenCount

Recomputation = Literal["none", "selective", "full", "full_offloaded"]
"""What a recomputed block computes again in the backward pass."""


class Int8Compression(Section):
    """Gradients of matrices are reduced in blocks of 8-bit integers."""

    type: Literal["int8"]
    """Matrices are sent as blocks of 8-bit integers, each block with one fp32 scale."""
    block: int = Field(default=256, ge=16, le=65536)
    """Number of elements that share a scale. A block sends block + 4 bytes."""
    error_feedback: bool = True
    """Whether to add what a step did not send to the gradient of the next step."""


class PowerSgdCompression(Section):
    """Gradients of matrices are reduced as products of two thin matrices (Vogels et al. 2019)."""

    type: Literal["powersgd"]
    """Each matrix is sent as two thin matrices, whose product approximates it."""
    rank: int = Field(default=4, gt=0, le=1024)
    """Columns of the two thin matrices. For a matrix of n x m, rank x (n + m) numbers are sent
    instead of n x m. If that is not less, the matrix is sent as it is."""
    start_step: int = Field(default=10, gt=0)
    """The first step that is compressed. Skipped steps do not count. Steps before it send complete
    gradients, because gradients change quickly at first."""
    error_feedback: bool = True
    """Whether to add what a step did not send to the gradient of the next step."""


Compression = Int8Compression | PowerSgdCompression
"""The methods that need the complete gradient of a step."""

_StatedCompression = (
    Literal["none", "bf16", "int8", "powersgd"]
    | Annotated[Compression, Field(discriminator="type")]
)


def _object_of_type(value: Any) -> Any:
    """Return the object that a name of a method stands for."""
    return {"type": value} if value in ("int8", "powersgd") else value


class ParallelConfig(Section):
    """The degrees of the axes. data x pipeline x context x tensor is the number of ranks. expert
    divides the data x context x tensor ranks of a pipeline stage."""

    data: Annotated[int, Field(gt=0, le=LARGEST_WORLD)] | Literal["auto"] = "auto"
    """Data-parallel degree (dp); "auto" = world size / (pipeline x context x tensor)."""
    pipeline: int = Field(default=1, gt=0, le=LARGEST_WORLD)
    """Number of pipeline stages (pp); at most as many as there are blocks."""
    tensor: int = Field(default=1, gt=0, le=LARGEST_WORLD)
    """Tensor-parallel degree (tp); must divide the attention heads and, unless the model has
    experts, the feed-forward width."""
    context: int = Field(default=1, gt=0, le=LARGEST_WORLD)
    """Context-parallel degree (cp): number of ranks that share each sequence. Each holds
    data.sequence_length / context of its tokens, and the activations of these. It must divide
    data.sequence_length, with all_gather half of it. ZeRO partitions over data x context ranks."""
    context_method: Literal["auto"] | ContextMethod = "auto"
    """How attention sees the complete sequence. ulysses: an all-to-all gives each rank all tokens
    of some heads, and another one brings the result back. all_gather: keys and values are gathered,
    in the backward once more. auto: all_gather if the heads cannot be divided, or if it sends less,
    context divides half of data.sequence_length, and it needs no mask that ulysses does not need.
    Otherwise ulysses."""
    expert: int = Field(default=1, gt=0, le=LARGEST_WORLD)
    """Expert-parallel degree (ep): number of neighbouring ranks that share the experts of each
    block, and exchange tokens. It must divide model.num_experts and the data x context x tensor
    ranks of a pipeline stage. With ZeRO 1, 2 or 3, it must also divide (data / replicate) x context
    x tensor, or be a multiple of that. Experts are not split over tensor. Instead, tensor ranks
    share the tokens of a sequence (sequence_parallel)."""
    expert_exchange: Literal["auto"] | ExpertExchange = "auto"
    """How tokens get to the ranks of their experts. all_to_all: each token is sent to these ranks.
    The host waits for the number of tokens, once for each block and micro-batch. all_gather: all
    tokens are sent to all ranks that share the experts. The host does not wait, but a rank needs
    memory for the most tokens that its experts could get. auto: all_gather if it sends no more, and
    needs memory for at most twice as many tokens as all_to_all with equal loads of the experts.
    Otherwise all_to_all."""
    replicate: int = Field(default=1, gt=0, le=LARGEST_WORLD)
    """Number of data ranks that hold the same partition of ZeRO 1, 2 or 3. It must divide data.
    ZeRO partitions over (data / replicate) x context neighbours, and the replicas sum their
    partition of the gradients once a step. If these neighbours are on one node, ZeRO gathers
    nothing over the network. ZeRO-0 has only replicas."""
    spare_ranks: bool = False
    """true: more processes may be started than the layout uses. The spare ranks wait until the run
    ends. With data "auto", data is the largest degree that fits the batch. false: the number of
    processes must fit."""
    sequence_parallel: Literal["auto"] | bool = "auto"
    """Whether activations between blocks are split over the tensor axis. This saves memory, but the
    backward gathers some inputs again while it computes. If true, data.sequence_length must be
    divisible by context x tensor. auto: if tensor is more than 1, true with experts, and on
    CUDA if it is divisible. Otherwise false."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of forwards and backwards in the pipeline. With one chunk on each stage, 1f1b keeps at
    most ``pipeline`` micro-batches in memory; gpipe keeps all of them."""
    extra_in_flight: int = Field(default=0, ge=0, lt=LARGEST_WORLD)
    """Number of micro-batches that a stage keeps in memory beyond those that 1f1b needs, at most as
    many as there are stages after it. Needs one chunk on each stage, and three micro-batches a
    step. A stage then computes while messages are on their way. With pipeline - 1, a step waits for
    half of its messages; with fewer, a step of many micro-batches usually gains little."""
    virtual_stages: int = Field(default=1, gt=0, le=LARGEST_WORLD)
    """Number of chunks of layers (v) on each pipeline stage. More than one is an interleaved
    schedule, for 1f1b only: activations pass through all stages v times, so the bubble is 1 / v as
    long, and there are v times as many messages. The model must have at least pipeline x
    virtual_stages blocks, and a step at least pipeline micro-batches."""
    micro_batch_groups: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Number of groups into which micro-batches are divided if there are several chunks. A stage
    runs each chunk for a complete group before the next chunk. With fewer groups, more activations
    are kept, but each chunk is visited less often. A group has at least pipeline micro-batches.
    auto: as many groups as possible."""
    gradient_reduction: Literal["auto", "per_step", "per_visit", "per_micro_batch"] = "auto"
    """When gradients are reduced over dp: once a step (least traffic), after every micro-batch
    (least memory), or, with several chunks, once for each chunk and group of micro-batches
    (per_visit). auto: per_step for ZeRO 0 and 1, and for gradient_compression int8 or powersgd;
    otherwise per_visit if there are several chunks, and per_micro_batch if not. Replicas are always
    summed once a step."""
    gradient_compression: Annotated[
        Literal["none", "bf16"] | Annotated[Compression, Field(discriminator="type")],
        BeforeValidator(_object_of_type, json_schema_input_type=_StatedCompression),
    ] = "none"
    """How gradients are sent over the data axis. none: as they are. bf16: in bf16, as with
    communication_data_type. int8 and powersgd compress matrices, and send vectors as they are. With
    several replicas, they compress only what replicas send to each other. The training is then
    close to that of one process, but not equal. "int8" means {"type": "int8"}."""
    activation_checkpointing: Recomputation = "none"
    """What a block computes again in the backward pass instead of keeping it. selective: norms,
    activation functions, rotary positions, and attention that has dropout; the block keeps its
    matrix products and what the fused attention kernel returns. full: all after its input.
    full_offloaded: the same, and on a GPU the input waits in host memory. The MLP is computed for
    about hidden_size tokens at a time, and the backward recomputes it a second time. It is for very
    long sequences."""
    recomputed_blocks: int | None = Field(default=None, gt=0)
    """Number of blocks of each pipeline stage that are recomputed, the first ones; a stage with
    fewer blocks recomputes all of them. If omitted: all blocks of every stage."""

    @property
    def recomputes_fully(self) -> bool:
        """Whether recomputed blocks keep at most their input."""
        return self.activation_checkpointing.startswith("full")

    def recomputation_of(self, block: int) -> Recomputation:
        """Return what a block recomputes. It is number ``block`` of its pipeline stage, from 0."""
        count = self.recomputed_blocks
        return self.activation_checkpointing if count is None or block < count else "none"

    @property
    def recomputation_in_words(self) -> str:
        """What happens to the activations of blocks between forward and backward."""
        kind, count = self.activation_checkpointing, self.recomputed_blocks
        if kind == "none":
            return "kept for backward"
        details: list[str] = [kind] if kind == "selective" else []
        if count is not None:
            details.append(f"{count} {'block' if count == 1 else 'blocks'} of each pipeline stage")
        return "recomputed in backward" + (f" ({', '.join(details)})" if details else "")


BUNDLED_CORPUS = "python-stdlib"
"""A source that every machine has: the files of Python's standard library."""


class Source(Section):
    """A source of text or of token ids, with its settings."""

    path: PathText | None = None
    """A file, a glob, a folder written by datasets' save_to_disk or by `megaspeed tokenize`, or
    python-stdlib. A file's format follows from its suffix."""
    dataset: str | None = Field(default=None, min_length=1)
    """The name passed to datasets.load_dataset, instead of a path."""
    configuration: str | None = Field(default=None, min_length=1)
    """Configuration of the dataset, which is passed to load_dataset."""
    revision: str | None = Field(default=None, min_length=1)
    """Revision of the dataset, which is passed to load_dataset."""
    streaming: bool = False
    """Whether load_dataset reads over the network, without a local copy."""
    tokens: Annotated[TokenCount, Field(gt=0, le=10**13)] | None = None
    """Number of tokens to use from a dataset with streaming, such as "10B". They are tokenized in
    shards while the run trains. If omitted: all text is tokenized before step 1."""
    split: str = Field(default="train", min_length=1)
    """Split of the dataset, or of a folder of save_to_disk that has several splits."""
    text_field: str = Field(default="text", min_length=1)
    """Name of the field of JSON lines, or of the column of a table, that contains the text."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the samples that come from this source, relative to the weights of the others.
    State it for all sources of a list or for none. If omitted: each source is read once per
    epoch."""

    @model_validator(mode="after")
    def _names_one_place(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("an object that states either path or dataset")
        if self.dataset is None and (self.configuration or self.revision or self.streaming):
            raise ValueError(
                "an object without what only a dataset can have: configuration, "
                "revision and streaming"
            )
        if self.tokens is not None and not self.streaming:
            raise ValueError("an object that states tokens only if streaming is true")
        return self

    @property
    def shard_tokens(self) -> int:
        """Tokens of a shard of a stream: 1/64 of all, but at most 2^26 (128 MiB of 2-byte ids)."""
        return min(-(-(self.tokens or 0) // 64), 1 << 26)

    def __str__(self) -> str:
        return str(self.path if self.dataset is None else self.dataset)


PathOrSource = PathText | Source


class DataConfig(Section):
    """The corpus and how it is cut into samples."""

    train: tuple[PathOrSource, ...] = Field(default=(BUNDLED_CORPUS,), strict=False, min_length=1)
    """Sources of the training data: paths, globs, python-stdlib, or objects."""
    validation: tuple[PathOrSource, ...] | None = Field(default=None, strict=False, min_length=1)
    """Sources of the validation data, as in train. If omitted: validation_fraction of train."""
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the tokens of train held out for validation if validation is omitted; 0 for none.
    The hash of the text decides which. A long document is divided if necessary."""
    tokenizer: PathText = "train"
    """Path of a tokenizer. train: the tokenizer of the token files, or if there are none, a
    byte-level BPE of model.vocab_size tokens trained on the corpus."""
    sequence_length: int = Field(gt=0)
    """Tokens of one sample; at most model.max_position_embeddings."""
    reset_at_documents: bool = False
    """Whether attention and positions restart at every document of a sample, so that no token sees
    another document's text. FlashAttention does this without a mask. A mask is needed with
    attention dropout, on a GPU in fp32 or if FlashAttention does not support the GPU or the head
    size, and on a CPU with a sliding window."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of the sampling order."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_rule(cls, values: Any) -> Any:
        """Omit ``hold_out_by``, which version 0.2 wrote into config.json. One rule is left."""
        if not isinstance(values, dict) or "hold_out_by" not in values:
            return values
        if values["hold_out_by"] != "tokens":
            raise ValueError(
                "an object without hold_out_by, because only tokens are held out now, not the "
                "complete documents of version 0.1; list what was held out as validation"
            )
        return {key: value for key, value in values.items() if key != "hold_out_by"}

    @property
    def train_sources(self) -> tuple[Source, ...]:
        """The sources of `train` as objects."""
        return _as_objects(self.train)

    @property
    def validation_sources(self) -> tuple[Source, ...] | None:
        """The sources of `validation` as objects; None if omitted."""
        return None if self.validation is None else _as_objects(self.validation)


@lru_cache(maxsize=64)  # each rule asks for them, and a plan has thousands of variants
def _as_objects(sources: tuple[PathOrSource, ...]) -> tuple[Source, ...]:
    return tuple(Source(path=given) if isinstance(given, str) else given for given in sources)


ReportTo = Literal["tensorboard", "wandb"]


class ProfileConfig(Section):
    """Which steps are profiled, and on which ranks."""

    start_step: int = Field(gt=0)
    """The first step that is profiled. Step 1 also contains work that later steps do not repeat."""
    steps: int = Field(default=3, gt=0, le=100)
    """Number of steps that are profiled."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1, strict=False
    )
    """The ranks with a trace. If omitted: all ranks, up to 16; in a larger run those of data rank
    0; if these are more than 16, the first rank of each pipeline stage."""


class SpikeConfig(Section):
    """When a step is a spike, compared with the steps before it."""

    window: int = Field(default=128, ge=2, le=1000)
    """A step is compared with the mean and the standard deviation of this many steps before it. No
    step is a spike before half of them are known."""
    deviations: float = Field(default=6.0, gt=0, le=1000)
    """The loss or the gradient norm of a spike lies more than this many standard deviations above
    the mean."""


class TrainingConfig(Section):
    """The length of the run, what it reports and what it keeps."""

    steps: int | None = Field(default=None, gt=0)
    """Number of optimizer steps. State this or tokens."""
    tokens: Annotated[TokenCount, Field(gt=0)] | None = None
    """Length of the run in tokens, such as "300M", "20B" or "1.5T", instead of steps. The run ends
    after the step that reaches this number, also if it resumes with another batch."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of initial weights, of dropout and of drawn samples."""
    run_dir: PathText | None = None
    """Folder the run writes to. If omitted: runs/<name of the config file>."""
    log_interval: int = Field(default=10, gt=0)
    """Steps between two console lines."""
    report_to: tuple[ReportTo, ...] = Field(default=(), strict=False)
    """Services that also get the numbers of metrics.jsonl: tensorboard, wandb. Their packages must
    be installed."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between two validations; 0: only at the end."""
    eval_batches: int = Field(default=8, gt=0)
    """Number of batches, each of train_batch_size samples, of one validation."""
    # Without a constraint, pydantic would not check whether a string is valid Unicode text.
    sample_prompts: tuple[Annotated[str, Field(min_length=0)], ...] = Field(
        default=(), strict=False
    )
    """Beginnings of documents that the model continues every eval_interval steps and at the end.
    The console and metrics.jsonl have the continuations."""
    sample_tokens: int = Field(default=32, gt=0)
    """Longest continuation, in tokens. It must fit data.sequence_length with its prompt."""
    sample_temperature: float = Field(default=0.0, ge=0, le=100)
    """0: each new token of a continuation is the likeliest one. Above 0: it is drawn from
    softmax(logits / sample_temperature); all layouts draw the same one."""
    sample_top_k: int | None = Field(default=None, gt=0)
    """Number of likeliest tokens from which each new token is drawn. If omitted: all."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by k = train_batch_size / base_batch_size (linear; Goyal et al.
    2017) or by the square root of k (sqrt)."""
    base_batch_size: int | None = Field(default=None, gt=0)
    """Samples of the batch for which the stated learning rate is right; required if lr_scaling is
    not none. The resolved configuration has the scaled rate and states the run's own batch here."""
    allow_tf32: bool = False
    """On CUDA, multiply fp32 matrices in TF32, which keeps 10 of 23 mantissa bits. This is faster,
    but layouts agree only to about 1e-3."""
    allow_reduced_precision_reduction: bool = False
    """On CUDA, let bf16 and fp16 matrix products add partial sums in bf16 or fp16 instead of
    fp32."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each block and the loss with torch.compile, which fuses their elementwise operations.
    auto: on CUDA, if all ranks have Triton. true: also on a CPU, which needs a C++ compiler; a rank
    that cannot compile is an error. Compiled code is kept in $TORCHINDUCTOR_CACHE_DIR."""
    z_loss: float = Field(default=0.0, ge=0, le=1)
    """Coefficient of a second loss, the mean of log(Z)^2 over the tokens, where Z is the sum of
    exp(logit) over the vocabulary. It keeps logits from drifting, which 16 bits represent badly; a
    usual value is 1e-5. ``loss`` in the metrics remains the cross-entropy."""
    skip_spikes: SpikeConfig | None = None
    """Skip spikes, such as with {"window": 128, "deviations": 6}: steps whose loss or gradient norm
    lies far above those of the steps before. If omitted, the console only reports them."""
    max_skipped_steps: int = Field(default=20, gt=0)
    """The run stops after this many steps in a row were skipped because the loss or the gradient
    norm was not finite, or was a spike."""
    hang_timeout_seconds: float = Field(default=300.0, ge=5, le=LARGEST_SECONDS)
    """If there is no progress for this long, every rank writes its stacks, the ranks that did not
    arrive are named, and the run ends with exit code 3. Start-up and the first step may take four
    times as long, compilation 12 times, saving and loading 24 times. At least 5: ranks answer every
    second, and a process that pauses for less than 5 s on a busy machine has not failed."""
    restart: int = Field(default=0, ge=0)
    """How many times the ranks are started again after a failure, under deepspeed, srun, mpirun or
    plain python. torchrun does this by itself (--max-restarts)."""
    profile: ProfileConfig | None = None
    """Steps to record with torch.profiler, such as {"start_step": 10}, which take longer: traces, a
    table of where the time went, a picture of a pipeline's last step; in profile/ of run_dir."""
    check_replicas_interval: int = Field(default=0, ge=0)
    """Steps between two comparisons, bit by bit, of the copies that several ranks hold. They are
    also compared before each checkpoint. 0: never."""
    save_interval: int = Field(default=1000, ge=0)
    """Steps between two checkpoints; 0: only at the end and on a stop signal."""
    keep_last: int = Field(default=3, gt=0)
    """Number of the newest checkpoints that are kept. Older ones are deleted, except milestones."""
    keep_every: int = Field(default=0, ge=0)
    """Steps between two milestones: checkpoints whose step is a multiple of this are never deleted.
    It must be a multiple of save_interval. keep_last counts a milestone that is among the newest.
    0: no milestones."""
    async_save: bool = False
    """Copy a checkpoint to host memory and write it while training continues. From the first save
    to the end of the run, this takes 12 bytes of host memory for each parameter that a rank writes
    (8 if Muon updates it), and 4 for each compressed element of its gradient. If the rank trains on
    a GPU, the memory is page-locked."""

    def compiles_on(self, device_type: str) -> bool:
        """Return whether blocks are to be compiled on "cpu" or "cuda", if that is possible."""
        return device_type == "cuda" if self.compile == "auto" else self.compile

    def lr_factor(self, train_batch_size: int) -> float:
        """Return the factor by which ``lr_scaling`` multiplies every learning rate in the JSON."""
        if self.lr_scaling == "none":
            return 1.0
        assert self.base_batch_size is not None, "a rule checked that the base is stated"
        ratio = train_batch_size / self.base_batch_size
        return ratio if self.lr_scaling == "linear" else math.sqrt(ratio)


def _with(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a section with other values of these dotted keys."""
    update, inner = dict[str, Any](), dict[str, dict[str, Any]]()
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            update[name] = value
    update |= {name: _with(getattr(section, name), own) for name, own in inner.items()}
    return section.model_copy(update=update)


def _valid_schedule(text: str) -> str:
    BatchSchedule.of(text, None)
    return text


class RunConfig(DeepSpeedKeys):
    """The complete JSON. Values that depend on the number of processes may be "auto"."""

    train_batch_size_schedule: Annotated[str, AfterValidator(_valid_schedule)] | None = None
    """Start and samples of a step, for each phase of the run: "0:512 20B:1024" begins with 512, and
    takes 1,024 when 20B tokens are trained. A start without K, M, B or T counts steps. Each batch
    must be a multiple of train_micro_batch_size_per_gpu x dp. train_batch_size is the largest one,
    and may be omitted."""
    model: ModelConfig
    """The shape of the model."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How the ranks share the work."""
    data: DataConfig
    """The corpus and how it is cut into samples."""
    training: TrainingConfig
    """The length of the run, what it reports and what it keeps."""

    def changed(self, keys: Mapping[str, Any]) -> "RunConfig":
        """Return a copy with other values of these dotted keys. They are not validated."""
        changed: RunConfig = _with(self, keys)
        return changed

    def number_of_steps(self, batch: int | None = None) -> int | None:
        """Return the number of steps; None if it depends on a batch that is omitted."""
        tokens, batch = self.training.tokens, batch or self.train_batch_size
        schedule, length = self.train_batch_size_schedule, self.data.sequence_length
        if tokens is None or (batch is None and schedule is None):
            return self.training.steps if tokens is None else None
        stretches = BatchSchedule.of(schedule, batch).stretches(length, all_tokens=tokens)
        return sum(stretch.steps for stretch in stretches)

    def length(self, steps: int) -> str:
        """Return the key that states the length of a run of ``steps``, and its value."""
        if (tokens := self.training.tokens) is None:
            return f"training.steps {steps}"
        return f"training.tokens {tokens:,} ({steps} steps)"

    def compressed_from_step_1(self) -> "RunConfig":
        """Return a copy in which PowerSGD starts at step 1, to measure the first steps."""
        compression = self.parallel.gradient_compression
        if not isinstance(compression, PowerSgdCompression):
            return self
        started = compression.model_copy(update={"start_step": 1})
        return self.changed({"parallel.gradient_compression": started})

    def to_json(self) -> dict[str, Any]:
        """Return the config as JSON values with all defaults. They load as an equal config."""
        return self.model_dump(mode="json", exclude_none=True)

    def deepspeed_json(self) -> dict[str, Any]:
        """Return DeepSpeed's keys alone, as JSON values for its ``initialize``, without null."""
        return self.model_dump(
            mode="json", exclude_none=True, include=set(DeepSpeedKeys.model_fields)
        )
