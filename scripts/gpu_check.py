"""Measure what only a GPU can show, with one command and one Markdown report.

    python scripts/gpu_check.py            # one GPU, less than eight minutes
    python scripts/gpu_check.py --full     # 1 to 8 GPUs, more layouts, ZeRO-0 to 3; no time limit
    python scripts/gpu_check.py --tiny     # tiny shapes, ZeRO-3: the default if there is no GPU
    python scripts/gpu_check.py --dry-run  # the sections and their commands

    machine --> megaspeed compare     step time, and peak memory predicted and measured
            --> megaspeed verify      bf16 and fp16 over NCCL, against one process
            --> megaspeed bench       megaspeed beside Hugging Face's model under plain DeepSpeed
            --> report.md             written again after each section

Each section is a command of its own, the most useful first. If one fails or exceeds its limit, the
next one still runs. None begins in the last seconds.
"""

import argparse
import importlib.metadata
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.planning.prediction import predict
from megaspeed.supervision.process_end import ended_on_termination
from megaspeed.topology.devices import peak_by_name
from megaspeed.topology.grid import Grid
from megaspeed.units import GIB, markdown_table, three_digits

ROOT = Path(__file__).resolve().parents[1]
MEGASPEED = Path(sys.executable).with_name("megaspeed")

SECONDS, SECTION_SECONDS, LEAST_SECONDS = 440.0, 180.0, 80.0
"""Without --full, on a GPU: the limits of all sections and of one, and the least time for one."""

MICRO_BATCHES = 4  # of each timed step
MICRO_BATCH_SIZES = (32, 16, 8, 4, 2, 1)
USABLE_FRACTION = 0.92  # the rest of a GPU is for CUDA, NCCL and holes in the allocator
TINY_MICRO_BATCH_SIZE = 2
RANKS_WITHOUT_A_GPU = 2
TIMED_STEPS = 5

LAYOUTS = (
    Grid(1, 1, 1),
    *(Grid(2, 1, 1), Grid(1, 1, 2), Grid(1, 2, 1)),
    *(Grid(1, 4, 1), Grid(1, 4, 1, replicate=2), Grid(2, 2, 1), Grid(1, 2, 2)),
    *(Grid(1, 8, 1), Grid(4, 2, 1), Grid(1, 1, 8), Grid(2, 4, 1, replicate=2), Grid(2, 2, 2)),
)

