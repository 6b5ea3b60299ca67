"""A work-around for torch 2.13: a gloo group has one worker thread, not two.

ProcessGroupGloo.cpp, runLoop: after each collective, the worker thread assigns the name of the
collective to ``pgStatus_->lastCompletedWorkName`` of the group, without a lock. If two workers do
so at once, both free the string's old memory, or one writes to what the other has freed. Names of
more than 15 characters are on the heap (ALLGATHER_COALESCED, _REDUCE_SCATTER_BASE). Such a process
dies later, at any place: "malloc(): unaligned tcache chunk detected".

With one worker, collectives of a group run one after another, in the order in which they were
started. All ranks start them in the same order. Messages between two ranks need no worker.
"""

import os
from typing import Any

import torch.distributed as dist


def use_one_worker() -> None:
    """Make every gloo group that is created from now on have one worker thread.

    torch has no public option for it: ``new_group`` ignores options for gloo, and gloo's default is
    two threads for each device (ProcessGroupGloo.cpp, create_default; distributed_c10d.py:2163).
    """
    group_class: Any = dist.ProcessGroupGloo
    create = group_class.__init__
    if getattr(create, "has_one_worker", False):
        return

    def create_with_one_worker(group: Any, *arguments: Any, timeout: Any = None) -> None:
        if timeout is None:  # torch always states one
            create(group, *arguments)
            return
        options = group_class._Options()
        options._timeout = timeout
        # torch reads this variable in the same way, so these are the devices that it would use.
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        options._devices = [
            group_class.create_device(interface=name)
            for name in (names.split(",") if len(names) > 1 else ())
            if name
        ] or [group_class.create_default_device()]
        options._threads = 1
        create(group, *arguments, options)

    create_with_one_worker.has_one_worker = True  # type: ignore[attr-defined]
    group_class.__init__ = create_with_one_worker
