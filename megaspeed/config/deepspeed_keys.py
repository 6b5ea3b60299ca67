"""DeepSpeed's own keys, at the top level of the JSON, each with DeepSpeed's meaning.

These are the keys of DeepSpeed 0.19.8 that work here. ``foreign_keys.py`` has the others.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megaspeed.config.section import LARGEST_ACCUMULATION, LARGEST_BATCH, ElementCount, Section


def _no_boolean(value: Any) -> Any:
    """Refuse true, which Python treats as equal to 1 in a list of allowed numbers."""
    if isinstance(value, bool):
        raise ValueError("a whole number")
    return value


class OffloadConfig(Section):
    """The memory in which a part of the state is kept while it is not used."""

    device: Literal["none", "cpu"] = "none"
    """none: keep it on the accelerator; cpu: keep it in host memory."""
    pin_memory: bool = True
    """Use page-locked host memory, so that transfers have full speed. Turn it off only if the limit
    of ``ulimit -l`` is too low."""


class ZeroConfig(Section):
    """What ZeRO partitions over the data-parallel axis, and the sizes of its messages."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_boolean)] = 0
    """What is partitioned. 0: nothing; 1: optimizer states; 2: optimizer states and gradients; 3:
    optimizer states, gradients and parameters."""
    reduce_scatter: bool = True
    """Average gradients with reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Annotated[ElementCount, Field(gt=0)] | None = None
    """Number of elements that are reduced at a time. If omitted: about one block, 12 x
    model.hidden_size^2 / parallel.tensor, but at least 8,388,608 (32 MiB in fp32)."""
    use_multi_rank_bucket_allreduce: bool = False
    """Stages 1 and 2: all-reduce each bucket of gradients instead of a reduce-scatter. DeepSpeed's
    own default is true. It sends twice the bytes, so a step moves 3 x the parameters instead of
    ZeRO's 2 x."""
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass continues: each bucket as soon as its gradients are
    complete. If omitted: true on CUDA, unless gradients are compressed to int8 or by PowerSGD.
    Stage 3 gathers the next layer ahead in any case."""
    offload_param: OffloadConfig | None = None
    """Stage 3: the memory in which partitioned parameters are kept."""
    offload_optimizer: OffloadConfig | None = None
    """Stages 1 to 3: the memory in which optimizer states are kept. It has the keys of
    offload_param."""
    sub_group_size: ElementCount = Field(default=1_000_000_000, gt=0)
    """Stage 3: number of elements of a rank that the optimizer updates at a time, at most. It
    updates one bucket of gradients at a time, so a small number makes buckets small."""
    stage3_prefetch_bucket_size: Annotated[ElementCount, Field(ge=0)] | None = None
    """Stage 3: neighbouring blocks are gathered together if they have at most this many elements,
    and at most half of stage3_max_live_parameters. They are gathered while the layers before them
    compute, if stage3_max_live_parameters leaves room. 0: gather each layer (or each of several
    chunks) only when a pass reaches it. If omitted: 8,388,608 (32 MiB in fp32)."""
    stage3_param_persistence_threshold: Annotated[ElementCount, Field(ge=0)] | None = None
    """Stage 3: parameters with up to this many elements stay gathered. If omitted: 10 x
    model.hidden_size."""
    stage3_model_persistence_threshold: Annotated[ElementCount, Field(ge=0)] | None = None
    """Stage 3: largest total number of elements that stay gathered. If omitted: no limit."""
    stage3_max_live_parameters: Annotated[ElementCount, Field(ge=0)] | None = None
    """Stage 3: the next layer is gathered while the current one computes only if both together have
    at most this many elements. Parameters that stay gathered do not count. With several chunks, the
    next one is gathered ahead only if any three have at most this many. If omitted: no limit."""

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are kept in host memory. Stage 0 does not partition them."""
        offload = self.offload_optimizer
        return self.stage > 0 and offload is not None and offload.device != "none"

    @property
    def offloads_parameters(self) -> bool:
        """Whether partitioned parameters are kept in host memory. Only stage 3 has them."""
        offload = self.offload_param
        return self.stage == 3 and offload is not None and offload.device != "none"


