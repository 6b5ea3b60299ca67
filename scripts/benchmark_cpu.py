"""Compare predicted and measured step times on the processors of this machine.

    python scripts/benchmark_cpu.py [--set KEY=VALUE ...] [--steps 20] [--json OUT]

    layouts     1 rank; 2 ranks: dp 2, pp 2, tp 2
    ZeRO        1 and 3

``planning.measured_cpu`` measures the machine, once for each number of ranks and ZeRO stage.
torchrun trains each layout with ``scripts/pretrain.py``. The measured time is the median of its
steps, as ``plan --calibrate`` reads it.

Other programs on the machine make the steps slower, but do not change the prediction. The last
column shows how many processors they used while a layout trained. Only rows with about 0 show the
error of the prediction.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.planning.calibration import (
    FEWEST_STEPS,
    WARM_UP_STEPS,
    Calibration,
    CalibrationError,
    calibrate,
)
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.measured_cpu import CpuSpeedError, measure_cpu

FOLDER = Path(__file__).parents[1]
LAYOUTS = {
    "1 rank": (1, ()),
    "dp 2": (2, ()),
    "pp 2": (2, ("parallel.pipeline=2",)),
    "tp 2": (2, ("parallel.tensor=2",)),
}
MODEL = (
    *("model.num_hidden_layers=6", "model.hidden_size=384", "model.num_attention_heads=6"),
    *("data.sequence_length=256", "train_micro_batch_size_per_gpu=2", "train_batch_size=16"),
)
"""A step of about 2 s on one core."""

ZERO_STAGES = (1, 3)


class TrainingFailed(RuntimeError):
    """A layout could not be trained. The text has its output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each layout. The exit code is 1 if one fails, 2 if the options are wrong."""
    options = _parser().parse_args(arguments)
    rows: list[dict[str, object]] = []
    errors = []
    clusters: dict[tuple[int, int], Cluster] = {}
    print(
        f"{'':<18} {'predicted':>10} {'measured':>10} {'quartiles':>16} {'error':>8} {'others':>7}"
    )
    try:
        for zero in ZERO_STAGES:
            config = FOLDER / "ds_configs" / f"zero{zero}.json"
            for name, (ranks, layout) in LAYOUTS.items():
                overrides = (*MODEL, *options.set, *layout)
                run = load_run(config, overrides, World(ranks, f"the layout {name}"))
                if (ranks, zero) not in clusters:
                    clusters[ranks, zero], notes = measure_cpu(run)
                    for note in notes:
                        print(note)
                with tempfile.TemporaryDirectory(prefix="megaspeed-cpu-") as folder:
                    begin = _clocks()
                    run_dir = _train(config, overrides, ranks, options.steps, Path(folder))
                    wall, all_programs, own = (b - a for a, b in zip(begin, _clocks(), strict=True))
                    found = calibrate(run_dir, clusters[ranks, zero])
                others = max(0.0, all_programs - own) / wall
                errors.append(abs(1 / found.factor - 1))
                rows.append(_show(f"{name}, ZeRO-{zero}", found, others))
    except (CpuSpeedError, CalibrationError, TrainingFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"error: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare predicted and measured steps on CPUs")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all layouts"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each layout (20)")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the figures to this file"
    )
    return parser


def _train(config: Path, overrides: Sequence[str], ranks: int, steps: int, folder: Path) -> Path:
    """Train some steps, and return the folder of the run."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(FOLDER / "scripts" / "pretrain.py")]
    command += ["--config", str(config), "--set", *overrides, f"training.run_dir={run_dir}"]
    command += [f"training.steps={max(steps, FEWEST_STEPS + WARM_UP_STEPS)}"]
    command += ["training.save_interval=0", "training.eval_batches=1"]
    command += ["scheduler.params.warmup_num_steps=2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        # The ranks' own messages come first, and torchrun's report last.
        raise TrainingFailed(f"training failed: {done.stdout[-1000:]}{done.stderr[:2000]}")
    return run_dir


def _clocks() -> tuple[float, float, float]:
    """Return wall time, CPU time of all programs, and of the processes that this one has waited
    for.
    """
    total, own = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.time(), total.user + total.system + total.nice, own.ru_utime + own.ru_stime


def _show(name: str, found: Calibration, others: float) -> dict[str, object]:
    predicted, measured = found.predicted_seconds, found.measured_seconds
    quartiles = f"{found.low * predicted:.2f} to {found.high * predicted:.2f}"
    error = predicted / measured - 1
    print(
        f"{name:<18} {predicted:>8.2f} s {measured:>8.2f} s {quartiles:>16} {error:>+8.1%} "
        f"{others:>7.2f}",
        flush=True,
    )
    return {"name": name, "error": error, "others": others, **found.as_json()}


if __name__ == "__main__":
    sys.exit(main())
