"""All-reduce over a ring, from point-to-point sends: checked, timed and drawn.

    python examples/ring_all_reduce.py --ranks 2 4 8 --pictures runs/ring
    torchrun --nproc-per-node 4 examples/ring_all_reduce.py

Each of N ranks has a vector. Afterwards each rank has the sum of all. The ranks form a ring and cut
their vectors into N chunks. In each step, each rank sends one chunk to the rank after it, and
receives one from the rank before it. For N = 4, the table shows which chunk a rank sends:

              reduce-scatter: add    all-gather: copy
    step         0    1    2            3    4    5
    rank 0       3    2    1            0    3    2
    rank 1       0    3    2            1    0    3
    rank 2       1    0    3            2    1    0
    rank 3       2    1    0            3    2    1

Follow chunk 0 from row to row. Rank 1 sends its own values. Rank 2 adds its own and sends a sum of
two. Rank 3 sends a sum of three. Rank 0 adds its own values, and chunk 0 is complete. After these
steps, each rank r has the complete chunk r. The second half sends the complete chunks around the
ring, and adds nothing.

A rank sends 2 (N - 1) messages, each with 1 / N of the vector:

    seconds = 2 (N - 1) / N x bytes / bandwidth + 2 (N - 1) x latency

In any all-reduce, the busiest rank sends at least as many bytes: Patarasuk and Yuan, Bandwidth
optimal all-reduce algorithms for clusters of workstations, 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from megaspeed.measurement.local_ranks import DeviceType, RanksFailed, run_on_ranks
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment


def chunk_sent(rank: int, step: int, ranks: int) -> int:
    """Return the chunk that the table above shows."""
    return (rank - 1 - step) % ranks


def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send to the next rank and receive from the previous rank, both at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    to_next = dist.P2POp(dist.isend, sent, (rank + 1) % ranks)
    from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()


def reduce_scatter(chunks: Sequence[torch.Tensor]) -> None:
    """Complete chunk r of each rank r, the sum of all ranks' chunks r. Others are partial sums."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        arriving = chunks[chunk_sent(rank - 1, step, ranks)]
        received = torch.empty_like(arriving)
        exchange(chunks[chunk_sent(rank, step, ranks)], received)
        arriving += received


def all_gather(chunks: Sequence[torch.Tensor]) -> None:
    """Copy chunk r of rank r to all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1, 2 * (ranks - 1)):
        arriving = chunks[chunk_sent(rank - 1, step, ranks)]
        exchange(chunks[chunk_sent(rank, step, ranks)], arriving)


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace a contiguous tensor of any shape by its sum over all ranks, the same on each rank."""
    # Views of the tensor. Their lengths differ by at most 1, and may be 0.
    chunks = tensor.view(-1).tensor_split(dist.get_world_size())
    reduce_scatter(chunks)
    all_gather(chunks)


COLUMNS = ("ranks", "bytes", "ring", "library", "formula")
Row = tuple[int, int, float, float, float]


