"""Measure what only a GPU can show, with one command and one Markdown report.

    python scripts/gpu_check.py            # one GPU, less than eight minutes
    python scripts/gpu_check.py --full     # 1 to 8 GPUs, more layouts, ZeRO-0 to 3; no time limit
    python scripts/gpu_check.py --tiny     # tiny shapes, ZeRO-3: the default if there is no GPU
    python scripts/gpu_check.py --dry-run  # the sections and their seconds

    machine --> megaspeed compare     step time, and peak memory predicted and measured
            --> megaspeed verify      bf16 and fp16 over NCCL, against one process
            --> megaspeed bench       megaspeed beside Hugging Face's model under plain DeepSpeed
            --> report.md             written again after each section

Each section is a command of its own, the most useful first. If one fails or exceeds its limit, the
next one still runs. A section is omitted if the remaining time is too short.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.measurement.turns import WARM_UP_STEPS
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.forecast import forecast
from megaspeed.planning.prediction import predict_peak_bytes
from megaspeed.supervision.process_end import ended_on_termination
from megaspeed.topology.devices import device_by_name, device_named, peak_by_name
from megaspeed.topology.grid import Grid

ROOT = Path(__file__).resolve().parents[1]
MEGASPEED = Path(sys.executable).with_name("megaspeed")

SECONDS = 440.0
"""The time limit of all sections on a GPU, without --full. The last one then ends in seconds."""

LIMIT = 2.0
"""The limit of one section, as a multiple of its expected seconds."""

COMMAND_SECONDS = 8.0  # imports, two checks of the processors, pictures: measured on a CPU
LAUNCH_SECONDS = 15.0  # imports: 6 on a CPU; CUDA, NCCL and the weights: estimated
COMPILE_SECONDS = 20.0  # of one block with an empty cache: estimated
VERIFY_SECONDS = 15.0  # of the tiny steps, and of the single process: estimated

MICRO_BATCHES = 4
"""The number of micro-batches in each timed step."""

MICRO_BATCH_SIZES = (32, 16, 8, 4, 2, 1)
USABLE_FRACTION = 0.92  # the rest of a GPU is for CUDA, NCCL and holes in the allocator
TINY_MICRO_BATCH_SIZE = 2
RANKS_WITHOUT_A_GPU = 2
TIMED_STEPS = 5
UNCOMPILED = 1.5  # step time of uncompiled blocks, relative to the predicted one: estimated

LAYOUTS = (
    Grid(1, 1, 1),
    *(Grid(2, 1, 1), Grid(1, 1, 2), Grid(1, 2, 1)),
    *(Grid(1, 4, 1), Grid(2, 2, 1), Grid(1, 2, 2)),
    *(Grid(1, 8, 1), Grid(4, 2, 1), Grid(1, 1, 8), Grid(2, 2, 2)),
)

TOKENS, IDS = 2**21, 512
"""The number of random ids that a model trains on, and their upper bound. No
tokenizer takes time.
"""

TINY_GPT2: dict[str, Any] = {
    "model": {"preset": "gpt2-tiny", "vocab_size": IDS, "num_attention_heads": 8},
    "data": {"sequence_length": 64},
}
TINY_LLAMA: dict[str, Any] = {
    "model": {"preset": "llama-tiny", "vocab_size": IDS},
    "data": {"sequence_length": 64},
}
GPT2_XL: dict[str, Any] = {
    "extends": str(ROOT / "ds_configs" / "gpt2_1.5b.json"),
    "data": {"sequence_length": 1024},
}
LLAMA_1B: dict[str, Any] = {
    "model": {
        "preset": "llama-2-7b",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 5632,
    },
    "data": {"sequence_length": 2048},
}
ENGINES = {"megaspeed": "megaspeed, bench", "hf-deepspeed": "Hugging Face + DeepSpeed, "}
SHARED = {
    "training": {"steps": 1000},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.1}},
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which the sections run.

    Attributes:
        gpus: the name of each visible GPU.
        memory_bytes: memory of the smallest GPU; 0 without one.
        facts: versions, by name.
    """

    gpus: tuple[str, ...]
    memory_bytes: int
    facts: dict[str, str]

    @property
    def device(self) -> str:
        """Return ``cuda`` or ``cpu``."""
        return "cuda" if self.gpus else "cpu"


