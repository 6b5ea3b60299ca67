"""The parts of ``gpu_check.py`` that need a process of their own. Each writes its figures as JSON.

    python scripts/gpu_parts.py machine FIGURES
    python scripts/gpu_parts.py one_rank FIGURES --config FILE     a model of real size
    python scripts/gpu_parts.py resume FIGURES --config FILE       a run that fails, and resumes
    python scripts/gpu_parts.py memory FIGURES --config FILE       the first step runs out of memory
    python scripts/gpu_parts.py killed FIGURES --config FILE       one of two ranks is killed

The exit code is 1 if a result is wrong; the last line states which.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.doctor.record import versions
from megaspeed.model import initialization
from megaspeed.model.documents import Documents
from megaspeed.model.gpt import GPT
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.planning.cluster import read_cluster
from megaspeed.planning.forecast import forecast
from megaspeed.planning.prediction import predict
from megaspeed.supervision.process_end import ended_on_termination
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.devices import device_by_name
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import set_defaults
from megaspeed.training.worker import Worker, peak_memory

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "-m", "megaspeed.cli", "train"]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

USABLE = 0.8
"""The share of the GPU's memory that is used. The rest is a margin, because no prediction has been
measured yet."""
MICRO_BATCH_SIZES = (64, 32, 16, 8, 4, 2, 1) if ON_GPU else (2,)
MICRO_BATCHES = 4  # of a step
WARM_UP_STEPS, TIMED_STEPS = 2, 4  # the first one also compiles
KERNELS = 25

SECONDS_TO_NAME = 30.0
"""A rank that was killed must be named within this time."""

SECONDS_TO_END = 3.0  # of a run that is ended; fewer than ``gpu_check`` waits

Figures = dict[str, Any]


class WrongOutcome(Exception):
    """A part did not give the expected result."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--config", type=Path)
    options = parser.parse_args()
    if options.part != "machine" and options.config is None:
        parser.error(f"{options.part} needs --config")
    figures: Figures = {}
    set_defaults()  # before CUDA is initialised
    try:
        with ended_on_termination():
            PARTS[options.part](figures, options.config)
    except WrongOutcome as outcome:
        print(outcome)
        return 1
    finally:
        options.figures.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def machine(figures: Figures, _: Path | None) -> None:
    """Versions, the kernels that torch chooses for attention, and the rate of a large product."""
    figures.update(describe_machine())
    show(figures)
    figures["attention"] = {name: attention_kernels(*each) for name, each in ATTENTION.items()}
    show(figures["attention"])
    figures["result"] = f"bf16 product: {product_rate() / 1e12:.3g} TFLOP/s"
    print(figures["result"])


def describe_machine() -> Figures:
    found: Figures = {
        **versions(),
        "processors": os.cpu_count(),
        "GPUs": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    }
    if ON_GPU:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found |= {
            "memory": torch.cuda.get_device_properties(DEVICE).total_memory,
            "capability": torch.cuda.get_device_capability(DEVICE),
            "cuDNN": torch.backends.cudnn.version(),
        }
        if shutil.which(query[0]):
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return found


