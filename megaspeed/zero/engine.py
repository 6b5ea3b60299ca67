"""DeepSpeed's ZeRO optimizer over one pipeline stage, under the control of a schedule.

The order of calls in one optimizer step, whatever the schedule:

    forward(m) ... backward(m) ...        for every micro-batch, in any valid order
    reduce_gradients()                    over the data axis, partial ones over the tensor axis
    reduce_tied_gradients()               over the two pipeline stages that share the embedding
    step()                                norm, clip, optimizer

DeepSpeed partitions parameters, master weights and optimizer states, scales the loss, updates the
parameters and gathers them. ``gradients`` accumulates and reduces gradients, ``layer_gathers``
gathers ZeRO-3's parameters. DeepSpeed's engine is not called in a step: its forward, backward and
step run Python code for every parameter and module.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megaspeed.config.resolve import Run
from megaspeed.data_axis.axis import DataAxis
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.executor import InsteadOfLoss
from megaspeed.pipeline.schedules import End, Pass
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.weight_gradients import MatrixLayer
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.gradients import Gradients
from megaspeed.zero.host_inputs import HostInputs
from megaspeed.zero.layer_gathers import LayerGathers
from megaspeed.zero.model_states import (
    Fragment,
    StateFragment,
    check_places,
    gather_parameters,
    load_state,
    parameter_fragments,
    state_fragments,
)
from megaspeed.zero.muon import MuonUpdates
from megaspeed.zero.reductions import (
    OwnedSquares,
    add_gradients_of_other_end,
    all_gather_numbers,
    first_non_finite,
)
from megaspeed.zero.step_gathers import StepGathers
from megaspeed.zero.workarounds import (
    drop_gradient_partitions,
    keep_parameter_views,
    remove_module_hooks,
    stay_at_the_smallest_scale,
    use_norm,
    without_gathers,
)

Counters = dict[str, float]
"""scale, iteration, last_overflow_iteration and hysteresis of fp16's dynamic loss scaler."""


@dataclass(frozen=True)
class StepOutcome:
    """The result of one optimizer step, the same on every rank."""

    grad_norm: float
    """Norm before clipping over all logical parameters; NaN if a rank's loss was not finite."""
    skipped: bool  # because norm or loss was not finite, or the caller refused the step
    losses: list[float]  # the loss that each rank passed to ``step``, by rank; 0 for None
    notes: list[list[float]]  # the notes that each rank passed, by rank
    sums: list[float]  # of the ranks' ``summed``; empty if there is none