H100 = Machine(
    gpus=("NVIDIA H100 80GB HBM3",),
    memory_bytes=81559 * 2**20,
    facts={"GPUs": "1 x NVIDIA H100 80GB HBM3"},
)
"""What a dry run assumes if there is no GPU."""


@dataclass(kw_only=True)
class Section:
    """One command and its outcome.

    Attributes:
        title: a unique title.
        command: a program and its arguments.
        figures_file: the JSON file that the command writes.
        labels: the labels of the figures, for the tables.
        expected: the seconds that it probably takes.
        not_run: why it did not run; None if it ran.
        seconds, code, output: results of the command; code is None if it ran out of time.
    """

    title: str
    command: Sequence[str | Path]
    figures_file: Path
    labels: dict[str, Any]
    expected: float = math.inf
    not_run: str | None = None
    seconds: float = 0.0
    code: int | None = None
    output: str = ""

    @property
    def failed(self) -> bool:
        """Return whether it ran and did not end well."""
        return self.not_run is None and self.code != 0

    @property
    def out_of_memory(self) -> bool:
        """Return whether it failed because of memory."""
        return self.failed and "out of memory" in self.output

    @property
    def figures(self) -> Any:
        """Return what the command wrote, or None if it wrote nothing."""
        if self.not_run is not None or not self.figures_file.exists():
            return None
        return json.loads(self.figures_file.read_text())


def main() -> int:
    """Run the sections and write the report. The exit code is 1 if a section failed."""
    options = parse_arguments()
    start = time.monotonic()
    # This needs a process of its own: a CUDA context here would take memory from the ranks.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        machine = process.submit(describe_machine).result()
    if options.dry_run and not machine.gpus:
        machine = H100
    options.tiny = options.tiny or not machine.gpus
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "report.md"
    seconds = math.inf if options.full or options.tiny else SECONDS
    if options.dry_run:
        print("\n".join(plan_lines(options, machine, start, seconds)))
        return 0
    done: list[Section] = []
    with ended_on_termination():
        for section in sections(options, machine):
            print(f"{section.title} ...", flush=True)
            carry_out(section, start + seconds)
            done.append(section)
            report.write_text("\n".join(report_lines(done, options, machine)) + "\n")
            print(f"    {ending(section)}", flush=True)
    print(f"wrote {report}")
    return 1 if any(section.failed for section in done) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full", action="store_true", help="1 to 8 GPUs, more layouts, ZeRO-0 to 3; takes hours"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the sections and the seconds they would take"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-check"), help="folder (runs/gpu-check)"
    )
    return parser.parse_args()


def describe_machine() -> Machine:
    """Look at torch and its GPUs. This opens a CUDA context."""
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
    return Machine(
        gpus=tuple(gpu.name for gpu in gpus),
        memory_bytes=min((gpu.total_memory for gpu in gpus), default=0),
        facts={
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "megaspeed": importlib.metadata.version("megaspeed"),
            "commit": output_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
            "GPUs": f"{len(gpus)} x {gpus[0].name}" if gpus else "none",
            "driver": output_of(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}, NCCL {nccl})",
            "torch that is needed": f"{needed_torch()}, built for CUDA",
            "DeepSpeed": importlib.metadata.version("deepspeed"),
            "transformers": importlib.metadata.version("transformers"),
            "Python": platform.python_version(),
        },
    )


def needed_torch() -> str:
    """Return the version of torch that setup.cfg requires."""
    requirements = importlib.metadata.requires("megaspeed") or []
    return next(line for line in requirements if line.startswith("torch"))


def output_of(*command: str) -> str:
    """Return the first line that a program prints, or "unknown" if it does not run."""
    with suppress(OSError, subprocess.CalledProcessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]
    return "unknown"


def plan_lines(
    options: argparse.Namespace, machine: Machine, start: float, seconds: float
) -> Iterator[str]:
    """Yield the sections, and which of them have time if each takes as long as expected."""
    listed = list(sections(options, machine))
    own = spent = time.monotonic() - start
    rows = []
    for section in listed:
        outcome = section.not_run or late(section, seconds - spent) or "runs"
        spent += section.expected if outcome == "runs" else 0.0
        limit = LIMIT * section.expected
        rows.append((section.title, f"{section.expected:.0f}", f"{limit:.0f}", outcome))
    yield from table(("section", "expected (s)", "limit (s)", ""), rows)
    yield f"Expected: {spent:.0f} s on {machine.facts['GPUs']}, {own:.0f} s of them in this script."


