"""The files of ``examples/`` and the commands of docs/launching.md run, or their programs parse
them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from megaspeed.cli import parse as parse_command
from megaspeed.config.document import read_document
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document
from megaspeed.job.pretrain import parse_arguments as parse_pretrain
from tests.support.launched import free_port
from tests.support.machine import limit
from tests.support.nodes import ROOT
from tests.support.tiny import GPT2

pytestmark = pytest.mark.ranks

EXAMPLES = ROOT / "examples"
SECONDS = limit(240)

# Does what Slurm's programs do for the batch file, for two tasks on this machine.
SRUN = """#!/bin/bash
[ "$1" = "--cpus-per-task=$SLURM_CPUS_PER_TASK" ] || exit 3
shift
unset SLURM_CPUS_PER_TASK
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
code=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    wait "$task" || code=$?
done
exit $code
"""
SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames localhost") echo localhost ;;
    "requeue "*) echo "$2" >> "$REQUEUED" ;;
    *) exit 1 ;;
esac
"""


class Slurm:
    """A repository in which the batch file runs as a job, with replacements for srun
    and scontrol.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requeued = folder / "requeued"
        self.run_dir = folder / "run"
        (folder / "scripts").symlink_to(ROOT / "scripts")
        programs = folder / "bin"
        programs.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        config: dict[str, Any] = {
            "model": GPT2,
            "data": {"train": [str(ROOT / "LICENSE")], "validation_fraction": 0},
            "training": {"steps": 100_000, "run_dir": str(self.run_dir)},
            "train_batch_size": 4,
        }
        config["data"]["sequence_length"] = 16
        (folder / "run.json").write_text(json.dumps(config))

    def submit(self, *changes: str) -> subprocess.Popen[str]:
        """Start the job as slurmd does."""
        options = ["--config", "run.json", "--set", "training.log_interval=10", *changes]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK",)}
        places = [self.folder / "bin", Path(sys.executable).parent]
        return subprocess.Popen(
            ["bash", EXAMPLES / "slurm.sbatch", *options],
            cwd=self.folder,
            env={
                **kept,
                "PATH": ":".join([*map(str, places), os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT),
                "SLURM_JOB_ID": str(free_port()),
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_CPUS_PER_TASK": "1",
                "REQUEUED": str(self.requeued),
                "MEGASPEED_CACHE": str(self.folder / "cache"),
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def steps(self) -> list[int]:
        """Return the steps in metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines]


def end(job: subprocess.Popen[str]) -> str:
    """Wait for the job, then end its remaining processes. Return its output."""
    try:
        out, _ = job.communicate(timeout=SECONDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return out


@pytest.mark.timeout(600)
def test_the_slurm_job_saves_at_its_time_limit_is_queued_again_and_continues(
    tmp_path: Path,
) -> None:
    slurm = Slurm(tmp_path)
    job = slurm.submit()
    deadline = time.monotonic() + SECONDS
    while not slurm.steps() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGUSR1)  # B:USR1@300 does the same: it signals only the batch script
    out = end(job)
    assert job.returncode == 0, out
    assert "stopped by SIGUSR1" in out
    assert len(slurm.requeued.read_text().splitlines()) == 1
    done = slurm.steps()[-1]

    job = slurm.submit(f"training.steps={done + 2}")
    out = end(job)
    assert job.returncode == 0, out
    assert "resuming from" in out
    assert slurm.steps() == list(range(1, done + 3))
    assert len(slurm.requeued.read_text().splitlines()) == 1, "a finished run is not restarted"


def test_a_slurm_job_that_fails_is_not_queued_again(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    job = slurm.submit("gradient_clipping=-1")
    assert "gradient_clipping" in end(job)
    assert job.returncode == 2
    assert not slurm.requeued.exists()


def test_the_two_pods_of_kubernetes_start_a_run_that_is_right() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = [
        replicas[kind] for kind in ("Master", "Worker") for _ in range(replicas[kind]["replicas"])
    ]
    world_size = 0
    for rank, pod in enumerate(pods):
        spec = pod["template"]["spec"]
        (container,) = spec["containers"]
        given = {"$(RANK)": str(rank), "$(MASTER_ADDR)": "pod0", "$(MASTER_PORT)": "23456"}
        program, *arguments = container["command"]
        for name, value in given.items():
            arguments = [word.replace(name, value) for word in arguments]
        assert program == "torchrun" and container["name"] == "pytorch"
        ranks = container["resources"]["limits"]["nvidia.com/gpu"]
        launch = check_torchrun(arguments)
        assert (launch.nproc_per_node, launch.nnodes) == (str(ranks), str(len(pods)))
        # torchrun is the pod's first process. It kills the ranks before Kubernetes does.
        assert 240 <= launch.shutdown_timeout < spec["terminationGracePeriodSeconds"]
        assert (launch.node_rank, launch.master_addr, launch.master_port) == (rank, "pod0", 23456)
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        world_size += ranks
    run_dir = "training.run_dir=/shared/runs/gpt2_1.5b"
    assert run_dir in arguments
    config = ROOT / "ds_configs" / "gpt2_1.5b.json"
    world = World(world_size, "the hostfile", "cuda")
    assert check_document(read_document(config, [run_dir]), world).problems == ()


def check_torchrun(arguments: list[str]) -> Any:
    """Parse torchrun's arguments, and return its options."""
    options = get_args_parser().parse_args(arguments)
    rest = options.training_script_args
    check_program(options.training_script, rest, module=options.module)
    return options


def check_program(program: str, arguments: list[str], *, module: bool) -> None:
    """Check a script of ours, or our module, with its arguments."""
    if module:
        assert program == "megaspeed.cli"
        options = parse_command(arguments)
    else:
        assert program == "scripts/pretrain.py" and (ROOT / program).is_file()
        options = parse_pretrain(arguments)
    assert (ROOT / options.config).is_file()
