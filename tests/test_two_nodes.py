"""A run over two nodes, with pp across them and tp within each, equals the run of one process.

The doctor finds problems between the nodes.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.forked import run_forked
from tests.support.launched import free_port
from tests.support.machine import limit
from tests.support.nodes import (
    ROOT,
    Node,
    deepspeed,
    end_session,
    kubernetes,
    run_on_both,
    torchrun,
    two_nodes,
)
from tests.support.tiny import GPT2

STEPS = 4
CONFIG = {
    "model": GPT2,
    "data": {"train": ["text/a.txt"], "validation": ["text/b.txt"], "sequence_length": 16},
    "training": {"steps": STEPS, "log_interval": 1},
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
}
ACROSS = ["parallel.pipeline=2", "parallel.tensor=2"]
SECONDS = 240.0

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Create nodes. Each has its own configuration, at another path, and its own texts."""
    with two_nodes(tmp_path_factory.mktemp("nodes")) as both:
        lay_out(both)
        yield both


def lay_out(nodes: list[Node]) -> None:
    for node in nodes:
        texts = node.folder / "text"
        texts.mkdir()
        (texts / "a.txt").write_bytes((ROOT / "LICENSE").read_bytes())
        (texts / "b.txt").write_bytes((ROOT / "scripts" / "pretrain.py").read_bytes())
        config_of(node).parent.mkdir()
        config_of(node).write_text(json.dumps(CONFIG))


def config_of(node: Node) -> Path:
    return node.folder / f"configs-of-node{node.index}" / "tiny.json"


def pretrain(node: Node, run_dir: Path, *changes: str) -> list[str | Path]:
    options = ["--set", f"training.run_dir={run_dir}", *changes]
    return [node.folder / "scripts" / "pretrain.py", "--config", config_of(node), *options]


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record.get("loss", record.get("validation_loss")) for record in records]


@pytest.fixture(scope="module")
def alone(nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process with the texts of one node."""
    folder = tmp_path_factory.mktemp("alone")
    run_dir = folder / "run"
    (folder / "text").symlink_to(nodes[0].folder / "text")
    _, *arguments = pretrain(nodes[0], run_dir)
    ended = run_forked([ROOT / "scripts" / "pretrain.py", *arguments], folder)
    assert ended.returncode == 0, ended.stderr
    return losses(run_dir)


def train_on_both(
    launcher: Callable[[Node, Node, int], list[str]], nodes: list[Node], run_dir: Path
) -> list[float]:
    """Return the losses of a run of four ranks."""
    port = free_port()
    commands = [
        [*launcher(node, nodes[0], port), *pretrain(node, run_dir, *ACROSS)] for node in nodes
    ]
    for code, out in run_on_both(nodes, commands, SECONDS):
        assert code == 0, out
    return losses(run_dir)


def test_two_nodes_train_the_model_of_one_process(
    nodes: list[Node], alone: list[float], tmp_path: Path
) -> None:
    """This is under torchrun. Under deepspeed, the next test checks it until the network is cut."""
    run_dir = tmp_path / "shared" / "run"
    together = train_on_both(torchrun, nodes, run_dir)
    assert together == pytest.approx(alone, rel=1e-6)
    assert len(together) == STEPS + 1
    assert (run_dir / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").is_file()
    for node in nodes:
        assert list((node.folder / "home" / ".cache" / "megaspeed").iterdir()), "its own corpus"


@dataclass(frozen=True)
class Cut:
    """Both launches of a run whose network was cut.

    Attributes:
        codes, outs: exit code and output of each node.
        seconds: from the cut to the end of both.
    """

    codes: list[int]
    outs: list[str]
    seconds: float


def run_with_a_cut(
    launcher: Callable[[Node, Node, int], list[str]],
    nodes: list[Node],
    run_dir: Path,
    *changes: str,
) -> Cut:
    """Run over both nodes. After three steps, the second node loses its network."""
    port, outs = free_port(), [node.folder / "out" for node in nodes]
    endless = (*changes, "training.steps=100000", f"training.hang_timeout_seconds={limit(8)}")
    started = [
        node.start([*launcher(node, nodes[0], port), *pretrain(node, run_dir, *endless)], out)
        for node, out in zip(nodes, outs, strict=True)
    ]
    try:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + limit(SECONDS)
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
            assert time.monotonic() < deadline, outs[0].read_text() + outs[1].read_text()
            time.sleep(0.2)
        nodes[1].cut(off=True)
        since = time.monotonic()
        codes = [process.wait(timeout=limit(90)) for process in started]
        seconds = time.monotonic() - since
    finally:
        for process in started:
            end_session(process)
        nodes[1].cut(off=False)
    return Cut(codes, [out.read_text() for out in outs], seconds)


def test_a_network_that_is_cut_ends_both_nodes_and_each_names_the_other(
    nodes: list[Node], alone: list[float], tmp_path: Path
) -> None:
    """No connection is closed, so without this every rank would wait silently for half an hour.

    Before the cut, the two nodes train the model of one process, here under deepspeed, with one
    rank on each.
    """
    if not nodes[0].enter:
        assert train_on_both(deepspeed, nodes, tmp_path / "run") == pytest.approx(alone, rel=1e-6)
        pytest.skip("only a network namespace can be cut off, and it takes root")
    small = [replace(node, ranks=1) for node in nodes]
    cut = run_with_a_cut(deepspeed, small, tmp_path / "run", "parallel.pipeline=2")
    assert losses(tmp_path / "run")[:STEPS] == pytest.approx(alone[:STEPS], rel=1e-6)
    assert 0 not in cut.codes
    first, second = cut.outs
    assert re.search(r"no progress for \d+ s: rank 1 did not answer", first), first
    assert "rank 0 did not answer (node0). It keeps the store of all ranks" in second
    assert "rank 1 is in step " in second


def test_the_doctor_names_a_node_without_the_shared_folder_and_tp_across_nodes(
    nodes: list[Node],
) -> None:
    """training.run_dir is a relative path here, so each node has a folder of its own.

    The ranks meet under the name of the first node. On that node, the name is a loopback address.
    """
    options = ["doctor", "--config", "run.json", "--json", "doctor.json"]
    changes = ["--set", "parallel.tensor=4", "training.run_dir=runs/here"]
    for node in nodes:
        (node.folder / "run.json").write_text(json.dumps(CONFIG))
    port = free_port()
    first = replace(nodes[0], address="node0") if nodes[0].enter else nodes[0]
    commands = [
        [*kubernetes(node, first, port), "-m", "megaspeed.cli", *options, *changes]
        for node in nodes
    ]
    (code, out), (other_code, _) = run_on_both(nodes, commands, SECONDS)
    assert code != 0 and other_code != 0, out
    report = json.loads((nodes[0].folder / "doctor.json").read_text())
    assert [problem["rank"] for problem in report["problems"]] == [2, 3], report["problems"]
    assert {problem["check"] for problem in report["problems"]} == {"run folder"}
    if nodes[0].enter:  # without network namespaces, both have this machine's name
        assert report["nodes"] == {"node0": [0, 1], "node1": [2, 3]}
        assert "wrong: rank 3 (node1), run folder: " in out
        (remark,) = report["remarks"]
        assert remark.startswith("tp crosses nodes in 1 group, such as ranks [0, 1, 2, 3]")
    assert not (nodes[0].folder / "runs").exists()