WIDTH, LENGTH, HEAD = (1024, 2048, 64) if ON_GPU else (64, 128, 8)
MODEL: Figures = {
    "architecture": "llama",
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": WIDTH // HEAD,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": LENGTH,
}
SHARED_HEADS = {**MODEL, "num_key_value_heads": 4}
ATTENTION: dict[str, tuple[Figures, bool]] = {
    "causal": (MODEL, False),
    "causal, shared heads": (SHARED_HEADS, False),
    "documents": (MODEL, True),
    "documents, shared heads": (SHARED_HEADS, True),
    "window": ({**MODEL, "sliding_window": LENGTH // 4}, False),
    "window, shared heads": ({**SHARED_HEADS, "sliding_window": LENGTH // 4}, False),
}
LONGEST = 3
ATTENTION_WORDS = ("flash", "fmha", "attention", "sdp", "cudnn", "softmax")


def attention_kernels(values: Figures, has_documents: bool) -> list[str]:
    """Return the kernels of a block's attention in bf16: forward and backward."""
    config = ModelConfig(**values)
    with DEVICE:
        model = GPT(config).to(torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(config.vocab_size, (2, config.max_position_embeddings))
    documents = None
    if has_documents:
        begins = torch.zeros(tokens.shape, dtype=torch.bool)
        begins[:, :: LENGTH // 7] = True
        documents = Documents.beginning_at(begins).moved(lambda tensor: tensor.to(DEVICE))
    rows = kernels_of(lambda: model(tokens, None, documents).float().sum().backward())
    names = [name for name, *_ in rows if any(word in name.lower() for word in ATTENTION_WORDS)]
    if not ON_GPU:
        # Autograd's and our own wrappers can take longer than the operators that they call.
        names = [name for name in names if name.startswith("aten::")]
    return [name[:100] for name in names[:LONGEST]]


def product_rate() -> float:
    """Return the operations a second of a product of two square bf16 matrices."""
    size, times = (8192, 20) if ON_GPU else (512, 2)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    finish()
    begin = time.perf_counter()
    for _ in range(times):
        a @ b
    finish()
    return 2 * size**3 * times / (time.perf_counter() - begin)


def finish() -> None:
    """Wait until the device has done all its work."""
    if ON_GPU:
        torch.cuda.synchronize()


def kernels_of(work: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Return the kernels of ``work``: name, calls, ms; those that take longest come first.

    On a CPU these are torch's operators.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints two lines for each profile
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities) as profiler:
        work()
        finish()
    time_of = "self_device_time_total" if ON_GPU else "self_cpu_time_total"  # microseconds
    rows = [
        (each.key, each.count, getattr(each, time_of) / 1e3)
        for each in profiler.key_averages()
        # An annotation is a range of kernels, which would count twice.
        if str(each.device_type).endswith("CUDA") == ON_GPU and not each.is_user_annotation
    ]
    return sorted(rows, key=lambda row: -row[2])


def one_rank(figures: Figures, config: Path | None) -> None:
    """Train a model on one rank: times, memory, and the kernels that take longest."""
    assert config is not None
    run = largest_that_fits(config)
    flops = training_flops_per_token(run.config.model, run.config.data.sequence_length)
    row = device_by_name(torch.cuda.get_device_name()) if ON_GPU else None
    figures["micro-batch"] = run.batch.micro_batch_size
    figures["predicted peak"] = predict(run, DEVICE.type).fullest.peak_bytes
    if row is not None:
        cluster = read_cluster({"device": row.name, "nodes": 1}).cluster()
        assert cluster is not None
        planned = forecast(run, cluster)
        figures |= {"planned seconds": planned.seconds, "planned MFU": planned.mfu}
    launch = LaunchEnvironment(0, 1, 0, 1, source="gpu_check")
    begin = time.perf_counter()
    with (
        patch.object(initialization, "_draw_block", draw_on_device),
        ParallelContext.create(
            Grid(1, 1, 1), launch, timeout_seconds=300, store=dist.HashStore()
        ) as context,
    ):
        worker = Worker(run, context)
        load = random_batches(run)
        figures["seconds to build"] = seconds_since(begin)
        begin = time.perf_counter()
        for _ in range(WARM_UP_STEPS):
            result = worker.train_step(load, 1e-4)
        finish()
        figures["seconds to warm up"] = seconds_since(begin)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(TIMED_STEPS):
            result = worker.train_step(load, 1e-4)
        finish()
        seconds = (time.perf_counter() - begin) / TIMED_STEPS
        figures |= {
            "step seconds": seconds,
            "tokens/s": run.tokens_per_step / seconds,
            "MFU": flops * run.tokens_per_step / seconds / (row.peak_16 * 1e12) if row else None,
            "peak": peak_memory(DEVICE) if ON_GPU else None,
            "loss": result.loss,
        }
        if ON_GPU:
            figures["reserved"] = torch.cuda.max_memory_reserved()
        show(figures)
        if result.skipped:
            raise WrongOutcome(f"the last step was skipped: its loss is {result.loss}")
        kernels = kernels_of(lambda: worker.train_step(load, 1e-4))
    figures |= {"kernels": kernels[:KERNELS], "ms of all": sum(ms for *_, ms in kernels)}
    for name, calls, ms in figures["kernels"]:
        print(f"{ms:10.2f} ms {calls:6} x  {name[:120]}")


def largest_that_fits(config: Path) -> Run:
    """Return the run with the largest micro-batch that is predicted to fit."""
    usable = USABLE * torch.cuda.get_device_properties(DEVICE).total_memory if ON_GPU else 0
    for size in MICRO_BATCH_SIZES:
        sizes = f"train_micro_batch_size_per_gpu={size}", f"train_batch_size={size * MICRO_BATCHES}"
        run = load_run(config, sizes, World(1, "gpu_check", DEVICE.type))
        if not ON_GPU or predict(run).fullest.peak_bytes <= usable:
            return run
    raise WrongOutcome(f"a micro-batch of {size} is predicted to need over {USABLE:.0%} of the GPU")


def draw_on_device(seed: int, name: str, block: int, rows: int, width: int, scale: float) -> Tensor:
    """Draw initial weights on the device. A CPU needs a minute for these models."""
    return torch.empty(rows, width, device=DEVICE).normal_(0.0, scale).cpu()


def random_batches(run: Run) -> Callable[[int], MicroBatch]:
    shape = (run.batch.micro_batch_size, run.config.data.sequence_length + 1)
    tokens = torch.randint(run.config.model.vocab_size, (MICRO_BATCHES, *shape), device=DEVICE)
    samples = torch.arange(shape[0], device=DEVICE)
    return lambda number: MicroBatch(
        tokens[number, :, :-1].contiguous(), tokens[number, :, 1:].contiguous(), samples
    )


def resume(figures: Figures, config: Path | None) -> None:
    """A run that fails resumes from its checkpoint, with the same losses."""
    folder, settings = settings_for("resume", config)
    settings += ["training.save_interval=3"]
    code, _ = train(settings, "--world-size", "1", fault="raise rank=0 step=6")
    expect(code == 1, f"the run that must fail ended with exit code {code}")
    before = losses(folder)
    code, lines = train(settings, "--world-size", "1")
    after = losses(folder)
    figures |= {"losses before": before, "losses after": after}
    expect(code == 0, f"the resumed run ended with exit code {code}")
    expect(any("resumed at step 4" in line for line in lines), "the run began again at step 1")
    expect(sorted(after) == list(range(1, 7)), f"the steps are {sorted(after)}, not 1 to 6")
    differ = [step for step, loss in before.items() if after[step] != loss]
    expect(not differ, f"the losses of steps {differ} differ after the resumption")
    figures["result"] = "the same losses after the resumption"


def memory(figures: Figures, config: Path | None) -> None:
    """A first step that runs out of memory is repeated with smaller micro-batches."""
    _, settings = settings_for("memory", config)
    settings += ["train_micro_batch_size_per_gpu=auto"]
    fault = "memory rank=0 step=1 work=Backward attempt=0"
    code, lines = train(settings, "--world-size", "1", fault=fault)
    expect(code == 0, f"the run ended with exit code {code}")
    said = [line for line in lines if "start again, with micro-batches of" in line]
    expect(len(said) == 1, "the run has not started again")
    figures["result"] = said[0]


def killed(figures: Figures, config: Path | None) -> None:
    """A killed rank is named, and all others end."""
    folder, settings = settings_for("killed", config)
    ended: list[float] = []
    code, lines = train(
        [*settings, "train_batch_size=16"],
        "--world-size", "2",
        fault="kill rank=1 step=4",
        on_line=lambda line: ended.append(time.time()) if "was killed" in line else None,
    )  # fmt: skip
    expect(bool(ended), "no line names the rank that was killed")
    seconds = ended[0] - (folder / "metrics.jsonl").stat().st_mtime  # of the step before
    named = next(line for line in lines if "was killed" in line)
    expect(code == 1, f"the run ended with exit code {code}, not 1")
    expect("rank 1" in named, f"another rank is named: {named}")
    expect(seconds < SECONDS_TO_NAME, f"it was named after {seconds:.0f} s")
    figures["result"] = f"named within {math.ceil(seconds)} s"


def settings_for(name: str, config: Path | None) -> tuple[Path, list[str]]:
    """Return the run folder and the beginning of the command's settings."""
    assert config is not None
    folder = config.with_name(name)
    settings = ["--config", str(config), "--set", f"training.run_dir={folder}"]
    return folder, [*settings, "training.steps=6", "training.log_interval=1"]


def train(
    settings: list[str],
    *options: str,
    fault: str = "",
    on_line: Callable[[str], object] = lambda line: None,
) -> tuple[int, list[str]]:
    """Return the exit code of ``megaspeed train``, and the lines that it prints."""
    command = [*TRAIN, *options, *settings]
    print(f"$ {' '.join(command)}", flush=True)
    environment = {**os.environ, "MEGASPEED_FAULT": fault}
    lines = []
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                on_line(line)
                lines.append(line.strip())
        except KeyboardInterrupt:
            process.terminate()  # it ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            process.kill()
            raise
    return process.returncode, lines


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step in a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongOutcome(otherwise)


def seconds_since(begin: float) -> float:
    return round(time.perf_counter() - begin, 1)


def show(figures: Figures) -> None:
    for name, value in figures.items():
        print(f"{name}: {value}", flush=True)


PARTS = {each.__name__: each for each in (machine, one_rank, resume, memory, killed)}

if __name__ == "__main__":
    sys.exit(main())
