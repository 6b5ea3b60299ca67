"""What the ranks measured, before it is evaluated."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from megaspeed.analysis.doctor.links import Link
from megaspeed.analysis.doctor.record import Record


@dataclass(frozen=True, kw_only=True)
class LinkAnswer:
    """What one rank measured, or why it could not."""

    links: tuple[Link, ...]
    problem: str | None


@dataclass(kw_only=True)
class Findings:
    """Collected by rank 0. None or empty means not measured, because an earlier step failed.

    Attributes:
        records: the record of every rank; None if the rank did not answer.
        waited_seconds: how long rank 0 waited for the records.
        clocks: how many seconds a machine is ahead of rank 0, by its first rank; None: no answer.
        folder: by rank, what is wrong with training.run_dir there.
        ports: by rank, which machine it cannot reach, or why it cannot be reached.
        links: the measurement of every rank; None if the rank did not answer.
    """

    records: list[Record | None]
    waited_seconds: float
    clocks: dict[int, float | None] = field(default_factory=dict)
    folder: dict[int, str] | None = None
    ports: dict[int, str] | None = None
    links: list[LinkAnswer | None] | None = None

    @property
    def came(self) -> list[Record]:
        """The records of the ranks that answered."""
        return [record for record in self.records if record is not None]

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each machine."""
        ranks: dict[str, list[int]] = {}
        for record in self.came:
            ranks.setdefault(self.node_of(record), []).append(record.rank)
        return ranks

    @cached_property
    def shared_names(self) -> dict[str, int]:
        """Host names that several machines have, and how many."""
        machines = {(record.host, record.boot) for record in self.came}
        counts = Counter(host for host, _ in machines)
        return {host: count for host, count in counts.items() if count > 1}

    def node_of(self, record: Record) -> str:
        """The machine's name: its host name, with its boot id if others have the same name."""
        name = record.host
        return f"{name}/{record.boot[:8]}" if name in self.shared_names else name

    def host_of(self, rank: int) -> str:
        """The machine of a rank; "?" if the rank did not answer."""
        record = self.records[rank]
        return "?" if record is None else self.node_of(record)

    def crosses_nodes(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks are on more than one machine."""
        return len({self.host_of(rank) for rank in ranks}) > 1
