"""Fault injection: tests use it to check how a run reacts to a fault.

    MEGASPEED_FAULT="kill rank=1 step=3 work=Backward"
    MEGASPEED_FAULT="hang rank=0 phase='saving after step 4'"

    raise     RuntimeError                      stop      the process is stopped (SIGSTOP)
    memory    allocates too much memory         slow      sleeps for ``seconds`` (3) each time
    hang      sleeps forever                    nan       the stage's last hidden state becomes NaN
    kill      the process is killed (SIGKILL)   corrupt   one master weight gets another value
    lock      as hang, with Python's GIL held
    disk      no file of the process may grow past 32 KiB, so a save fails as on a full disk

``step=*`` is any step. ``work`` is the beginning of an instruction, such as Forward or
Backward(micro_batch=2). If it is omitted, the fault is injected at the beginning of the phase. All
kinds but ``slow`` are injected once. ``parameter`` is a part of the name of the parameter to
corrupt. If it is omitted, the first parameter of the rank is corrupted. ``attempt`` is the number
of restarts before; if omitted, any.
"""

import ctypes
import os
import resource
import shlex
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megaspeed.config.errors import ConfigError
from megaspeed.topology.activity import Activity
from megaspeed.zero.engine import ZeroEngine

VARIABLE = "MEGASPEED_FAULT"
_TOO_MANY_BYTES = 1 << 61  # over 1 EB: torch refuses this at once, also on a GPU
_MANY_SECONDS = 1 << 30
_LARGEST_FILE_BYTES = 32 << 10  # enough for the log and the metrics of a few steps


@dataclass
class _Fault:
    """The kind of a fault, and the rank, phase and instruction where it is injected."""

    kind: str
    rank: str
    step: str = ""
    phase: str = ""
    work: str = ""
    seconds: str = "3"
    parameter: str = ""
    attempt: str = ""
    was_injected: bool = field(default=False, init=False)

    def inject(self, activity: Activity, cause: Callable[[], object]) -> None:
        """Let ``activity`` call ``cause`` when this rank reaches the phase and the instruction."""

        def on_begin(phase: str, work: object) -> None:
            if self.step == "*":
                is_here = phase.startswith("step ")
            else:
                is_here = phase == (self.phase or f"step {self.step}")
            is_here = is_here and bool(self.work) == (work is not None)
            is_here = is_here and (not self.work or repr(work).startswith(self.work))
            if is_here and (not self.was_injected or self.kind == "slow"):
                self.was_injected = True
                cause()

        activity.on_begin = on_begin


def inject_into_process(activity: Activity, rank: int) -> None:
    """Inject the fault of this rank, if there is one and it does not need the model."""
    fault = _fault_of(rank)
    if fault is not None and fault.kind in _OF_THE_PROCESS:
        fault.inject(activity, lambda: _OF_THE_PROCESS[fault.kind](fault))


def inject_into_model(activity: Activity, rank: int, engine: ZeroEngine) -> None:
    """Inject the fault of this rank, if there is one and it changes values of the model."""
    fault = _fault_of(rank)
    if fault is not None and fault.kind == "corrupt":
        fault.inject(activity, lambda: _corrupt(fault, engine))
    elif fault is not None and fault.kind == "nan":
        is_due = threading.Event()

        def poison(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            if not is_due.is_set():
                return output
            is_due.clear()
            return output * torch.nan

        modules = dict(engine.module.named_modules())
        modules.get("head.norm", engine.module).register_forward_hook(poison)
        fault.inject(activity, is_due.set)


def _raise(fault: _Fault) -> None:
    raise RuntimeError(f"an injected fault ({VARIABLE})")


_OF_THE_PROCESS: dict[str, Callable[[_Fault], object]] = {
    "raise": _raise,
    "memory": lambda fault: torch.empty(
        _TOO_MANY_BYTES, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu"
    ),
    "hang": lambda fault: threading.Event().wait(),
    "lock": lambda fault: ctypes.PyDLL(None).sleep(_MANY_SECONDS),
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda fault: time.sleep(float(fault.seconds)),
    "disk": lambda fault: resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE_BYTES,) * 2),
}
_KINDS = (*_OF_THE_PROCESS, "nan", "corrupt")


def _corrupt(fault: _Fault, engine: ZeroEngine) -> None:
    held = (one for one in engine.state_fragments() if len(one.weights))
    next(one for one in held if fault.parameter in one.name).weights[0] += 1


def _fault_of(rank: int) -> _Fault | None:
    """Raise ConfigError if the variable cannot be read."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    kind, *settings = shlex.split(text)
    try:
        values: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
        fault = _Fault(kind, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{VARIABLE} is {text!r}: {error}"], VARIABLE) from error
    if kind not in _KINDS:
        raise ConfigError([f"{VARIABLE} is {text!r}, with an unknown kind"], VARIABLE)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_due = fault.rank == str(rank) and fault.attempt in ("", attempt)
    return fault if is_due else None
