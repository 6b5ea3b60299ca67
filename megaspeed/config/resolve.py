"""Resolve a config for a number of processes: replace "auto" and compute all derived numbers."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megaspeed.config.batch_schedule import BatchSchedule, Stretch
from megaspeed.config.deepspeed_keys import (
    MuonConfig,
    MuonParams,
    WarmupLRParams,
    WarmupStableDecayParams,
)
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import (
    Batch,
    StatedBatch,
    World,
    find_grid,
    make_grid,
    solve_batch,
    violations,
)
from megaspeed.config.model import ContextMethod, ExpertExchange
from megaspeed.config.rules import head_degrees
from megaspeed.config.run import Compression, RunConfig
from megaspeed.topology.grid import Grid

GradientReduction = Literal["per_step", "per_visit", "per_micro_batch"]
Precision = Literal["fp32", "bf16", "fp16"]
BYTES_OF: Mapping[Precision, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of one number of each type."""

_PATHS = {
    "data": ("train", "validation", "tokenizer"),
    "model": ("from_hf",),
    "training": ("run_dir",),
}


@dataclass(frozen=True)
class Run:
    """A run on a number of processes.

    ``config`` is resolved: it states the data degree, all batch keys, the gradient reduction,
    whether the sequence is split, the run folder, ZeRO's bucket sizes, whether reductions overlap,
    and the scheduler's numbers. Learning rates are scaled. What else the engine and the predictions
    need follows from it, by the properties below.
    """

    config: RunConfig
    name: str
    steps: int
    """The last step. With training.tokens, it changes if a run resumes with another batch."""
    spare_ranks: int = 0
    """Number of processes that the grid does not use."""
    notes: tuple[str, ...] = ()
    """Sentences about keys of the file with another name or no effect here, and about "auto"."""
    stated: RunConfig | None = None
    """The unresolved config if its micro-batch is "auto", for ``planning`` to choose the size."""
    load_factor: float = 1.0
    """For ``planning``: the rows of experts that a rank computes, as a multiple of the mean."""

    def as_json(self) -> dict[str, Any]:
        """Return the resolved config as JSON values. A file with them gives the same run again."""
        return self.config.to_json()

    def common_json(self) -> dict[str, Any]:
        """``as_json`` without paths, which may differ between the nodes of a run."""
        values = self.as_json()
        for section, keys in _PATHS.items():
            for key in keys:
                values[section].pop(key, None)
        return values

    @cached_property
    def grid(self) -> Grid:
        """The degrees of the axes."""
        parallel = self.config.parallel
        assert parallel.data != "auto", "a resolved run states it"
        return make_grid(self.config, parallel.data)

    @cached_property
    def batch(self) -> Batch:
        """The three numbers of the batch equation."""
        batch = solve_batch(StatedBatch.of(self.config), self.grid.dp)
        assert batch is not None, "a resolved run states it"
        return batch

    @cached_property
    def schedule(self) -> BatchSchedule:
        """The batch of each step; ``batch`` is the largest one."""
        stated = self.config.train_batch_size_schedule
        return BatchSchedule.of(stated, self.batch.train_batch_size)

    @cached_property
    def phases(self) -> Mapping[int, "Run"]:
        """Each batch of the schedule -> this run with it, on the same ranks. Micro-batches keep the
        size, so only their number differs. For the largest batch, it is this run itself.
        """
        size, most = self.batch.micro_batch_size * self.grid.dp, self.batch
        groups, pp = self.config.parallel.micro_batch_groups, self.grid.pp
        automatic = self.config.parallel.virtual_stages > 1
        automatic = automatic and groups == most.gradient_accumulation_steps // pp
        phases: dict[int, Run] = {}
        for batch in self.schedule.batches:
            keys = {
                "train_batch_size": batch,
                "gradient_accumulation_steps": batch // size,
                "parallel.micro_batch_groups": batch // size // pp if automatic else groups,
            }
            phases[batch] = replace(self, config=self.config.changed(keys))
        return phases | {most.train_batch_size: self}

    def stretches(self, step: int = 0, tokens: int = 0) -> Iterator[Stretch]:
        """Yield the rest of the run, after ``step`` steps and ``tokens`` tokens."""
        length = self.config.data.sequence_length
        return self.schedule.stretches(length, step=step, tokens=tokens, last_step=self.steps)

    def tokens_left(self, step: int = 0, tokens: int = 0) -> int:
        """Return the tokens of all steps after ``step``, which follows so many tokens."""
        samples = sum(each.steps * each.batch for each in self.stretches(step, tokens))
        return samples * self.config.data.sequence_length

    @cached_property
    def precision(self) -> Precision:
        """The number type in which the model computes."""
        if self.config.bf16.enabled:
            return "bf16"
        return "fp16" if self.config.fp16.enabled else "fp32"

    @property
    def gradient_reduction(self) -> GradientReduction:
        """When gradients are reduced over the data axis."""
        reduction = self.config.parallel.gradient_reduction
        assert reduction != "auto", "a resolved run states it"
        return reduction

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return self.config.zero_optimization.stage

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are split over the tensor axis."""
        return self.config.parallel.sequence_parallel is True and self.grid.tp > 1

    @property
    def context_method(self) -> ContextMethod | None:
        """How ranks share sequences; None if they do not."""
        method = self.config.parallel.context_method
        return None if method == "auto" else method

    @property
    def expert_exchange(self) -> ExpertExchange | None:
        """How ranks exchange the tokens of experts; None if they do not."""
        method = self.config.parallel.expert_exchange
        return None if method == "auto" else method

    @property
    def accumulation_dtype(self) -> Precision:
        """The number type in which gradients are summed over micro-batches."""
        return self.config.data_types.grad_accum_dtype

    @property
    def compression(self) -> Compression | None:
        """How the gradients of matrices are compressed; None if they are not."""
        stated = self.config.parallel.gradient_compression
        return None if isinstance(stated, str) or self.grid.dp_cp == 1 else stated

    @property
    def muon(self) -> MuonParams | None:
        """The parameters of Muon, with both learning rates; None if AdamW updates everything."""
        optimizer = self.config.optimizer
        return optimizer.params if isinstance(optimizer, MuonConfig) else None

    @property
    def muon_dtype(self) -> Precision:
        """The number type in which Muon orthogonalizes."""
        stated = "auto" if self.muon is None else self.muon.ns_dtype
        automatic: Precision = "fp32" if self.precision == "fp32" else "bf16"
        return automatic if stated == "auto" else stated

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.config.training.run_dir or default_run_dir(self.name))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.batch.train_batch_size * self.config.data.sequence_length


@dataclass(frozen=True)
class RunKey:
    """A key of a cache: a run, compared only by the values that a result depends on."""

    values: tuple[Hashable, ...]
    run: Run = field(compare=False)


def default_run_dir(name: str) -> str:
    """Return the run folder if the JSON does not state one."""
    return f"runs/{name}"


SMALLEST_DEFAULT_BUCKET = 8 << 20
"""A bucket has at least this many elements if the JSON omits ``reduce_bucket_size``. It is also the
default of ``stage3_prefetch_bucket_size``. In fp32 these are 32 MiB, which take about 0.1 ms within
a node, and are little beside any model that needs a GPU."""


def resolve_run(config: RunConfig, world: World, *, name: str) -> Run:
    """Compute everything that depends on the processes.

    Args:
        config: a config that may have "auto".
        name: the run's name, which is the config file's name without its suffix.

    Raises:
        ConfigError: with all problems, including those that do not depend on the processes.
    """
    problems = violations(config, world)
    if problems:
        raise ConfigError(problems, where=name)
    stated = StatedBatch.of(config)
    grid = find_grid(config, world)
    batch = None if grid is None else solve_batch(stated, grid.dp)
    assert grid is not None and batch is not None, "the rules found a grid and a batch"
    steps = config.number_of_steps(batch.train_batch_size)
    assert steps is not None, "a rule checked that the length is stated"
    keys = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "parallel.data": grid.dp,
        "parallel.context_method": _context_method(config, world.device_type),
        "parallel.expert_exchange": _expert_exchange(config),
        "parallel.gradient_reduction": _gradient_reduction(config),
        "parallel.micro_batch_groups": _micro_batch_groups(config, batch),
        "parallel.sequence_parallel": _splits_sequence(config, world.device_type),
        "training.run_dir": config.training.run_dir or default_run_dir(name),
        "training.steps": steps,
        **_learning_rates(config, batch.train_batch_size),
        **_message_sizes(config, grid.tp, world.device_type),
    }
    unresolved = config if config.train_micro_batch_size_per_gpu == "auto" else None
    spare_ranks = world.size - grid.world_size
    return Run(config.changed(keys), name, steps, spare_ranks, stated=unresolved)


def _gradient_reduction(config: RunConfig) -> GradientReduction:
    """auto depends on the ZeRO stage: 2 and 3 partition gradients, 0 and 1 do not. With several
    chunks, a visit to a chunk sums its gradients.

    Compression needs the complete gradient of a step, or replicas, which are summed once a step.
    """
    if config.parallel.gradient_reduction != "auto":
        return config.parallel.gradient_reduction
    compresses = not isinstance(config.parallel.gradient_compression, str)
    once = compresses and config.parallel.replicate == 1
    if config.zero_optimization.stage < 2 or once:
        return "per_step"
    return "per_visit" if config.parallel.virtual_stages > 1 else "per_micro_batch"


def _context_method(config: RunConfig, device_type: str) -> Literal["auto"] | ContextMethod:
    """auto: what sends less for a token of a rank, in all passes of a step. ulysses sends
    (cp - 1) / cp of its features in each pass. all_gather sends its features to cp - 1 ranks three
    times: in the forward, before the backward, and their gradients.

    But all_gather is not taken if only all_gather would need a mask of own tokens x all tokens.
    """
    model, parallel = config.model, config.parallel
    cp, tp = parallel.context, parallel.tensor
    if parallel.context_method != "auto" or cp == 1:
        return parallel.context_method
    if cp not in head_degrees(model, tp):
        return "all_gather"
    passes = 3 if parallel.recomputes_fully else 2
    exchanged = passes * sum(model.exchanged_features("ulysses", cp=cp, tp=tp)) / cp
    gathered = 3 * sum(model.exchanged_features("all_gather", cp=cp, tp=tp))
    length, window = config.data.sequence_length, model.sliding_window
    element_bytes = 2 if config.bf16.enabled or config.fp16.enabled else 4
    masks = model.why_mask(device_type, element_bytes) is not None
    both_mask = config.data.reset_at_documents or (window is not None and window < length)
    has_halves = length % (2 * cp) == 0  # as all_gather needs them
    is_shorter = has_halves and exchanged > gathered and (both_mask or not masks)
    return "all_gather" if is_shorter else "ulysses"


def _expert_exchange(config: RunConfig) -> Literal["auto"] | ExpertExchange:
    """auto: all_gather if it sends no more and needs memory for at most twice as many rows.
    all_to_all sends (ep - 1) / ep of the k rows of each token, and all_gather each token to ep - 1
    ranks. all_gather needs memory for ep min(k, E / ep) rows a token, and all_to_all for about k.
    """
    model, ep = config.model, config.parallel.expert
    stated, active = config.parallel.expert_exchange, model.num_experts_per_tok
    if stated != "auto" or model.num_experts is None or active is None or ep == 1:
        return stated
    rows = ep * min(active, model.num_experts // ep)
    return "all_gather" if ep <= active and rows <= 2 * active else "all_to_all"


def _micro_batch_groups(config: RunConfig, batch: Batch) -> int:
    """auto: as many groups as there can be, which keeps the fewest activations."""
    parallel = config.parallel
    if parallel.micro_batch_groups != "auto":
        return parallel.micro_batch_groups
    several = parallel.virtual_stages > 1
    return batch.gradient_accumulation_steps // parallel.pipeline if several else 1


def _splits_sequence(config: RunConfig, device_type: str) -> bool:
    """auto: true on CUDA if the parts are equal. There, the added gathers overlap with products.
    With experts, tensor ranks always share the tokens.
    """
    stated, tp = config.parallel.sequence_parallel, config.parallel.tensor
    if stated != "auto":
        return stated
    if config.model.num_experts is not None:
        return tp > 1
    tokens = config.data.sequence_length // config.parallel.context
    return device_type == "cuda" and tp > 1 and tokens % tp == 0


def _learning_rates(config: RunConfig, train_batch_size: int) -> dict[str, Any]:
    """Return the keys of the learning rate, scaled to the batch, and the length of its schedule.

    The base of the scaling becomes the run's own batch, so loading the resolved configuration does
    not scale the rates again.
    """
    lr, scaling = config.optimizer.params.lr, config.training.lr_factor(train_batch_size)
    keys: dict[str, Any] = {}
    if isinstance(muon := config.optimizer.params, MuonParams):
        if "lr" not in muon.model_fields_set:
            lr = muon.rates[0]
        rates = zip(("muon_lr", "adam_lr"), muon.rates, strict=True)
        keys = {f"optimizer.params.{name}": rate * scaling for name, rate in rates}
    keys["optimizer.params.lr"] = lr * scaling
    if config.training.lr_scaling != "none":
        keys["training.base_batch_size"] = train_batch_size
    params = None if config.scheduler is None else config.scheduler.params
    if isinstance(params, WarmupLRParams):
        keys["scheduler.params.warmup_max_lr"] = (params.warmup_max_lr or lr) * scaling
        keys["scheduler.params.warmup_min_lr"] = params.warmup_min_lr * scaling
    # If a run with tokens or wsd resumes with another length, its schedule must end with it.
    ends = config.training.tokens is None and not isinstance(params, WarmupStableDecayParams)
    if params is not None and ends and hasattr(params, "total_num_steps"):
        keys["scheduler.params.total_num_steps"] = params.total_num_steps or config.training.steps
    return keys


def _message_sizes(config: RunConfig, tp: int, device_type: str) -> dict[str, Any]:
    """Return ZeRO's keys that follow from the size of the model, if the JSON omits them.

    A bucket of a small model is larger than a block, because many short messages take longer than a
    few long ones. On a CPU, the same cores compute and send, so reductions do not overlap.

    DeepSpeed's defaults (5e8 elements a bucket, parameters of up to 1e5 elements stay gathered) are
    for one size of model. With them, a model of a few hundred million parameters has one bucket,
    and every parameter of a small one stays gathered, so a higher stage saves nothing.
    """
    hidden, parallel = config.model.hidden_size, config.parallel
    sends_early = isinstance(parallel.gradient_compression, str) or parallel.replicate > 1
    values = {
        # a block: 4 hidden_size^2 in the attention, about 8 in the feed-forward layer
        "reduce_bucket_size": max(12 * hidden**2 // tp, SMALLEST_DEFAULT_BUCKET),
        "stage3_prefetch_bucket_size": SMALLEST_DEFAULT_BUCKET,
        # norms and biases stay gathered
        "stage3_param_persistence_threshold": 10 * hidden,
        "overlap_comm": device_type == "cuda" and sends_early,
    }
    zero = config.zero_optimization
    omitted = (name for name in values if getattr(zero, name) is None)
    return {f"zero_optimization.{name}": values[name] for name in omitted}