class ZeroEngine:
    """Forward, backward and step of one rank's part of the model.

    Args:
        engine: the ``DeepSpeedEngine`` (stage 1, 2 or 3) of this rank's module.
        axis: what this rank reduces and gathers. Each bucket is a parameter group.
        context: this rank's groups.
        owned_elements: full name -> how many leading elements of a parameter this rank counts in
            the norm.
        loss: the loss of the last pipeline stage.
    """

    def __init__(
        self,
        engine: Any,
        run: Run,
        axis: DataAxis,
        context: ParallelContext,
        *,
        owned_elements: Mapping[str, int],
        loss: VocabParallelLoss,
    ) -> None:
        self._engine = engine  # cleans up when it is freed
        self.module: nn.Module = engine.module
        self.optimizer = engine.optimizer
        self._context = context
        self.owned_elements = owned_elements
        self.loss = loss
        self.loss_factor = 1.0
        """The gradients are those of the loss multiplied by it. It may change between two steps."""
        self._has_auxiliary_loss = run.config.model.router_aux_loss_coef > 0.0
        self._axis = axis
        self._gathers: LayerGathers | None = None
        self._step_gathers: StepGathers | None = None
        self.non_finite_parameter: str | None = None
        """This rank's first parameter with a non-finite gradient in the last step, if any."""
        stay_at_the_smallest_scale(self.optimizer)
        remove_module_hooks(engine)
        drop_gradient_partitions(self.optimizer)
        keep_parameter_views(self.optimizer)
        check_places(self.optimizer, self.module, axis, context)
        recomputation = run.config.parallel.activation_checkpointing
        # On a CPU, an input is in host memory already.
        if recomputation == "full_offloaded" and not get_accelerator().is_synchronized_device():
            engine.module.inputs_in_host_memory = HostInputs().hooks
        if run.zero_stage == 3:
            self._gathers = LayerGathers(engine.module, context, axis)
        elif axis.gathers_after_step:
            flat = self.optimizer.bit16_groups_flat
            self._step_gathers = StepGathers(engine.module, flat, context, axis)
        parameters = dict(self.module.named_parameters())
        layers = dict(_layers_that_add(self.module, axis))
        self.gradients = Gradients(self.optimizer, run, axis, context, parameters, layers)
        self._clipping = run.config.gradient_clipping
        self.muon: MuonUpdates | None = None
        """Computes the updates of matrices, if the optimizer is Muon."""
        if run.muon is not None:
            flat = self.gradients.partitions
            self.muon = MuonUpdates(self.optimizer, flat, run, axis, context)
        # Gradients of the weight that this rank shares with another pipeline stage.
        tied = {each.name for each in axis.parameters if each.group == "tied"}
        self._tied = [each.values for each in self.gradients.fragments if each.name in tied]
        grid = context.grid
        experts = {parameter.name for parameter in axis.parameters if parameter.is_expert}
        # The squares of all ranks are added up, and divided by ``replicate``. So the squares of
        # experts are weighted as if experts had as many replicas as other parameters.
        weight = grid.replicate / grid.expert_copies.replicate
        self._owned_squares = OwnedSquares(
            self.gradients.fragments,
            owned_elements,
            {name: weight for name in experts if weight != 1.0},
        )

    def expect(self, passes: Iterable[tuple[Pass, int]]) -> None:
        """Called before a step with its passes, so that ZeRO-3 can gather ahead for the next."""
        if self._gathers is not None:
            self._gathers.expect(passes)

    def gather(self, chunk: int, *, forward: bool) -> None:
        """Start to gather a chunk; if not ``forward``, only what a backward needs."""
        assert self._gathers is not None, "only ZeRO-3 gathers chunks"
        self._gathers.gather(chunk, forward=forward)

    def release(self, chunk: int) -> None:
        assert self._gathers is not None, "only ZeRO-3 gathers chunks"
        self._gathers.release(chunk)

    def forward(
        self,
        x: Tensor,
        batch: MicroBatch,
        chunk: int = 0,
        instead_of_loss: InsteadOfLoss | None = None,
    ) -> Tensor:
        """Run a chunk of this rank's layers on one micro-batch.

        Args:
            x: token ids (B, S) on the first pipeline stage, hidden states (B, S, D) on the others.
            batch: the rows of the micro-batch. Their sample indices determine the dropout masks.
            chunk: its number on this rank, from 0.
            instead_of_loss: what the last pipeline stage computes; None for the loss.

        Returns:
            The loss, or what replaces it, on the last pipeline stage; hidden states on the others.
        """
        if torch.is_grad_enabled():
            self.gradients.begin_forward()
        if self._gathers is not None:
            self._gathers.begin("forward", chunk)
        factor = self.loss_factor * float(self.optimizer.loss_scale)
        # The loss is computed with its gradients, so the head's weight gets its gradient here.
        loss = partial(
            instead_of_loss or self.loss,
            targets=batch.targets,
            scale=factor,
            gradient_sum=self.gradients.sum_of,
        )
        scale = None
        if self._has_auxiliary_loss and torch.is_grad_enabled():
            # With a number instead of a tensor, each new value would need another compiled graph.
            scale = torch.full((), factor, device=x.device)
        output: Tensor = self.module(x, batch.samples, batch.documents, loss, chunk, scale)
        return output

    def backward(
        self,
        output: Tensor | GradientEdge,
        gradient: Tensor | None,
        chunk: int = 0,
        end: End = "step",
    ) -> None:
        """Back-propagate one micro-batch.

        Args:
            output: on the last pipeline stage the loss that ``forward`` returned; on the others the
                graph's edge at the output, because the output may have been sent and freed.
            gradient: with respect to the output of ``forward``; None for the loss.
            chunk: its number on this rank, from 0.
            end: what ends for the chunk with this backward, which determines what is reduced.
        """
        self.gradients.begin_backward(chunk, end)
        if self._gathers is not None:
            self._gathers.begin("backward", chunk)
        torch.autograd.backward(output, gradient)
        if missing := self.gradients.missing():
            raise RuntimeError(
                "Every parameter must have a gradient in every micro-batch, because all ranks "
                f"reduce the same buckets, but these have none: {', '.join(sorted(missing))}. Use "
                "the parameter in every forward, if need be multiplied by zero."
            )
        if self._gathers is not None:
            self._gathers.end_backward()

    def reduce_gradients(self) -> None:
        """Complete the reduction over the data axis, and partial gradients over the tensor axis."""
        self.gradients.reduce()

    def reduce_tied_gradients(self) -> None:
        """Sum the gradients of a weight that the first and the last pipeline stage share."""
        if not self._tied:
            return
        group, peer = self._context.pp_group, self._context.other_end_rank
        assert group is not None and peer is not None, (
            "a tied weight is on the first and last stage"
        )
        device = self._context.device
        add_gradients_of_other_end(self._tied, group, peer=peer, device=device)

    def step(
        self,
        loss: Tensor | None,
        learning_rate: float,
        notes: Sequence[Tensor | float | None] = (),
        summed: Tensor | None = None,
        refuses: Callable[[list[float], float], bool] | None = None,
    ) -> StepOutcome:
        """Clip by the global norm and take an optimizer step, on all ranks or on none.

        DeepSpeed divides the gradients by loss scale and clipping, updates this rank's master
        weights with AdamW, and copies them to its parameters. At ZeRO-1 and 2, the parameters are
        gathered beside the next forward.

        The host reads from the device only here, unless a number is not finite or the optimizer is
        offloaded.

        Args:
            loss: this rank's part of the loss, a scalar; None if it has none. If it is not finite
                on any rank, all ranks skip the step.
            learning_rate: the rate of this step, which each parameter group multiplies by its
                ``lr_ratio``.
            notes: numbers to send to the other ranks; None for 0. All ranks have equally many.
            summed: (n,) fp64, or None. It is replaced in place by its sum over all ranks.
            refuses: the losses of all ranks and the norm -> whether all ranks skip the step,
                although it is finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_ratio"]
        squares = self._owned_squares()
        context = self._context
        with context.timeline.part("world"):
            own = (squares, loss, *notes)
            reports = all_gather_numbers(own, context.world_group, context.device, summed)
        sums = [] if summed is None else reports.pop()
        losses = [report[1] for report in reports]
        scaled_norm = self._norm_of([report[0] for report in reports], losses)
        finite = math.isfinite(scaled_norm)
        # Only after a bad norm: the host waits for the device once for each parameter.
        self.non_finite_parameter = None if finite else first_non_finite(self.gradients.fragments)
        loss_scale = float(self.optimizer.loss_scale)  # of this step: the scaler may change it
        outcome = partial(
            StepOutcome,
            grad_norm=scaled_norm / loss_scale,
            losses=losses,
            notes=[report[2:] for report in reports],
            sums=sums,
        )
        if finite and refuses and refuses(losses, scaled_norm / loss_scale):
            # DeepSpeed's way to skip a step would lower the loss scale of fp16.
            self.gradients.end_step(taken=False)
            return outcome(skipped=True)
        if finite and self.muon is not None:
            # What DeepSpeed will multiply the other gradients by.
            excess = (scaled_norm / loss_scale + 1e-6) / self._clipping if self._clipping else 1.0
            self.muon.compute(1 / (loss_scale * max(1.0, excess)))
        self.gradients.hand_over()
        use_norm(self.optimizer, scaled_norm)  # the step clips to ``gradient_clipping`` by it
        with without_gathers():
            self.optimizer.step()
        if self._step_gathers is not None and not self.optimizer.overflow:
            self._step_gathers.start()
        self.gradients.end_step(taken=not self.optimizer.overflow)
        return outcome(skipped=bool(self.optimizer.overflow))

    def finish_gathers(self) -> None:
        """Wait until every parameter has the value of the last step, as forwards do by layer.

        Call it before parameters are read between two steps.
        """
        if self._step_gathers is not None:
            self._step_gathers.finish()

    def gather_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(full name, copy of the complete tensor shard) of each parameter; a collective."""
        self.finish_gathers()
        return gather_parameters(self.module)

    def state_fragments(self) -> Iterator[StateFragment]:
        """This rank's master weights and moments, to read or to write between two steps."""
        self.finish_gathers()
        return state_fragments(self.optimizer, self._axis, self._context)

    def parameter_fragments(self) -> Iterator[Fragment]:
        self.finish_gathers()
        return parameter_fragments(self.module, self._axis, self._context)

    def load_state(self, steps_taken: int) -> None:
        """Continue from the values that were written to ``state_fragments``.

        A collective over the data axis; see ``model_states.load_state``.
        """
        self.finish_gathers()
        load_state(self.optimizer, self._axis, steps_taken)
        self.gradients.steps_taken = steps_taken
        if self._gathers is not None:
            self._gathers.free_persistent()  # they still have the values from before

    def loss_scale(self) -> Counters | None:
        """The state of fp16's dynamic loss scale; None if the scale is constant."""
        scaler = self.optimizer.loss_scaler
        if not scaler.dynamic:
            return None
        return {
            "scale": float(scaler.cur_scale),
            "iteration": scaler.cur_iter,
            "last_overflow_iteration": scaler.last_overflow_iter,
            "hysteresis": scaler.cur_hysteresis,
        }

    def load_loss_scale(self, saved: Counters) -> None:
        """Load a saved dynamic loss scale. Does nothing if the scale of this run is constant."""
        scaler = self.optimizer.loss_scaler
        if scaler.dynamic:
            scaler.cur_scale = saved["scale"]
            scaler.cur_iter = saved["iteration"]
            scaler.last_overflow_iter = saved["last_overflow_iteration"]
            scaler.cur_hysteresis = saved["hysteresis"]

    def train(self, mode: bool) -> None:
        """Switch dropout on (True) or off (False)."""
        if self.module.training != mode:  # visits every module
            self.module.train(mode)

    def _norm_of(self, squares: Sequence[float], losses: Sequence[float]) -> float:
        """The norm, multiplied by the loss scale; NaN if the loss of a rank is not finite."""
        if not all(map(math.isfinite, losses)):
            return math.nan
        # Each replica has counted all elements of its partitions.
        return math.sqrt(sum(squares) / self._context.grid.replicate)


def _layers_that_add(
    module: nn.Module, axis: DataAxis
) -> Iterator[tuple[nn.Parameter, MatrixLayer]]:
    """Yield (weight, layer) of the linear layers that add the gradient in a product."""
    if axis.matrix_reduction.added_by == "product":
        for parameter in axis.parameters:
            if parameter.is_product:
                layer = module.get_submodule(parameter.name.removesuffix(".weight"))
                assert isinstance(layer, MatrixLayer)
                yield layer.weight, layer
