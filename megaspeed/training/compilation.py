"""Compiles a rank's blocks and its loss with ``torch.compile``, as ``training.compile`` states.

    recomputation > hooks (ZeRO-3's gathers) > Block.forward > loss
    not compiled    not compiled               compiled        compiled

All blocks of a rank have the same code and shapes. Their parameters, sample indices and dropout
keys are inputs of the graph. So one graph is compiled for training (its forward and its backward),
one for evaluation, and no other one later. A block with experts has two parts, or four if ranks
share the experts, and each part has its own graphs. If only some blocks have rotary embeddings, or
only some are recomputed, each kind has its own graphs. ``fullgraph`` and ``dynamic=False`` make a
change of shape or an operation that cannot be traced an error, not a slow step.

Numbers are those of an uncompiled run up to rounding: in fp32 the loss is within 1e-6, because a
compiled kernel adds the elements of a row in another order. In bf16 and fp16 a compiled kernel also
keeps intermediates in fp32, so its results are nearer to the exact ones.

A C++ compiler (on a CPU) or Triton (on a GPU) makes the kernels. They are kept in torch's cache
between runs: TORCHINDUCTOR_CACHE_DIR, by default /tmp/torchinductor_<user>. Nothing here is
imported by a run that does not compile.
"""

import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megaspeed.config.errors import shortened
from megaspeed.config.resolve import Run
from megaspeed.model.documents import Segments
from megaspeed.model.gpt import GPT, ExpertBlock
from megaspeed.topology.activity import COMPILATION_TIMEOUTS, Activity
from megaspeed.topology.context import ParallelContext

_MOST_RANKS_NAMED = 4
_MOST_GRAPHS = 64
_OLDEST_TRITON_GPU = (7, 0)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class CannotCompile(RuntimeError):
    """``training.compile`` is true, but a rank lacks what torch's compiler needs."""


class Compilation:
    """What is compiled in this process, and how long that took.

    Only one can be in use: making one forgets what was compiled before.

    Args:
        activity: the phase "compiling" may take longer than other phases.
        keeps_order: whether operations stay in the order in which they were traced. Then
            collectives overlap with the products that follow them. Otherwise torch may reorder
            operations. This saves a few kernels, but collectives may no longer overlap.
        same_kernels: whether every rank with the same GPU must add in the same order, because ranks
            hold copies of a parameter whose gradients are never averaged. Otherwise each rank
            measures which of several kernels is the fastest, and two ranks may choose differently.
    """

    def __init__(
        self, activity: Activity, *, keeps_order: bool = False, same_kernels: bool = False
    ) -> None:
        self.seconds = 0.0
        """Seconds of compilation until now."""
        self._activity = activity
        self._phase: AbstractContextManager[None] | None = None
        self._start = 0.0
        # These imports take two seconds.
        import torch._dynamo.config as dynamo_config
        import torch._functorch.config as autograd_config
        import torch._inductor.config as inductor_config
        from torch._dynamo.callback import callback_handler

        # By default a function may have 8 graphs, and one more ends the run (``fullgraph``). Blocks
        # with and without rotary embeddings, recomputed or not, need 8 with an evaluation. (torch
        # 2.11 has no parameter for this.)
        dynamo_config.recompile_limit = _MOST_GRAPHS
        # What a backward computes again (a gathered input, a dropout mask) must not be kept by the
        # forward. With elimination of common subexpressions, torch would keep it.
        autograd_config.cse = False
        autograd_config.joint_custom_pass = _keep_collectives_of_backward
        # Only documents (model/documents.py) and exchanged tokens make sizes that vary.
        varying = [f"L['inputs'].segments.{name}" for name in Segments._fields]
        varying += ["L['inputs'].keys", "L['received']"]
        varying += [f"L['places'].{name}" for name in ("order", "tokens", "rows")]
        torch.compiler.config.dynamic_sources = ",".join(varying)
        inductor_config.reorder_for_peak_memory = not keeps_order
        inductor_config.deterministic = same_kernels
        # torch 2.13 (torch/csrc/inductor/static_launcher/cuda.cpp) calls cuLaunchKernel with
        # Python's GIL held. If a peer dies, CUDA's launch queue fills up, and the call waits for a
        # collective that never ends: no thread could report the failure. Triton's own launcher
        # (3.6 to 3.8, backends/nvidia/driver.*) releases the lock.
        inductor_config.use_static_cuda_launcher = False
        torch.compiler.reset()  # removes the callbacks of an earlier worker, too
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def compile_blocks(self, model: GPT) -> None:
        for block in model.blocks.values():
            if isinstance(block, ExpertBlock):  # several graphs; experts are chosen between them
                for name in block.COMPILED:
                    setattr(block, name, self.compiled(getattr(block, name)))
            else:
                block.forward = self.compiled(block.forward)

    def compiled(self, function: _Function) -> _Function:
        """The function, which is compiled when it is first called."""
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=False)
        return compiled

    def _begin(self, _: Any) -> None:
        self._phase = self._activity.during("compiling", timeouts=COMPILATION_TIMEOUTS)
        self._phase.__enter__()
        self._start = time.perf_counter()

    def _end(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._start
        if self._phase is not None:
            self._phase.__exit__(None, None, None)


def _keep_collectives_of_backward(graph: Any, _: Any) -> Any:
    """Keep the collectives of a backward in it.

    torch 2.13 (_functorch/partitioners.py) would move the all-gather of a linear layer's input,
    which does not depend on a gradient, into the forward, and keep its result.
    """
    for node in graph.graph.nodes:
        is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
        if is_collective and node.meta.get("partitioner_tag") != "is_forward":
            node.meta["partitioner_tag"] = "must_be_in_backward"
    return graph


def agree_to_compile(run: Run, context: ParallelContext) -> tuple[bool, str | None]:
    """Whether all ranks compile, and why not if "auto" would compile; all ranks call this together.

    A compiled backward may call its collectives in another order, so all ranks compile or none.

    Raises CannotCompile if ``training.compile`` is true, and a rank cannot compile.
    """
    if not run.config.training.compiles_on(context.device.type):
        return False, None
    problems: list[str | None] = [None] * context.grid.world_size
    dist.all_gather_object(problems, missing_compiler(context.device), context.world_group)
    named = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if not named:
        return True, None
    reasons = "; ".join(shortened(named, _MOST_RANKS_NAMED))
    if run.config.training.compile is True:
        raise CannotCompile(
            f"training.compile is true, but torch.compile cannot work on {reasons}. Install what "
            "is missing, or set training.compile to false."
        )
    return False, reasons


def missing_compiler(device: torch.device) -> str | None:
    """What ``torch.compile`` needs and this machine lacks, with a remedy; None if nothing."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.cuda.get_device_capability(device) < _OLDEST_TRITON_GPU:
            return f"Triton does not support {name}"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (pip install triton)"
        compilers, variable, what = ["gcc", "clang"], "CC", "C compiler, which Triton needs"
    else:
        compilers, variable, what = ["g++"], "CXX", "C++ compiler"
    stated = os.environ.get(variable)
    if not any(map(shutil.which, compilers if stated is None else [stated])):
        looked_for = " or ".join(compilers) if stated is None else f"{variable}={stated}"
        return f"no {what} was found (install g++, or set {variable}; looked for {looked_for})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's header files are missing (install python3-dev)"
    return None