TOKENS, IDS = 2**21, 512
"""The number of random ids that a model trains on, and their upper bound."""

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
SHARED = {
    "training": {"steps": 1000},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.1}},
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which the sections run."""

    gpus: tuple[str, ...]  # the name of each visible GPU
    memory_bytes: int  # of the smallest GPU; 0 without one

    @property
    def name(self) -> str:
        """Such as "8 x NVIDIA H100 80GB HBM3, 79.65 GiB"."""
        if not self.gpus:
            return "no GPU"
        return f"{len(self.gpus)} x {self.gpus[0]}, {GIB.named(self.memory_bytes)}"


H100 = Machine(gpus=("NVIDIA H100 80GB HBM3",), memory_bytes=81559 * 2**20)
"""What a dry run assumes if there is no GPU."""


@dataclass(kw_only=True)
class Section:
    """One command and its outcome."""

    kind: Literal["compare", "verify", "bench"]
    title: str  # unique
    command: Sequence[str | Path]  # a program and its arguments
    figures_file: Path  # the JSON file that the command writes
    layout: Grid
    run: Run | None = None  # what is trained, except by verify
    file: Path | None = None  # its JSON
    not_run: str | None = None  # why it did not run; None if it ran
    seconds: float = 0.0
    code: int | None = None  # None if it ran out of time
    output: str = ""

    @property
    def failed(self) -> bool:
        """Return whether it ran and did not end well."""
        return self.not_run is None and self.code != 0

    @property
    def figures(self) -> dict[str, Any]:
        """Return what the command wrote; empty if it wrote nothing."""
        if self.not_run is not None or not self.figures_file.exists():
            return {}
        figures: dict[str, Any] = json.loads(self.figures_file.read_text())
        return figures


def main() -> int:
    """Run the sections and write the report. The exit code is 1 if a section failed."""
    options = parse_arguments()
    # This needs a process of its own: a CUDA context here would take memory from the ranks.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        machine = process.submit(describe_machine).result()
    if options.dry_run and not machine.gpus:
        machine = H100
    options.tiny = options.tiny or not machine.gpus
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "report.md"
    end = time.monotonic() + (math.inf if options.full or options.tiny else SECONDS)
    if options.dry_run:
        for section in sections(options, machine):
            print(f"{section.title}: {section.not_run or command_of(section)}")
        return 0
    done: list[Section] = []
    with ended_on_termination():
        for section in sections(options, machine):
            print(f"{section.title} ...", flush=True)
            carry_out(section, end)
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
        "--dry-run", action="store_true", help="print the sections and their commands"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-check"), help="folder (runs/gpu-check)"
    )
    return parser.parse_args()


def describe_machine() -> Machine:
    """Look at the GPUs. This opens a CUDA context."""
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    memory = min((gpu.total_memory for gpu in gpus), default=0)
    return Machine(gpus=tuple(gpu.name for gpu in gpus), memory_bytes=memory)


def sections(options: argparse.Namespace, machine: Machine) -> Iterator[Section]:
    """Yield all sections, the most useful first."""
    ranks = len(machine.gpus) or RANKS_WITHOUT_A_GPU
    layouts = [layout for layout in LAYOUTS if layout.world_size <= ranks]
    stages = range(4) if options.full else (3,) if options.tiny else (1, 3)
    models = {"GPT-2 1.5B": GPT2_XL, "Llama 1.3B": LLAMA_1B}
    if options.tiny:
        models = {"tiny Llama": TINY_LLAMA}
    compared = [
        compare_section(
            name, config, layout, [z for z in stages if has_stage(layout, z)], options, machine
        )
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
            if each.layout.pp * each.layout.tp == 1 and has_stage(each.layout, stage):
                yield bench_section(each, stage, options)
        yield from verifications[1:] if stage == stages[0] else ()


def verify_sections(
    layout: Grid, options: argparse.Namespace, machine: Machine
) -> Iterator[Section]:
    """Yield bf16 and fp16 of a tiny model at one layout, against one process.

    In a pipeline, two chunks on each stage are verified, too, with ZeRO-3 and two groups. In bf16,
    attention stays within documents, because a GPU has a separate kernel for this.
    """
    documents = json.dumps([str(ROOT / "megaspeed" / "**" / "*.py")])
    config = write_config(options.out / "verify.json", {**TINY_GPT2, "train_batch_size": 16})
    stages = [stage for stage in range(4) if has_stage(layout, stage)]
    everything = [(precision, stage) for precision in ("bf16", "fp16") for stage in stages]
    chosen = [(*each, 1) for each in (everything if options.full else [("bf16", 3), ("fp16", 1)])]
    if layout.pp > 1:
        chosen.insert(1, ("bf16", 3, 2))
    for precision, stage, chunks in chosen:
        settings = [*degrees(layout), f"zero_optimization.stage={stage}"]
        settings += [f"{precision}.enabled=true", f"train_micro_batch_size_per_gpu={4 // chunks}"]
        if chunks > 1:
            settings += [f"parallel.virtual_stages={chunks}", "parallel.micro_batch_groups=2"]
            settings += [f"model.num_hidden_layers={layout.pp * chunks}", "train_batch_size=32"]
        # With a dynamic loss scale, the first steps would be skipped.
        settings += (
            ["fp16.loss_scale=1024"]
            if precision == "fp16"
            else ["data.reset_at_documents=true", f"data.train={documents}"]
        )
        yield section(
            "verify",
            f"verify {precision} {layout} ZeRO-{stage}" + (f" {chunks} chunks" * (chunks > 1)),
            layout,
            config,
            ["--device", "cuda" if machine.gpus else "cpu", "--steps", "5"],
            settings,
            out=options.out,
            not_run="fp16 needs a GPU" if precision == "fp16" and not machine.gpus else None,
        )


def compare_section(
    name: str,
    config: dict[str, Any],
    layout: Grid,
    stages: Sequence[int],
    options: argparse.Namespace,
    machine: Machine,
) -> Section:
    """Return a comparison of ZeRO stages, at the largest micro-batch that is predicted to fit."""
    values = {**config, "bf16": {"enabled": True}}
    file = write_config(options.out / f"{file_name(name)}.json", values)
    try:
        size, not_run = micro_batch_size(file, layout, stages, options, machine)
        run = load(file, batch_settings(layout, size), layout)
    except ConfigError as error:  # the heads of a model need not divide by every tensor degree
        size, not_run = 1, " ".join(error.problems)
        run = load(file, batch_settings(LAYOUTS[0], size), LAYOUTS[0])
    return section(
        "compare",
        f"compare {name} {layout}",
        layout,
        file,
        ["--stages", *map(str, stages), "--turns", "1", "--steps", str(TIMED_STEPS)],
        batch_settings(layout, size),
        out=options.out,
        run=run,
        not_run=not_run,
    )


def bench_section(compared: Section, stage: int, options: argparse.Namespace) -> Section:
    """Return megaspeed and Hugging Face + DeepSpeed in turns.

    Hugging Face's model needs more memory, so both train with a quarter of the micro-batch.
    """
    run, file, layout = compared.run, compared.file, compared.layout
    assert run is not None and file is not None
    size = max(1, run.batch.micro_batch_size // 4)
    settings = [*batch_settings(layout, size), f"zero_optimization.stage={stage}"]
    run = load(file, settings, layout)
    return section(
        "bench",
        f"{compared.title.replace('compare', 'bench')} ZeRO-{stage}",
        layout,
        file,
        ["--peers", "hf-deepspeed", "--turns", "1", "--steps", str(TIMED_STEPS)],
        settings,
        out=options.out,
        run=run,
        not_run=compared.not_run,
    )


def section(
    kind: Literal["compare", "verify", "bench"],
    title: str,
    layout: Grid,
    file: Path,
    arguments: Sequence[str],
    settings: Sequence[str],
    *,
    out: Path,
    not_run: str | None,
    run: Run | None = None,
) -> Section:
    """Return a section whose command writes its figures to ``out``."""
    figures = out / f"{file_name(title)}.figures.json"
    figures.unlink(missing_ok=True)
    command = [MEGASPEED, kind, "--config", file, "--world-size", str(layout.world_size)]
    if kind != "verify":
        command += ["--output", out / file_name(title)]
    return Section(
        kind=kind,
        title=title,
        command=[*command, *arguments, "--json", figures, "--set", *settings],
        figures_file=figures,
        layout=layout,
        run=run,
        file=file,
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
    """Return the degrees for ``--set``. Replicas are refused with ZeRO-0, the default."""
    settings = [f"parallel.pipeline={layout.pp}", f"parallel.tensor={layout.tp}"]
    if layout.replicate > 1:
        settings += [f"parallel.replicate={layout.replicate}", "zero_optimization.stage=1"]
    return settings


def has_stage(layout: Grid, zero_stage: int) -> bool:
    """Return whether a layout allows this ZeRO stage. Stage 0 refuses ``parallel.replicate``."""
    return zero_stage > 0 or layout.replicate == 1


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
    """Return the largest micro-batch that is predicted to fit at each of these stages.

    The memory is that of the real GPUs. If none fits, the second value is why.
    """
    if options.tiny:
        return TINY_MICRO_BATCH_SIZE, None
    usable = USABLE_FRACTION * machine.memory_bytes
    for size in MICRO_BATCH_SIZES:
        peak = max(
            predict(
                load(file, [*batch_settings(layout, size), f"zero_optimization.stage={z}"], layout)
            ).fullest.peak_bytes
            for z in stages
        )
        if peak <= usable:
            return size, None
    return size, (
        f"the predicted peak of a micro-batch of {size} is {GIB.named(peak)}, but only "
        f"{USABLE_FRACTION:.0%} of the GPU's {GIB.named(machine.memory_bytes)} are usable"
    )


def load(file: Path, settings: list[str], layout: Grid) -> Run:
    return load_run(file, settings, World(layout.world_size, "--world-size", "cuda"))


def carry_out(section: Section, end: float) -> None:
    """Run a section's command until it ends or exceeds its limit. ``end`` is the limit of all."""
    start = time.monotonic()
    left = end - start
    if section.not_run is None and left < LEAST_SECONDS:
        section.not_run = f"only {left:.0f} of {SECONDS:.0f} s are left"
    if section.not_run is not None:
        return
    limit = None if left == math.inf else min(SECTION_SECONDS, left)
    log = section.figures_file.with_suffix(".log")
    section.code = run_command(list(map(str, section.command)), log, limit)
    section.seconds = time.monotonic() - start
    section.output = log.read_text(errors="replace")


