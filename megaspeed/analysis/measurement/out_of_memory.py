"""The report of a rank that is out of memory: predicted and measured memory, and best changes.

Memory of rank 5 (pipeline stage 1) in GiB, measured on the GPU:
                               predicted    measured
parameters                          2.90        2.90
...
Changes that free most memory on the fullest rank (predicted):
    18.11 GiB: --set parallel.activation_checkpointing=full
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megaspeed.analysis.costs.stage_memory import predict_memory
from megaspeed.analysis.planning.variants import Training, single_changes
from megaspeed.analysis.units import memory_unit
from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.training.worker import peak_memory
from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.model_states import held_gradients, held_optimizer_states, held_parameters

_MOST_CHANGES = 3


def explain_out_of_memory(run: Run, context: ParallelContext, engine: ZeroEngine | None) -> str:
    """A table and the changes, for this rank.

    Args:
        run: the run.
        context: this rank's coordinates and device.
        engine: holds the model states; None if memory ran out before it was built.
    """
    predicted = predict_memory(run, context.pp_rank)
    measured = {} if engine is None else _held_by(engine)
    rows: list[tuple[str, int, int | None]] = [
        ("parameters", predicted.peak.parameters, measured.get("parameters")),
        ("gradients", predicted.peak.gradients, measured.get("gradients")),
        ("optimizer states", predicted.peak.optimizer_states, measured.get("optimizer states")),
    ]
    others = predicted.peak.activations + predicted.peak.communication_buffers
    on_gpu = context.device.type == "cuda"
    most = peak_memory(context.device)
    rest = most - sum(measured.values()) if on_gpu and measured else None
    rows.append(("activations and buffers", others, rest))
    rows.append(("all, at the highest moment", predicted.peak.total, most))
    unit = memory_unit([predicted.peak.total])
    gpus_per_node = max(1, torch.cuda.device_count())
    lines = [
        f"Memory of rank {context.rank} (pipeline stage {context.pp_rank}) in {unit.name}, "
        f"measured {'on the GPU' if on_gpu else 'of the whole process, with its libraries'}:",
        f"{'':28}{'predicted':>12}{'measured':>12}",
        *(
            f"{name:28}{unit.of(before):>12}{'' if now is None else unit.of(now):>12}"
            for name, before, now in rows
        ),
    ]
    if on_gpu:
        total = torch.cuda.get_device_properties(context.device).total_memory
        reserved = torch.cuda.memory_reserved(context.device)
        lines.append(
            f"The GPU has {unit.of(total)} {unit.name}, of which torch has reserved "
            f"{unit.of(reserved)} {unit.name}."
        )
    changes = single_changes(Training(stated=run.config, run=run), gpus_per_node)[:_MOST_CHANGES]
    if changes:
        lines.append("Changes that free most memory on the fullest rank (predicted):")
        lines += [
            f"{unit.of(freed):>9} {unit.name}: --set {' '.join(text)}" for freed, text in changes
        ]
    else:
        lines.append("No single change of the settings frees memory: use more ranks.")
    return "\n".join(lines)


def _held_by(engine: ZeroEngine) -> dict[str, int]:
    return {
        "parameters": _bytes(held_parameters(engine)),
        "gradients": _bytes(held_gradients(engine)),
        "optimizer states": _bytes(held_optimizer_states(engine)),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of the storages of these tensors; shared storages count once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if tensor is not None and (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(storages.values())
