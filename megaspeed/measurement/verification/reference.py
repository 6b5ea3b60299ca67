"""The reference training in plain torch: one process, one module, no engine, pipeline or shards.

Every layout is compared with it. It shares only the definition of the task with the parallel run:
the model, its initial weights, the samples, the learning rate of each step and parameter group,
which parameters decay or are orthogonalized, and the coefficients of Newton-Schulz steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.measurement.verification.experts import ExpertRecord, ReferenceExperts
from megaspeed.model.gpt import DTYPES, GPT
from megaspeed.model.initialization import initialize
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.model.parameters import parameter_named
from megaspeed.training.learning_rate import learning_rate
from megaspeed.training.rank_model import parameter_groups, set_matmul_precision
from megaspeed.training.spikes import Recent, is_refused, with_step
from megaspeed.zero.muon import coefficients_of

CPU = torch.device("cpu")


@dataclass
class ReferenceRun:
    """The record of a training. Tensors are fp32 on the CPU, by full parameter name."""

    losses: list[float] = field(default_factory=list)  # mean loss of each step, in nats
    grad_norms: list[float] = field(default_factory=list)  # of each step, before clipping
    initial_weights: dict[str, Tensor] = field(default_factory=dict)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)  # of step 1, before clipping
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    experts: ExpertRecord = field(default_factory=ExpertRecord)
    z_losses: list[float] = field(default_factory=list)  # of each step, without coefficient
    skipped: list[bool] = field(default_factory=list)  # of each step, whether it was a spike


def train_reference(
    run: Run,
    batch_of_step: Callable[[int], list[MicroBatch]],
    steps: int,
    device: torch.device = CPU,
    choices: Tensor | None = None,
) -> ReferenceRun:
    """Trains the run's model for ``steps`` steps on one device.

    The degrees of the run are ignored. ``batch_of_step`` returns the samples of a step, in parts of
    any size. In fp16, the loss is multiplied by the constant ``fp16.loss_scale``. If ``choices``
    (see ``ExpertRecord``) is given, tokens use these experts, else those with the largest scores.
    """
    set_matmul_precision(run.config.training, device)
    model = GPT(run.config.model, seed=run.config.training.seed)
    initialize(model, run.config.model, run.config.training.seed)
    model.to(device, DTYPES[run.precision])  # initialized on the CPU: the same bits on every device
    masters = _master_weights(model)
    loss_scale = run.config.fp16.loss_scale if run.precision == "fp16" else 1.0
    params, momentum = run.config.optimizer.params, dict[str, Tensor]()
    groups = parameter_groups(masters, run.config.model, run.config.optimizer)
    optimizer = torch.optim.AdamW(
        [group for group in groups if not group["is_orthogonalized"]],
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
    )
    experts = ReferenceExperts(model, run, choices)
    record = ReferenceRun(initial_weights=_copies(masters), experts=experts.record)
    spikes, taken = run.config.training.skip_spikes, 0
    recent: Recent = ()
    for step in range(steps):
        rate = learning_rate(
            run.config.optimizer, run.config.scheduler, step=taken, steps=run.steps
        )
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_ratio"]
        batch = [part.to(device) for part in batch_of_step(step)]
        loss, z_loss = _forward_backward(model, experts, batch, run, loss_scale)
        record.losses.append(loss)
        record.z_losses.append(z_loss)
        for name, parameter in model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            masters[name].grad = None if gradient is None else gradient / loss_scale
        if step == 0:
            record.first_gradients = {
                n: p.grad.to(CPU, copy=True) for n, p in masters.items() if p.grad is not None
            }
        # In fp64, because torch's fp32 norm of a large tensor has an error above the tolerance.
        gradients = (p.grad for p in masters.values() if p.grad is not None)
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().float()
        record.grad_norms.append(float(norm))
        is_skipped = is_refused(spikes, recent, loss, float(norm))
        if spikes is not None:
            recent = with_step(spikes, recent, loss, float(norm))
        record.skipped.append(is_skipped)
        experts.end_step(taken=not is_skipped)
        if not is_skipped:
            taken += 1
            if run.config.gradient_clipping:
                nn.utils.clip_grads_with_norm_(masters.values(), run.config.gradient_clipping, norm)
            optimizer.step()
            if run.muon is not None:
                _muon_step(run, masters, momentum, rate)
        _copy_weights(model, masters)
    record.weights = _copies(masters)
    return record


def _forward_backward(
    model: GPT, experts: ReferenceExperts, batch: list[MicroBatch], run: Run, loss_scale: float
) -> tuple[float, float]:
    """Return the loss of a step, and its z-loss without the coefficient."""
    total, z_total, tokens = 0.0, 0.0, sum(part.tokens.numel() for part in batch)
    experts.begin_step(sum(len(part.tokens) for part in batch))
    for part in batch:
        experts.begin_forward(part)
        logits = model(part.tokens, part.samples, part.documents)  # (B, S, V)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            part.targets.flatten(),
            ignore_index=NOT_COUNTED,
            reduction="sum",
        )
        objective = loss / tokens + experts.objective()
        if coefficient := run.config.training.z_loss:
            log_z = logits.flatten(0, 1).float().logsumexp(dim=-1)
            z_loss = log_z[part.targets.flatten() != NOT_COUNTED].square().sum()
            objective = objective + coefficient * z_loss / tokens
            z_total += z_loss.item()
        (objective * loss_scale).backward()
        total += loss.item()
    return total / tokens, z_total / tokens


@torch.no_grad()
def _muon_step(
    run: Run, masters: dict[str, nn.Parameter], momentum: dict[str, Tensor], rate: float
) -> None:
    """Update the matrices of blocks, one section of rows after the other. (Liu et al. 2025)"""
    params, model, dtype = run.muon, run.config.model, DTYPES[run.muon_dtype]
    assert params is not None
    rate *= params.rates[0] / params.lr
    for name, weight in masters.items():
        row = parameter_named(model, name)
        if not row.is_block_matrix:
            continue
        assert weight.grad is not None
        before = momentum.get(name, torch.zeros_like(weight))
        momentum[name] = params.momentum * before + weight.grad
        update = momentum[name]
        if params.nesterov:
            update = weight.grad + params.momentum * update
        weight.mul_(1 - rate * params.weight_decay)
        sizes = list(row.row.sections.values())
        if params.per_head_muon and "query" in row.row.sections:
            sizes = [model.head_dim] * (weight.shape[0] // model.head_dim)
        for own, part in zip(weight.split(sizes), update.split(sizes), strict=True):
            rows, columns = part.shape
            factor = math.sqrt(max(1, rows / columns))
            if params.adjust_lr_fn == "match_rms_adamw":
                factor = 0.2 * math.sqrt(max(rows, columns))
            x = part.to(dtype).T if rows > columns else part.to(dtype)
            x = x / x.norm().clamp(min=1e-7)
            for a, b, c in coefficients_of(params):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            own.sub_(x.T if rows > columns else x, alpha=rate * factor)


def _master_weights(model: GPT) -> dict[str, nn.Parameter]:
    """fp32 weights that the optimizer updates: the parameters themselves if they are fp32."""
    named = dict(model.named_parameters())
    if all(p.dtype == torch.float32 for p in named.values()):
        return named
    for parameter in named.values():
        parameter.grad_dtype = torch.float32
    return {name: nn.Parameter(p.detach().float()) for name, p in named.items()}


@torch.no_grad()
def _copy_weights(model: GPT, masters: dict[str, nn.Parameter]) -> None:
    for name, parameter in model.named_parameters():
        if parameter is not masters[name]:
            parameter.copy_(masters[name])
        masters[name].grad = None


def _copies(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().to(CPU, copy=True) for name, parameter in named.items()}
