"""In which order GPUs run the work that their hosts start: NCCL without a GPU.

The model, for each rank:

    host                performs one action after another; it waits only at Synchronize
    compute stream      runs Compute and Wait, in the order of the host's calls
    a stream for each   runs Batch and Collective, in the order of the host's calls; each begins
    communicator        when it is first in its stream and all work that was on the compute stream
                        at its call is done

- Compute is done as soon as it is first in its stream.
- Wait holds the compute stream until an earlier Batch or Collective is done.
- Batch (``batch_isend_irecv``, one NCCL kernel) is done when each of its messages has met its other
  end. Messages meet if the batches of both ranks have begun; those from one rank to another meet in
  the order of the calls. NCCL may buffer a small message; here it never does (rendezvous).
- Collective is done when all members have begun it.
- Synchronize holds the host until all streams of its rank are idle. It stands for
  ``torch.cuda.synchronize`` and for every hidden synchronisation: ``CUDA_LAUNCH_BLOCKING=1``, a
  retry of the allocator, a value that the host reads.

Sources: torch 2.13 ``ProcessGroupNCCL``: operations of a communicator share one stream, which first
waits for the current stream; ``Work.wait`` makes the current stream wait. NCCL's user guide,
"Point-to-point communication" and "Group Calls".
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Group = tuple[str, tuple[int, ...]]
"""A communicator: (name, ranks)."""


@dataclass(frozen=True)
class Compute:
    """Kernels on the compute stream."""

    name: str


@dataclass(frozen=True)
class Batch:
    """Sends to and receives from other ranks, as one operation."""

    group: Group
    send_to: tuple[int, ...] = ()
    receive_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class Collective:
    """An operation of all ranks of a group."""

    group: Group
    name: str


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the Batch or Collective at this position of the program."""

    position: int


@dataclass(frozen=True)
class Synchronize:
    """The host waits for the device."""


Action = Compute | Batch | Collective | Wait | Synchronize
Program = Sequence[Action]


def find_stuck(programs: Mapping[int, Program]) -> dict[int, str]:
    """Run each rank's program. Return the ranks that never finish, and where each is stuck."""
    return _Machine(programs).run()


class _Machine:
    """All ranks, the messages between them and the collectives that only some have begun."""

    def __init__(self, programs: Mapping[int, Program]) -> None:
        self.ranks = {number: _Rank(number, program, self) for number, program in programs.items()}
        self._waiting = deque(self.ranks)
        self._messages: dict[tuple[Group, int, int, bool], deque[_Operation]] = {}
        # How many of them each rank has begun.
        self._collectives: Counter[tuple[Group, int]] = Counter()
        self._arrived: dict[tuple[Group, int], list[_Operation]] = {}

    def run(self) -> dict[int, str]:
        while self._waiting:
            self.ranks[self._waiting.popleft()].advance()
        return {number: stuck for number, rank in self.ranks.items() if (stuck := rank.stuck_at())}

    def begin(self, rank: int, operation: "_Operation") -> None:
        """Begin a rank's batch or collective. It is first in its stream and need not wait more."""
        match operation.action:
            case Batch(group, send_to, receive_from):
                operation.missing = len(send_to) + len(receive_from)
                for receiver in send_to:
                    self._meet(operation, group, rank, receiver, sends=True)
                for sender in receive_from:
                    self._meet(operation, group, sender, rank, sends=False)
            case Collective(group, _):
                operation.missing = 1
                number = self._collectives[group, rank]
                self._collectives[group, rank] += 1
                arrived = self._arrived.setdefault((group, number), [])
                arrived.append(operation)
                if len(arrived) == len(group[1]):
                    assert len({one.action for one in arrived}) == 1, "not the same collective"
                    for one in arrived:
                        self._count_down(one)

    def _meet(
        self, operation: "_Operation", group: Group, sender: int, receiver: int, *, sends: bool
    ) -> None:
        others = self._messages.setdefault((group, sender, receiver, not sends), deque())
        if others:
            self._count_down(others.popleft())
            self._count_down(operation)
        else:
            own = self._messages.setdefault((group, sender, receiver, sends), deque())
            own.append(operation)

    def _count_down(self, operation: "_Operation") -> None:
        operation.missing -= 1
        if operation.missing == 0:
            operation.done = True
            self._waiting.append(operation.rank)


@dataclass(slots=True, eq=False)
class _Operation:
    """A batch or collective in the stream of a communicator."""

    action: Batch | Collective
    rank: int
    after: int  # how many operations of the compute stream must be done before it begins
    missing: int = -1  # messages or members that have not come yet; -1 before it has begun
    done: bool = False


@dataclass(slots=True)
class _Rank:
    """A host and its streams."""

    number: int
    program: Program
    machine: _Machine
    position: int = 0
    # The operation that each one waits for.
    compute: list[_Operation | None] = field(default_factory=list)
    computed: int = 0
    streams: dict[Group, list[_Operation]] = field(default_factory=dict)
    finished: dict[Group, int] = field(default_factory=dict)
    operations: dict[int, _Operation] = field(default_factory=dict)  # by position in the program

    def advance(self) -> None:
        """Advance the host and the streams until none can continue without another rank."""
        while self._advance_streams() or self._advance_host():
            pass

    def stuck_at(self) -> str | None:
        if self.position < len(self.program):
            return f"host at {self.position}: {self.program[self.position]}"
        return None if self._is_idle() else "the end of its program, with work on its streams"

    def _is_idle(self) -> bool:
        return self.computed == len(self.compute) and all(
            self.finished[group] == len(stream) for group, stream in self.streams.items()
        )

    def _advance_host(self) -> bool:
        first = self.position
        while self.position < len(self.program):
            action = self.program[self.position]
            match action:
                case Synchronize():
                    if self.position > first:
                        return True  # let the streams run first
                    if not self._is_idle():
                        return False
                case Compute():
                    self.compute.append(None)
                case Wait(position):
                    self.compute.append(self.operations[position])
                case Batch() | Collective():
                    stream = self.streams.setdefault(action.group, [])
                    self.finished.setdefault(action.group, 0)
                    operation = _Operation(action, self.number, len(self.compute))
                    stream.append(operation)
                    self.operations[self.position] = operation
            self.position += 1
        return self.position > first

    def _advance_streams(self) -> bool:
        moved = False
        while self.computed < len(self.compute):
            waits_for = self.compute[self.computed]
            if waits_for is not None and not waits_for.done:
                break
            self.computed += 1
            moved = True
        for group, stream in self.streams.items():
            while self.finished[group] < len(stream):
                operation = stream[self.finished[group]]
                if operation.missing == -1 and operation.after <= self.computed:
                    self.machine.begin(self.number, operation)
                if not operation.done:
                    break
                self.finished[group] += 1
                moved = True
        return moved