class Bf16Config(Section):
    """bfloat16 parameters and activations with fp32 master weights."""

    enabled: bool = False
    """Compute in bfloat16. On some CPUs, it takes many times as long as fp32. A run, ``doctor`` and
    ``check --device cpu`` measure this, and report it."""
    check_grad_overflow: bool = True
    """Skip a step whose gradients are not finite."""


class Fp16Config(Section):
    """float16 parameters and activations with fp32 master weights and a scaled loss."""

    enabled: bool = False
    """Compute in float16 (GPU only)."""
    loss_scale: float = Field(default=0.0, ge=0)
    """Factor by which the loss is multiplied. 0: the factor is adjusted during training."""
    initial_scale_power: int = Field(default=16, ge=0, le=127)
    """Exponent of the first dynamic loss scale, which is 2 to this power."""
    loss_scale_window: int = Field(default=1000, gt=0)
    """Steps without overflow before the loss scale doubles."""
    hysteresis: int = Field(default=2, gt=0)
    """Number of overflows after which the loss scale is halved."""
    consecutive_hysteresis: bool = False
    """Start counting overflows again from 0 after a step without one."""
    min_loss_scale: int = Field(default=1, gt=0)
    """Smallest dynamic loss scale."""


class DataTypesConfig(Section):
    """Number types that may differ from that of the model."""

    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are summed over micro-batches and reduced. bf16 halves their memory
    and traffic, but a micro-batch's gradient is lost if it is more than 256 times smaller than the
    sum."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(Section):
    """The parameters of AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate at the end of the scheduler's warmup."""
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the running means of the gradient and of its square, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """Small number that is added to the denominator of an update."""
    weight_decay: float = Field(default=0.01, ge=0)
    """In each step, matrices and embeddings shrink by this number times the learning rate; biases
    and norms do not."""

    @property
    def rates(self) -> tuple[float, float]:
        """The full learning rates of the matrices of blocks, and of all other parameters."""
        return self.lr, self.lr