def run_command(command: list[str], log: Path, limit: float | None) -> int | None:
    """Return the exit code; None if the command was ended at its limit. It prints to ``log``."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        with process:  # its exit waits
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                process.terminate()  # a command of megaspeed then ends its ranks


def command_of(section: Section) -> str:
    return shlex.join(map(str, section.command))


def ending(section: Section) -> str:
    """Return how it ended, in words."""
    if section.not_run is not None:
        return f"not run: {section.not_run}"
    code = "out of time" if section.code is None else f"exit code {section.code}"
    return f"{code}, {section.seconds:.0f} s"


def report_lines(
    done: Sequence[Section], options: argparse.Namespace, machine: Machine
) -> Iterator[str]:
    """Yield the report in Markdown."""
    if options.tiny:
        yield "**These are tiny shapes, whose figures mean nothing for a GPU.**"
        yield ""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("megaspeed", "deepspeed")]
    yield "# GPU check"
    yield ""
    yield (
        f"{machine.name}; {', '.join(versions)}, torch {torch.__version__} (CUDA "
        f"{torch.version.cuda or 'none'})"
    )
    yield ""
    headings = ("section", "row", "micro-batch", "step ms", "tokens/s", "MFU", "peak GiB")
    yield from markdown_table(
        headings, [row for each in done for row in timing_rows(each, machine)]
    )
    yield ""
    yield (
        f"{MICRO_BATCHES} micro-batches of random tokens a step. MFU counts the matrix products "
        "of forward and backward, with attention over the full square and without recomputation."
    )
    for section in done:
        yield ""
        yield f"## {section.title}: {ending(section)}"
        yield ""
        yield f"    {command_of(section)}"
        if section.not_run is None:
            lines = section.output.splitlines()
            yield from ("", "```", *(lines[-30:] if section.failed else lines), "```")


def timing_rows(section: Section, machine: Machine) -> Iterator[tuple[str, ...]]:
    """Yield a row for each ZeRO stage, or for each contestant, that the section measured."""
    run, figures = section.run, section.figures
    if run is None:
        return
    flops = training_flops_per_token(run.config.model, run.config.data.sequence_length)
    peak = peak_by_name(machine.gpus[0]) if machine.gpus else None
    for row in figures.get("rows", figures.get("contestants", ())):
        tokens, size = row["tokens_per_second"], row["peak_bytes"]
        yield (
            section.title,
            row["label"],
            str(run.batch.micro_batch_size),
            three_digits(1e3 * run.tokens_per_step / tokens),
            f"{tokens:,.0f}",
            "-" if peak is None else f"{tokens * flops / (run.grid.world_size * peak):.1%}",
            "-" if size is None else GIB.of(size),
        )


if __name__ == "__main__":
    sys.exit(main())
