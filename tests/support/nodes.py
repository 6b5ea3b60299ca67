"""Two machines on this one: each has a network, a host name and folders of its own.

    node0                              node1
    +------------------+               +------------------+
    | ranks 0, 1       |     veth      | ranks 2, 3       |
    | 10.213.77.1      +---------------+ 10.213.77.2      |
    | own checkout,    |               | own checkout,    |
    | HOME, caches     +-----------+---+ HOME, caches     |
    +------------------+           |   +------------------+
                             shared folder

A node is a network namespace. Its processes cannot see the folder of the other node. The host name
of a node resolves to 127.0.1.1 on this node, as under Debian, and to its address on the other node.
Namespaces require root. If the system does not permit them, the nodes are two loopback addresses.
Then a node could read the folder of the other node, but does not use it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.machine import limit

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class Node:
    """One of the two machines.

    Attributes:
        folder: its own folder, with a checkout of this repository in it.
        address: the address under which the other node reaches it.
        enter: the first words of a command that runs on this node.
        ranks: how many ranks run there.
    """

    index: int
    folder: Path
    address: str
    enter: tuple[str, ...]
    ranks: int = 2

    def start(
        self, command: Sequence[str | Path], out: Path, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command in the node's folder. Its output goes to the file ``out``."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "LANG", "RES_OPTIONS", "VIRTUAL_ENV")
        }
        home = self.folder / "home"
        with out.open("wb") as stream:
            return subprocess.Popen(
                [*self.enter, *map(str, command)],
                cwd=self.folder,
                env={
                    **kept,
                    "HOME": str(home),
                    "XDG_CACHE_HOME": str(home / ".cache"),
                    "TMPDIR": str(home),
                    "PYTHONPATH": str(self.folder),
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    **variables,
                },
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self, *, off: bool) -> None:
        """Disconnect the node from its network, or connect it again. This requires namespaces."""
        script = "for link in /sys/class/net/ms*; do ip link set ${link##*/} $0; done"
        _system(*self.enter, "sh", "-c", script, "down" if off else "up")


@contextmanager
def two_nodes(folder: Path, ranks: int = 2) -> Iterator[list[Node]]:
    """Create two nodes with their folders in ``folder``. They and their networks end with the
    block.
    """
    folders = [folder / "first", folder / "second"]
    for own in folders:
        (own / "home").mkdir(parents=True)
        for part in ("megaspeed", "scripts"):
            shutil.copytree(ROOT / part, own / part, ignore=shutil.ignore_patterns("__pycache__"))
    with ExitStack() as stack:
        try:
            enters = stack.enter_context(_namespaces(folders))
            addresses = ["10.213.77.1", "10.213.77.2"]
        except (OSError, subprocess.CalledProcessError):
            enters, addresses = [(), ()], ["127.0.0.2", "127.0.0.3"]
        yield [
            Node(index, folders[index], addresses[index], enters[index], ranks)
            for index in range(2)
        ]


@contextmanager
def _namespaces(folders: list[Path]) -> Iterator[list[tuple[str, ...]]]:
    names = [f"megaspeed-{os.getpid()}-{index}" for index in range(2)]
    ends = [f"ms{os.getpid()}-{index}" for index in range(2)]
    with ExitStack() as stack:
        for name in names:
            _system("ip", "netns", "add", name)
            stack.callback(_system, "ip", "netns", "delete", name)
        _system("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            _system("ip", "link", "set", end, "netns", name)
            _system("ip", "-n", name, "address", "add", f"10.213.77.{index + 1}/24", "dev", end)
            _system("ip", "-n", name, "link", "set", end, "up")
            _system("ip", "-n", name, "link", "set", "lo", "up")
            _system("ip", "-n", name, "route", "add", "default", "dev", end)
        enters: list[tuple[str, ...]] = []
        for index, name in enumerate(names):
            # Each node has its own mount namespace, where the folder of the other node is covered.
            hidden = shlex.quote(str(folders[1 - index]))
            hosts = folders[index] / "hosts"
            other = f"10.213.77.{2 - index} node{1 - index}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{index}\n{other}\n")
            mounts = (
                f"mount --bind {shlex.quote(str(hosts))} /etc/hosts && mount -t tmpfs none {hidden}"
            )
            script = f'hostname node{index} && {mounts} && exec "$@"'
            own_host = ("unshare", "--uts", "--mount", "sh", "-c", script, "sh")
            enters.append(("ip", "netns", "exec", name, *own_host))
        for enter in enters:
            _system(*enter, "true")
        yield enters


def _system(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=limit(30))


def torchrun(node: Node, first: Node, port: int) -> list[str]:
    """Return the command that launches a script on one node, without the script."""
    return [
        *TORCHRUN,
        *("--nnodes", "2", "--node-rank", str(node.index)),
        *("--nproc-per-node", str(node.ranks)),
        *("--master-addr", first.address, "--master-port", str(port)),
    ]


def deepspeed(node: Node, first: Node, port: int) -> list[str]:
    """The same with deepspeed, with a hostfile and without ssh."""
    hostfile = node.folder / "hostfile"
    hostfile.write_text("".join(f"node{i} slots={node.ranks}\n" for i in range(2)))
    return [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(node.index)),
        *("--master_addr", first.address, "--master_port", str(port)),
    ]


def kubernetes(node: Node, first: Node, port: int) -> list[str]:
    """Return the command of the pods in examples/kubernetes.yaml, with this node's ranks."""
    job = yaml.safe_load((ROOT / "examples" / "kubernetes.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker" if node.index else "Master"]["template"]
    command: list[str] = pod["spec"]["containers"][0]["command"]
    options = command[1 : command.index("scripts/pretrain.py")]
    given = {"$(RANK)": node.index, "$(MASTER_ADDR)": first.address, "$(MASTER_PORT)": port}
    for name, value in {**given, "-node=8": f"-node={node.ranks}"}.items():
        options = [option.replace(name, str(value)) for option in options]
    return [*TORCHRUN, *options]


def run_on_both(
    nodes: Sequence[Node],
    commands: Sequence[Sequence[str | Path]],
    seconds: float,
) -> list[tuple[int, str]]:
    """Run one command on each node, both at the same time, until both have ended.

    Returns:
        Exit code and output of each.

    Raises:
        subprocess.TimeoutExpired: after ``limit(seconds)``. Nothing is left running.
    """
    outs = [node.folder / "out" for node in nodes]
    started = [
        node.start(command, out) for node, command, out in zip(nodes, commands, outs, strict=True)
    ]
    try:
        codes = [process.wait(timeout=limit(seconds)) for process in started]
    finally:
        for process in started:
            end_session(process)
    return [(code, out.read_text()) for code, out in zip(codes, outs, strict=True)]


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes that a command on a node may have left running."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