class AdamConfig(Section):
    """AdamW. Adam means the same, as in DeepSpeed."""

    type: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW or Adam: both decouple weight decay. Muon: see docs/optimizers.md."""
    params: AdamParams = Field(default_factory=AdamParams)
    """Parameters of the optimizer."""


def _three_or_a_name(value: Any) -> Any:
    given = value if isinstance(value, list | tuple) and len(value) == 3 else ()
    are_three = [type(each) in (int, float) and abs(each) <= 100 for each in given]
    if value != "polar_express" and not (are_three and all(are_three)):
        raise ValueError('a list of three numbers from -100 to 100 or "polar_express"')
    return value


class MuonParams(AdamParams):
    """The parameters of Muon (Jordan et al. 2024), and of AdamW for all other parameters.

    ``nesterov``, ``ns_steps``, ``ns_coefficients`` and ``adjust_lr_fn`` are torch's names,
    ``ns_dtype`` is ours, and all others are DeepSpeed's.
    """

    muon_lr: float | None = Field(default=None, gt=0)
    """Muon: learning rate of the matrices of blocks at the end of the scheduler's warmup. It has
    the same schedule as lr. If omitted: lr. If lr is omitted and adam_lr stated, lr is
    muon_lr."""
    adam_lr: float | None = Field(default=None, gt=0)
    """Muon: learning rate of embeddings, head, norms and biases, which AdamW updates. It has the
    same schedule as lr. If omitted: lr."""
    momentum: DecayRate = 0.95
    """Muon: factor of the momentum in each step."""
    nesterov: bool = True
    """Muon: orthogonalize the gradient + momentum x the new momentum, instead of the new
    momentum."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Muon: number of Newton-Schulz steps."""
    ns_coefficients: Annotated[
        Annotated[tuple[float, float, float], Field(strict=False)] | Literal["polar_express"],
        BeforeValidator(_three_or_a_name),
    ] = (3.4445, -4.7750, 2.0315)
    """Muon: coefficients a, b, c of a Newton-Schulz step X = a X + (b A + c A A) X with
    A = X X^T. polar_express: each step has its own (Amsel et al. 2025)."""
    ns_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Muon: number type of the Newton-Schulz steps. auto: fp32 in fp32 runs, otherwise bf16."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """Muon: factor of the update of a matrix (n, m). original: sqrt(max(1, n/m)), as in DeepSpeed;
    match_rms_adamw: 0.2 sqrt(max(n, m)), with which learning rates and weight decay of AdamW fit
    (Liu et al. 2025)."""
    per_head_muon: bool = False
    """Muon: orthogonalize the rows of each query, key and value head by themselves."""

    @property
    def rates(self) -> tuple[float, float]:
        return self.muon_lr or self.lr, self.adam_lr or self.lr


class MuonConfig(Section):
    """Muon for the matrices of blocks, AdamW for all other parameters."""

    type: Literal["Muon"]
    """Muon: see docs/optimizers.md."""
    params: MuonParams = Field(default_factory=MuonParams)
    """Parameters of the optimizer."""


def _adamw_by_default(value: Any) -> Any:
    return {"type": "AdamW", **value} if isinstance(value, dict) else value


OptimizerConfig = Annotated[
    AdamConfig | MuonConfig, Field(discriminator="type"), BeforeValidator(_adamw_by_default)
]


# The learning rate as a function of the step.
#
#     cosine, linear, constant, wsd             step W of the warmup has the full rate
#     WarmupCosineLR, WarmupDecayLR, WarmupLR   the same shapes by DeepSpeed's formulas
#
# With DeepSpeed's types, steps 1 and 2 both have the lowest rate (0 by default) and step W + 2 has
# the full rate, because DeepSpeed counts iterations from -1. `training/learning_rate.py` has
# the formulas.


class ConstantParams(Section):
    """The parameters of constant. cosine, linear and wsd have them, too."""

    warmup_num_steps: int = Field(default=0, ge=0)
    """Number of steps W of linear warmup. Step 1 has 1/W of the full rate, step W the full rate."""


class DecayParams(ConstantParams):
    """The parameters of cosine and linear. wsd has them, too."""

    total_num_steps: int | None = Field(default=None, gt=0)
    """Step at which the learning rate is smallest. If omitted: the last step."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Smallest learning rate, as a fraction of optimizer.params.lr."""


class Decay(Section):
    """A learning rate that falls after warmup."""

    type: Literal["cosine", "linear"]
    """Shape of the decay after warmup. cosine: half a cosine; linear: a straight line."""
    params: DecayParams = Field(default_factory=DecayParams)
    """Parameters of this type of scheduler."""


class Constant(Section):
    """A learning rate that is constant after warmup."""

    type: Literal["constant"]
    """Constant after warmup."""
    params: ConstantParams = Field(default_factory=ConstantParams)
    """Parameters of this type of scheduler."""


class WarmupStableDecayParams(DecayParams):
    """The parameters of wsd."""

    decay_num_steps: int = Field(gt=0)
    """Number of steps of the decay. Its last step is total_num_steps."""
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    """Shape of the decay. 1 - sqrt(progress) had lower losses than linear in Hagele et al. 2024."""


class WarmupStableDecay(Section):
    """A learning rate that is constant between warmup and a decay at the end (Hu et al. 2024)."""

    type: Literal["wsd"]
    """Constant after warmup, with a decay over the last steps."""
    params: WarmupStableDecayParams
    """Parameters of this type of scheduler."""


class WarmupParams(Section):
    """Parameters that all of DeepSpeed's schedulers have."""

    warmup_num_steps: int = Field(default=1000, gt=0)
    """Number of steps of warmup."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warmup over the steps."""


