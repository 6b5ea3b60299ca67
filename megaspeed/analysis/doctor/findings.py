"""What the ranks measured, before it is evaluated."""

from dataclasses import dataclass, field

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
        ports: by rank, which machine it cannot connect to.
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
            ranks.setdefault(record.host, []).append(record.rank)
        return ranks

    def host_of(self, rank: int) -> str:
        """The machine of a rank; "?" if the rank did not answer."""
        record = self.records[rank]
        return "?" if record is None else record.host

    def crosses_nodes(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks are on more than one machine."""
        return len({self.host_of(rank) for rank in ranks}) > 1