def milliseconds(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return milliseconds of each call, called in turns: median of 10 rounds of the
    slowest rank.
    """
    rounds = torch.zeros(10, len(calls), device=device)
    for times in rounds:
        for n, call in enumerate(calls):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(4):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[n] = 1000 * (time.perf_counter() - start) / 4
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return rounds.median(dim=0).values.tolist()


def measure(launch: LaunchEnvironment, counts: Sequence[int]) -> list[Row]:
    """Check and time the ring on this rank. ``counts`` are numbers of fp32 elements."""
    ranks, device = launch.world_size, torch.device("cpu")
    if torch.cuda.device_count() >= launch.local_world_size:
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=launch.rank, world_size=ranks)
    torch.manual_seed(launch.rank)
    small, large = (torch.zeros(2, n, device=device) for n in (1, 2**20))
    rows = []
    for count in counts:
        ours = torch.randint(-8, 9, (count,), device=device).float()  # sums are exact in any order
        theirs, zeros = ours.clone(), torch.zeros_like(ours)
        ring_all_reduce(ours)
        dist.all_reduce(theirs)
        if not torch.equal(ours, theirs):
            raise ArithmeticError(f"the ring's sum of {count} elements is not the library's")
        calls = [partial(ring_all_reduce, zeros), partial(dist.all_reduce, zeros)]
        if ranks > 1:  # a small and a large message, sent by all ranks at once, as in a step
            calls += [partial(exchange, *small), partial(exchange, *large)]
        ring, library, *one_step = milliseconds(calls, device)
        latency, of_large = one_step or (0.0, 0.0)
        per_byte = max(0.0, of_large - latency) / large[0].nbytes
        formula = 2 * (ranks - 1) * (zeros.nbytes / ranks * per_byte + latency)
        rows.append((ranks, zeros.nbytes, ring, library, formula))
    dist.destroy_process_group()
    return rows


def draw_steps(ranks: int, file: Path) -> None:
    """Draw which chunk each rank sends: a row for each rank, a column for each step."""
    steps = range(2 * (ranks - 1))
    sent = [[chunk_sent(rank, step, ranks) for step in steps] for rank in range(ranks)]
    figure, axes = plt.subplots(figsize=(1 + 1.1 * len(steps), 0.5 + 0.4 * ranks))
    axes.axis("off")
    axes.table(
        [[f"chunk {n}, sum of {min(s + 1, ranks)}" for s, n in enumerate(row)] for row in sent],
        cellColours=[[plt.get_cmap("Set3")(n % 12) for n in row] for row in sent],
        rowLabels=[f"rank {rank} to {(rank + 1) % ranks}" for rank in range(ranks)],
        colLabels=[f"step {s}: {'add' if s < ranks - 1 else 'copy'}" for s in steps],
        cellLoc="center",
        bbox=(0, 0, 1, 1),
    )
    figure.savefig(file, bbox_inches="tight")


def draw_times(rows: Sequence[Row], file: Path) -> None:
    """Draw milliseconds by bytes: a panel for each number of ranks."""
    numbers = sorted({row[0] for row in rows})
    size = (1 + 2.7 * len(numbers), 3)
    figure, panels = plt.subplots(1, len(numbers), figsize=size, sharey=True, squeeze=False)
    for axes, ranks in zip(panels[0], numbers, strict=True):
        _, sizes, *columns = zip(*(row for row in rows if row[0] == ranks), strict=True)
        for name, style, times in zip(COLUMNS[2:], ("o-", "s-", "k--"), columns, strict=True):
            axes.loglog(sizes, times, style, label=name, markersize=4)
        axes.set(title=f"{ranks} ranks", xlabel="bytes")
    panels[0][0].set_ylabel("milliseconds")
    panels[0][0].legend()
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    """Measure each number of ranks, print the times, and draw them if a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [2**n for n in range(8, 23, 2)]
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="ignored under torchrun")
    parser.add_argument("--elements", type=int, nargs="+", default=sizes)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where to draw")
    options = parser.parse_args()
    for name, most in (("ranks", 64), ("elements", 2**28)):
        for number in getattr(options, name):
            if not 1 <= number <= most:
                parser.error(f"--{name} {number}: give numbers from 1 to {most}")
    rows: list[Row] = []
    try:
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
        launch = read_launch_environment(os.environ)
        if launch.world_size > 1:  # a launcher has started the ranks
            rows = measure(launch, options.elements)
        else:
            for n in options.ranks:
                on: DeviceType = "cuda" if torch.cuda.device_count() >= n else "cpu"
                rows += run_on_ranks(measure, options.elements, world_size=n, device_type=on)[0]
        if launch.rank > 0:
            return
        print("".join(f"{name:>12}" for name in COLUMNS), " (milliseconds)")
        for ranks, size, *times in rows:
            print(f"{ranks:12}{size:12,}" + "".join(f"{time:12.3f}" for time in times))
        if options.pictures:
            draw_times(rows, options.pictures / "ring_times.png")
            for ranks in {row[0] for row in rows} - {1}:
                draw_steps(ranks, options.pictures / f"ring_steps_{ranks}.png")
    except (OSError, LaunchError, RanksFailed) as error:
        sys.exit(f"ring_all_reduce: {error}")


if __name__ == "__main__":
    main()