class WarmupLRParams(WarmupParams):
    """The parameters of WarmupLR."""

    warmup_min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate of warmup."""
    warmup_max_lr: float | None = Field(default=None, gt=0)
    """Learning rate after warmup. If omitted: optimizer.params.lr."""


class WarmupDecayLRParams(WarmupLRParams):
    """The parameters of WarmupDecayLR."""

    total_num_steps: int | None = Field(default=None, gt=0)
    """Step at which the learning rate is 0. If omitted: the last step."""


class WarmupCosineLRParams(WarmupParams):
    """The parameters of WarmupCosineLR."""

    total_num_steps: int | None = Field(default=None, gt=0)
    """Step at which the learning rate is smallest. If omitted: the last step."""
    warmup_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Lowest learning rate of warmup, as a fraction of optimizer.params.lr."""
    cos_min_ratio: float = Field(default=0.0001, ge=0, le=1)
    """Smallest learning rate, as a fraction of optimizer.params.lr."""


class WarmupLR(Section):
    """DeepSpeed's constant rate after warmup."""

    type: Literal["WarmupLR"]
    """Constant after warmup."""
    params: WarmupLRParams = Field(default_factory=WarmupLRParams)
    """Parameters of this type of scheduler."""


class WarmupDecayLR(Section):
    """DeepSpeed's linear decay after warmup."""

    type: Literal["WarmupDecayLR"]
    """Linear decay to 0 after warmup."""
    params: WarmupDecayLRParams = Field(default_factory=WarmupDecayLRParams)
    """Parameters of this type of scheduler."""


class WarmupCosineLR(Section):
    """DeepSpeed's cosine decay after warmup."""

    type: Literal["WarmupCosineLR"]
    """Cosine decay after warmup."""
    params: WarmupCosineLRParams = Field(default_factory=WarmupCosineLRParams)
    """Parameters of this type of scheduler."""


SchedulerConfig = Annotated[
    Decay | Constant | WarmupStableDecay | WarmupLR | WarmupDecayLR | WarmupCosineLR,
    Field(discriminator="type"),
]


class DeepSpeedKeys(Section):
    """The top level of the JSON, without megaspeed's sections."""

    train_batch_size: int | None = Field(default=None, gt=0, le=LARGEST_BATCH)
    """Samples of one optimizer step over all ranks = train_micro_batch_size_per_gpu x
    gradient_accumulation_steps x dp. If it is stated, the batch is the same at every layout."""
    train_micro_batch_size_per_gpu: (
        Annotated[int, Field(gt=0, le=LARGEST_BATCH)] | Literal["auto"] | None
    ) = None
    """Samples of one micro-batch on one data-parallel rank. auto (with train_batch_size): the
    largest size that is predicted to fit, with at least one micro-batch for each pipeline stage. If
    the first step runs out of memory, the run restarts once with the next smaller size."""
    gradient_accumulation_steps: int | None = Field(default=None, gt=0, le=LARGEST_ACCUMULATION)
    """Number of micro-batches of one optimizer step, also with a pipeline."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest gradient norm, computed over all ranks. If the norm is larger, gradients are scaled
    down to it. 0: no clipping."""
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """What ZeRO partitions over the data-parallel axis."""
    bf16: Bf16Config = Field(default_factory=Bf16Config)
    """Training in bfloat16."""
    fp16: Fp16Config = Field(default_factory=Fp16Config)
    """Training in float16."""
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Number types that may differ from that of the model."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    """Type in which gradients are reduced. If omitted: the type in which they are summed over
    micro-batches."""
    optimizer: OptimizerConfig = Field(default_factory=AdamConfig)
    """The optimizer."""
    scheduler: SchedulerConfig | None = None
    """The learning rate as a function of the step. If omitted: constant."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Level of DeepSpeed's own log. If omitted: DeepSpeed's default."""
    disable_python_gc: bool = False
    """Turn Python's garbage collector off while training."""