def late(section: Section, left: float) -> str | None:
    """Return why a section is omitted if this many seconds are left, or None if it fits."""
    if section.expected <= left:
        return None
    return f"{section.expected:.0f} s are expected, but only {left:.0f} of {SECONDS:.0f} s are left"


def sections(options: argparse.Namespace, machine: Machine) -> Iterator[Section]:
    """Yield all sections, the most useful first. Each is carried out before the next
    one is made.
    """
    ranks = len(machine.gpus) or RANKS_WITHOUT_A_GPU
    layouts = [layout for layout in LAYOUTS if layout.world_size <= ranks]
    stages = range(4) if options.full else (3,) if options.tiny else (1, 3)
    models = {"GPT-2 1.5B": GPT2_XL, "Llama 1.3B": LLAMA_1B}
    if options.tiny:
        models = {"tiny Llama": TINY_LLAMA}
    compared = [
        compare_section(name, config, layout, stages, options, machine)
        for name, config in models.items()
        for layout in (layouts if options.full else layouts[:1])
    ]
    yield from compared
    verifications = [
        section
        for layout in (layouts if options.full else layouts[-1:])
        for section in verify_sections(layout, options, machine)
    ]
    yield from verifications[:1]
    for stage in stages:
        for each in compared:
            if each.labels["layout"].pp * each.labels["layout"].tp == 1:
                yield from bench_sections(each, stage, options, machine)
        yield from verifications[1:] if stage == stages[0] else ()


def verify_sections(
    layout: Grid, options: argparse.Namespace, machine: Machine
) -> Iterator[Section]:
    """Yield bf16 and fp16 of a tiny model at one layout, against one process.

    In bf16, attention stays within documents, because a GPU has a separate kernel for this.
    """
    documents = json.dumps([str(ROOT / "megaspeed" / "**" / "*.py")])
    config = write_config(options.out / "verify.json", {**TINY_GPT2, "train_batch_size": 16})
    everything = [(precision, stage) for precision in ("bf16", "fp16") for stage in range(4)]
    for precision, stage in everything if options.full else [("bf16", 3), ("fp16", 1)]:
        settings = [*degrees(layout), f"zero_optimization.stage={stage}"]
        settings += [f"{precision}.enabled=true", "train_micro_batch_size_per_gpu=4"]
        # With a dynamic loss scale, the first steps would be skipped.
        settings += (
            ["fp16.loss_scale=1024"]
            if precision == "fp16"
            else ["data.reset_at_documents=true", f"data.train={documents}"]
        )
        yield section(
            f"verify {precision} {layout} ZeRO-{stage}",
            [MEGASPEED, "verify", "--config", config, "--world-size", str(layout.world_size)],
            ["--device", machine.device, "--steps", "5", "--set", *settings],
            out=options.out,
            expected=COMMAND_SECONDS + LAUNCH_SECONDS + VERIFY_SECONDS,
            labels={"kind": "verify", "layout": layout, "zero": stage, "precision": precision},
            not_run=(
                "fp16 needs a GPU" if precision == "fp16" and machine.device == "cpu" else None
            ),
        )


def compare_section(
    name: str,
    config: dict[str, Any],
    layout: Grid,
    stages: Sequence[int],
    options: argparse.Namespace,
    machine: Machine,
) -> Section:
    """Return a comparison of every ZeRO stage, at the largest micro-batch that is
    predicted to fit.
    """
    file = write_config(
        options.out / f"{file_name(name)}.json", {**config, "bf16": {"enabled": True}}
    )
    try:
        size, not_run = micro_batch_size(file, layout, stages, options, machine)
        run = load(file, batch_settings(layout, size), layout)
    except ConfigError as error:  # the heads of a model need not divide by every tensor degree
        size, not_run = 1, " ".join(error.problems)
        run = load(file, batch_settings(LAYOUTS[0], size), LAYOUTS[0])
    # The first step, the timed ones, and one that is watched and not compiled.
    steps = 1 + TIMED_STEPS + UNCOMPILED
    return section(
        f"compare {name} {layout}",
        [MEGASPEED, "compare", "--config", file, "--world-size", str(layout.world_size)],
        ["--stages", *map(str, stages), "--turns", "1", "--steps", str(TIMED_STEPS)],
        ["--out", options.out / file_name(f"{name} {layout}")],
        ["--set", *batch_settings(layout, size)],
        out=options.out,
        labels={"kind": "time", "model": name, "layout": layout, "run": run, "file": file},
        expected=expected_seconds(run, machine, len(stages), len(stages) * steps),
        not_run=not_run,
    )


def bench_sections(
    compared: Section, stage: int, options: argparse.Namespace, machine: Machine
) -> Iterator[Section]:
    """Yield megaspeed and Hugging Face + DeepSpeed in turns, on the same batch.

    Hugging Face's model needs more memory, so half the micro-batch is tried first, then a quarter.
    """
    labels, layout = compared.labels, compared.labels["layout"]
    largest = labels["run"].batch.micro_batch_size
    for size in dict.fromkeys(max(1, largest // share) for share in (2, 4)):
        settings = [*batch_settings(layout, size), f"zero_optimization.stage={stage}"]
        run = load(labels["file"], settings, layout)
        title = f"bench {labels['model']} {layout} ZeRO-{stage} micro-batch {size}"
        # megaspeed, and the peer with both of its settings: warm-up, timed steps, and one more step
        # each.
        steps = (1 + 2 * UNCOMPILED) * (WARM_UP_STEPS + TIMED_STEPS + 1)
        beside = section(
            title,
            [MEGASPEED, "bench", "--config", labels["file"]],
            ["--world-size", str(layout.world_size), "--peers", "hf-deepspeed"],
            ["--turns", "1", "--steps", str(TIMED_STEPS)],
            ["--output", options.out / file_name(title), "--set", *settings],
            out=options.out,
            labels={**labels, "row": f"ZeRO-{stage}", "run": run},
            expected=expected_seconds(run, machine, 3, steps),
            not_run=compared.not_run,
        )
        yield beside
        if not beside.out_of_memory or any(row["settings"] for row in contestants(beside)):
            break


def contestants(section: Section) -> list[dict[str, Any]]:
    """Return what a bench measured, with a row for each of a peer's settings."""
    rows: list[dict[str, Any]] = (section.figures or {}).get("contestants", [])
    return rows


def expected_seconds(run: Run, machine: Machine, launches: int, steps: float) -> float:
    """Return the expected seconds of a command with this many launches of ranks and
    steps in all.
    """
    gpu = device_by_name(machine.gpus[0] if machine.gpus else "")
    device = gpu or device_named("a100-80gb")
    cluster = Cluster(
        device=device,
        gpus_per_node=max(1, len(machine.gpus)),
        network_bandwidth=device.network_bandwidth,
    )
    starts = COMMAND_SECONDS + COMPILE_SECONDS + launches * LAUNCH_SECONDS
    return starts + steps * forecast(run, cluster).seconds


def section(
    title: str,
    *command: Sequence[str | Path],
    out: Path,
    labels: dict[str, Any],
    expected: float,
    not_run: str | None,
) -> Section:
    """Return a section whose command writes its figures to ``out``."""
    figures = out / f"{file_name(title)}.figures.json"
    figures.unlink(missing_ok=True)
    words = [word for part in command for word in part]
    # Insert it before --set, which takes all words after it.
    words[words.index("--config") : words.index("--config")] = ["--json", figures]
    return Section(
        title=title,
        command=words,
        figures_file=figures,
        labels=labels,
        expected=expected,
        not_run=not_run,
    )


def file_name(title: str) -> str:
    """Return the title without characters that a shell requires to be quoted."""
    return re.sub(r"[^\w.]+", "-", title.lower())


def write_config(file: Path, values: dict[str, Any]) -> Path:
    """Write a run's JSON on random tokens. If it has no ``extends``, add the common optimizer."""
    tokens = file.with_suffix(".bin")  # in nanoGPT's format
    np.random.default_rng(seed=0).integers(IDS, size=TOKENS, dtype=np.uint16).tofile(tokens)
    data = {**values["data"], "train": [str(tokens)], "validation_fraction": 0.0}
    shared = {} if "extends" in values else SHARED
    file.write_text(json.dumps({**shared, **values, "data": data}, indent=2) + "\n")
    return file


def degrees(layout: Grid) -> list[str]:
    """Return the degrees for ``--set``."""
    return [f"parallel.pipeline={layout.pp}", f"parallel.tensor={layout.tp}"]


def batch_settings(layout: Grid, micro_batch_size: int) -> list[str]:
    """Return the values of ``--set``: the layout, and ``MICRO_BATCHES`` micro-batches a step."""
    return [
        *degrees(layout),
        f"train_micro_batch_size_per_gpu={micro_batch_size}",
        f"train_batch_size={micro_batch_size * MICRO_BATCHES * layout.dp}",
    ]


def micro_batch_size(
    file: Path,
    layout: Grid,
    stages: Sequence[int],
    options: argparse.Namespace,
    machine: Machine,
) -> tuple[int, str | None]:
    """Return the largest micro-batch that ``megaspeed plan`` predicts to fit at each of these
    stages.

    The memory is that of the real GPUs. If none fits, the second value is a sentence that states
    it.
    """
    if options.tiny:
        return TINY_MICRO_BATCH_SIZE, None
    usable = USABLE_FRACTION * machine.memory_bytes
    for size in MICRO_BATCH_SIZES:
        peak = max(
            predict_peak_bytes(
                load(file, [*batch_settings(layout, size), f"zero_optimization.stage={z}"], layout)
            )
            for z in stages
        )
        if peak <= usable:
            return size, None
    return size, (
        f"the predicted peak of a micro-batch of {size} is {gib(peak)} GiB, and {gib(usable)} GiB "
        f"({USABLE_FRACTION:.0%} of the GPU's memory) are usable"
    )


def load(file: Path, settings: list[str], layout: Grid) -> Run:
    return load_run(file, settings, World(layout.world_size, "--world-size", "cuda"))


def carry_out(section: Section, end: float) -> None:
    """Run a section's command until it ends or exceeds its limit. ``end`` is the limit of all."""
    left = end - time.monotonic()
    section.not_run = section.not_run or late(section, left)
    if section.not_run is not None:
        return
    limit = None if left == math.inf else min(LIMIT * section.expected, left)
    log = section.figures_file.with_suffix(".log")
    start = time.monotonic()
    process = start_process(list(map(str, section.command)), log)
    try:
        with suppress(subprocess.TimeoutExpired):
            section.code = process.wait(limit)
    finally:
        end_process_group(process)
    section.seconds = time.monotonic() - start
    section.output = log.read_text(errors="replace")


def start_process(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own. Its output goes to ``log``."""
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_process_group(process: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of a command. ``compare`` gets time to end its own ranks."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(section: Section) -> str:
    """Return how it ended, in words."""
    if section.not_run is not None:
        return f"not run: {section.not_run}"
    code = "out of time" if section.code is None else f"exit code {section.code}"
    memory = ", out of memory" if section.out_of_memory else ""
    return f"{code}{memory}, {section.seconds:.0f} s"


def report_lines(
    done: Sequence[Section], options: argparse.Namespace, machine: Machine
) -> Iterator[str]:
    """Yield the report in Markdown."""
    if options.tiny:
        found = "--tiny was given: these are" if machine.gpus else "No GPU was found: these are"
        place = "" if machine.gpus else " on a CPU"
        yield f"**{found} tiny shapes{place}, and their figures mean nothing for a GPU.**"
        yield ""
    yield "# GPU check"
    yield ""
    yield from table(
        ("", ""), [*machine.facts.items(), ("GPU memory", f"{gib(machine.memory_bytes)} GiB")]
    )
    yield ""
    yield "## The same model as one process"
    yield ""
    headings = ("layout", "ZeRO", "precision", "equal", "largest difference", "relative", "allowed")
    yield from table(headings, [verify_row(s) for s in done if s.labels["kind"] == "verify"])
    models = dict.fromkeys(s.labels["model"] for s in done if s.labels["kind"] == "time")
    for model in models:
        yield from model_lines(model, [s for s in done if s.labels.get("model") == model], machine)
    yield ""
    yield "## Sections"
    for section in done:
        yield ""
        yield f"**{section.title}**: {ending(section)}"
        yield ""
        yield f"    {shlex.join(map(str, section.command))}"
        if section.failed:
            yield ""
            yield "```"
            yield from section.output.splitlines()[-30:]
            yield "```"


def verify_row(section: Section) -> tuple[object, ...]:
    labels, found = section.labels, section.figures
    head = (labels["layout"], labels["zero"], labels["precision"])
    if found is None:
        return (*head, ending(section), "", "", "")
    largest = found["largest"]
    figures = (largest["relative"], largest["allowed"])
    return (*head, "yes" if found["equal"] else "NO", largest["name"], *map(scientific, figures))


def model_lines(model: str, done: Sequence[Section], machine: Machine) -> Iterator[str]:
    """Yield step time and memory of one model."""
    run: Run = done[0].labels["run"]
    shape = run.config.model
    yield ""
    yield f"## {model}"
    yield ""
    yield (
        f"{shape.architecture}: {shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads of size {shape.head_dim}, {shape.num_key_value_heads} "
        f"key/value heads, feed-forward size {shape.intermediate_size}, vocabulary "
        f"{shape.vocab_size}; {run.config.data.sequence_length} tokens, {MICRO_BATCHES} "
        "micro-batches a step, bf16, activation checkpointing "
        f"{run.config.parallel.activation_checkpointing}. "
        "Random tokens, which all read from a file within the step. Median of the steps after the "
        "first ones."
    )
    yield ""
    flops = training_flops_per_token(shape, run.config.data.sequence_length)
    peak = peak_by_name(machine.gpus[0]) if machine.gpus else None
    yield (
        f"MFU = tokens/s x {flops:.4g} operations a token / (GPUs x "
        f"{'unknown' if peak is None else f'{peak:.4g}'} operations/s). A token's operations are "
        "those of the matrix products, forward and backward, with attention over the full square "
        "and without recomputation."
    )
    yield ""
    headings = ("engine", "layout", "row", "micro-batch", "step (ms)", "tokens/s", "MFU")
    memory = ("peak predicted (GiB)", "measured (GiB)", "predicted / measured")
    rows = [row for section in done for row in timing_rows(section, flops, peak)]
    yield from table((*headings, *memory), rows)


def timing_rows(section: Section, flops: float, peak: float | None) -> Iterator[tuple[object, ...]]:
    """Yield one row for each ZeRO stage that the section measured."""
    labels, found = section.labels, section.figures
    run: Run = labels["run"]

    head = ("megaspeed" if "row" not in labels else "bench", labels["layout"])

    def row(label: str, figures: dict[str, Any], *memory: float | None) -> Any:
        tokens = figures["tokens_per_second"]
        mfu = "n/a" if peak is None else f"{tokens * flops / (run.grid.world_size * peak):.1%}"
        step = f"{figures['step_time_seconds'] * 1e3:.1f}"
        size = run.batch.micro_batch_size
        return (*head, label, size, step, f"{tokens:.0f}", mfu, *memory_cells(*memory))

    if found is None:
        yield (*head, labels.get("row", ""), run.batch.micro_batch_size, ending(section))
    elif "pipeline_stages" in found:
        for each in found["rows"]:
            stages = (s for s in found["pipeline_stages"] if s["label"] == each["label"])
            fullest = max(
                (stage["peak_bytes"] for stage in stages),
                key=lambda size: size["measured"]["total"],
                default=None,  # its memory could not be counted
            )
            predicted = None if fullest is None else fullest["predicted"]["total"]
            yield row(each["label"], each, predicted, each["peak_bytes"])
        for label, reason in found["failures"].items():
            yield (*head, label, run.batch.micro_batch_size, reason)
    else:
        if not contestants(section):
            yield (*head, labels["row"], run.batch.micro_batch_size, ending(section))
        for each in contestants(section):
            figures = {**each, "step_time_seconds": each["step_seconds"]["median"]}
            on_gpu = found["device"] != "CPU"
            head = (f"{ENGINES[each['name']]}{each['settings'] or ''}", labels["layout"])
            yield row(labels["row"], figures, None, each["peak_bytes"] if on_gpu else None)


def memory_cells(predicted: float | None, measured: float | None) -> tuple[str, str, str]:
    first, second = ("n/a" if size is None else gib(size) for size in (predicted, measured))
    ratio = f"{predicted / measured:.2f}" if predicted and measured else "n/a"
    return first, second, ratio


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield a Markdown table. Short rows are filled up."""
    for cells in (headings, ["---"] * len(headings), *rows):
        filled = [*map(str, cells), *[""] * (len(headings) - len(cells))]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in filled)} |"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def scientific(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.1e}"


if __name__ == "__main__":
    sys.exit(main())
