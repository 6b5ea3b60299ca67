"""Measure what only a GPU can show, with one command and one Markdown report.

    python scripts/gpu_check.py                  one GPU, less than nine minutes
    python scripts/gpu_check.py --full           also 1 to 8 GPUs, all ZeRO stages; takes hours
    python scripts/gpu_check.py --sections 3 5   some sections
    python scripts/gpu_check.py --dry-run        the commands, and the seconds that they may take

    1 machine       versions, the kernels that torch chooses, the rate of a product
    2 features      one rank of each layout trains on the device, with messages that are zeros
    3 ranks         several ranks share the GPU over NCCL; each layout beside one process
    4 real shapes   GPT-2 1.5B and a Llama of 1.3B: step time, memory, the longest kernels
    5 faults        resume, out of memory, a killed rank
    6 layouts       (--full) step time and memory of each layout, and Hugging Face beside it

The most useful sections run first. ``report.md`` and the log of the section are updated after each
command, so if the check is interrupted, the results of finished commands are kept. Without a GPU,
all sections run with tiny shapes over gloo.
"""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch

import megaspeed
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.files.paths import folder_problem
from megaspeed.supervision.process_end import ended_on_termination
from megaspeed.topology.grid import Grid
from megaspeed.topology.process_settings import nccl_version, ranks_of_a_gpu
from megaspeed.units import GIB, markdown_table, three_digits

Command = list[str | Path]

ROOT = Path(__file__).resolve().parents[1]
PARTS: Command = [sys.executable, ROOT / "scripts" / "gpu_parts.py"]
FEATURES: Command = [sys.executable, "-m", "tests.paper_gpu.on_device"]
MEGASPEED: Command = [sys.executable, "-m", "megaspeed.cli"]  # needs no installation

SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
"""Lets NCCL put several ranks on a GPU, with kernels that are small enough to run beside each
other, and without NVLink multicast (NVLS), which needs a GPU for each rank."""

TOKENS, IDS = 2**20, 512
"""The number of token ids that a model trains on, and their upper bound."""

JSON = dict[str, Any]

ADAMW: JSON = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
TINY: JSON = {
    "model": {"preset": "llama-tiny", "vocab_size": IDS},
    "data": {"sequence_length": 128},
    "training": {"steps": 1000, "compile": False},
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": ADAMW,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
COMPILED: JSON = {**TINY, "training": {"steps": 1000, "compile": True}}
GPT2_XL: JSON = {
    "extends": str(ROOT / "ds_configs" / "gpt2_1.5b.json"),
    "data": {"sequence_length": 1024},
}
LLAMA_1B: JSON = {
    **COMPILED,
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
DOCUMENTS = json.dumps([str(ROOT / "megaspeed" / "**" / "*.py")])


def degrees(grid: Grid) -> list[str]:
    """Return the degrees for ``--set``."""
    return [
        f"parallel.pipeline={grid.pp}",
        f"parallel.tensor={grid.tp}",
        f"parallel.context={grid.cp}",
        f"parallel.replicate={grid.replicate}",
    ]


COMPILE, OFFLOAD = "training.compile=true", 'zero_optimization.offload_optimizer={"device":"cpu"}'
OFFLOAD_INPUTS = "parallel.activation_checkpointing=full_offloaded"
FP16 = ("bf16.enabled=false", "fp16.enabled=true", "fp16.loss_scale=1024")  # a dynamic one skips
LAYOUTS: Mapping[str, tuple[Grid, int, tuple[str, ...]]] = {
    "dp 2": (Grid(1, 2, 1), 3, ("training.z_loss=1e-4",)),
    "pp 2": (Grid(2, 1, 1), 1, ("train_batch_size_schedule=0:4,1:8",)),
    "tp 2": (Grid(1, 1, 2), 2, ()),
    "pp 2 x dp 2 x tp 2": (Grid(2, 2, 2), 3, ()),
    "2 chunks": (Grid(2, 1, 1), 3, ("parallel.virtual_stages=2",)),
    "cp 2, ulysses": (Grid(1, 1, 1, cp=2), 3, ("parallel.context_method=ulysses",)),
    "2 replicas": (Grid(1, 4, 1, replicate=2), 3, ()),
    "compiled, tp 2 x dp 2": (Grid(1, 2, 2), 2, (COMPILE,)),
    "compiled, dp 2": (Grid(1, 2, 1), 3, (COMPILE,)),
    "cp 2 x dp 2, all_gather": (Grid(1, 2, 1, cp=2), 1, ("parallel.context_method=all_gather",)),
    "documents": (Grid(1, 2, 1), 3, ("data.reset_at_documents=true", f"data.train={DOCUMENTS}")),
    "window": (Grid(2, 1, 1), 2, ("model.sliding_window=64",)),
    "offload": (Grid(1, 2, 1), 2, (OFFLOAD,)),
    "full_offloaded": (Grid(1, 2, 1), 3, (OFFLOAD_INPUTS,)),
    "fp16": (Grid(2, 2, 1), 1, FP16),
}
"""What section 3 compares with one process, the most useful first: ranks, ZeRO stage, settings."""

FULL_GRIDS = (
    Grid(1, 1, 1),
    *(Grid(2, 1, 1), Grid(1, 1, 2), Grid(1, 2, 1)),
    *(Grid(1, 4, 1), Grid(1, 4, 1, replicate=2), Grid(2, 2, 1), Grid(1, 2, 2)),
    *(Grid(1, 8, 1), Grid(4, 2, 1), Grid(1, 1, 8), Grid(2, 4, 1, replicate=2), Grid(2, 2, 2)),
)
FULL_STAGES, FULL_MICRO_BATCH_SIZE, FULL_MICRO_BATCHES = "0123", 4, 4

SECONDS_TO_END = 5.0
"""The time that commands have to end their ranks, after they ran out of time."""
LAST_LINES = 40
"""The number of last lines of output in the report, for a case that failed, compare and bench."""


@dataclass(kw_only=True)
class Case:
    """A command, and how it ended."""

    title: str  # unique
    command: Command
    figures_file: Path  # the JSON file that the command writes
    lets_ranks_share: bool = False
    has_tables: bool = False  # whether the report has what it prints
    not_run: str | None = None  # why it does not run; None if it runs
    begun: bool = False
    seconds: float = 0.0
    code: int | None = None  # None if it ran out of time
    output: str = ""

    def of_ranks(self, ranks: int, gpus: int) -> Self:
        """Return the case, for so many ranks: they share GPUs, or NCCL refuses them."""
        self.lets_ranks_share, self.not_run = ranks > gpus > 0, why_not(ranks, gpus)
        return self

    @property
    def failed(self) -> bool:
        """Return whether it ran and did not end well."""
        return self.begun and self.not_run is None and self.code != 0

    @property
    def figures(self) -> JSON:
        """Return what the command wrote; empty if it wrote nothing."""
        text = self.figures_file.read_text() if self.figures_file.exists() else ""
        figures: JSON = {}
        with suppress(ValueError):  # the command may have been ended while it wrote
            if self.figures_file.suffix != ".jsonl":
                return json.loads(text) if text else figures
            for line in map(json.loads, text.splitlines()):  # the last line of a feature counts
                figures[line["case"]] = line["problem"] or line["seconds"]
        return figures

    @property
    def result(self) -> str:
        """Return the most important figure, in words."""
        figures = self.figures
        if self.figures_file.suffix == ".jsonl":
            failed = [name for name, value in figures.items() if isinstance(value, str)]
            names = f"; not: {', '.join(failed)}" if failed else ""
            return f"{len(figures) - len(failed)} of {len(figures)} work{names}"
        if "equal" in figures:
            return "equal to one process" if figures["equal"] else "DIFFERS from one process"
        if known := figures.get("result") or figures.get("verdict"):
            return str(known)
        lines = self.output.split("\n")[-2:-1] if self.failed else []
        return lines[0][:120].replace("|", "/") if lines else ""

    @property
    def ending(self) -> str:
        """Return how it ended, in words."""
        if self.not_run is not None:
            return f"not run: {self.not_run}"
        if not self.begun:
            return "not yet"
        code = "out of time" if self.code is None else f"exit code {self.code}"
        return f"{code}, {self.seconds:.0f} s"


@dataclass(kw_only=True)
class Section:
    """Cases that show one thing."""

    number: int
    name: str
    seconds: float  # for all cases; infinity without a limit
    cases: Sequence[Case]
    case_seconds: float = math.inf  # for each case
    least_seconds: float = 10.0  # that must be left for a case to begin
    as_many_as_fit: bool = False  # whether a case that the section's end stops has not failed
    together: bool = False  # whether its cases run side by side

    @property
    def title(self) -> str:
        return f"{self.number} {self.name}"


def main() -> int:
    """Run the sections and write the report. The exit code is 1 if a case failed."""
    options = parse_arguments()
    # It stays, so that the commands of the report can be repeated.
    work = Path(tempfile.mkdtemp(prefix="megaspeed-gpu-check-"))
    gpus = torch.cuda.device_count() or int(options.dry_run)
    sections = [
        section
        for section in all_sections(work, gpus, full=options.full)
        if section.number in options.sections
    ]
    if options.dry_run:
        print("\n".join(dry_run_lines(sections)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with ended_on_termination():
        run(sections, options.out)
    print(f"wrote {options.out / 'report.md'}; run folders and configurations are in {work}")
    return 1 if any(case.failed for section in sections for case in section.cases) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "also 1 to 8 GPUs, more layouts, ZeRO-0 to 3; takes hours"
    parser.add_argument("--full", action="store_true", help=text)
    text = "the numbers of the sections to run (all; 6 needs --full)"
    numbers = range(1, 7)
    parser.add_argument(
        "--sections", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=text
    )
    text = "print the sections, their commands and their limits"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "folder for the report and the logs (runs/gpu-check)"
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help=text)
    options = parser.parse_args()
    if not options.full and {*options.sections} == {6}:
        parser.error("section 6 needs --full")
    problem = folder_problem("--out", options.out)
    if problem is not None:
        parser.error(problem)
    return options


def all_sections(work: Path, gpus: int, *, full: bool) -> list[Section]:
    """Return the sections. Their configurations are written to ``work``.

    A section may use its own seconds and those that earlier sections have left. Without a GPU there
    is no limit.
    """
    tiny = write_config(work / "tiny.json", TINY)
    models = {"GPT-2 1.5B": GPT2_XL, "Llama 1.3B": LLAMA_1B} if gpus else {"tiny Llama": COMPILED}
    configs = {
        name: write_config(work / f"{file_name(name)}.json", models[name]) for name in models
    }
    limits = (25.0, 80.0, 135.0, 190.0, 50.0) if gpus else (math.inf,) * 5
    results = work / "features.jsonl"
    sections = [
        Section(number=1, name="machine", seconds=limits[0], cases=[part(work, "machine")]),
        Section(
            number=2,
            name="features",
            seconds=limits[1],
            cases=[Case(title="features", command=[*FEATURES, results], figures_file=results)],
        ),
        Section(
            number=3,
            name="ranks",
            seconds=limits[2],
            cases=[verify(name, tiny, work, gpus) for name in LAYOUTS],
            case_seconds=50.0 if gpus else math.inf,
            least_seconds=30.0,
            as_many_as_fit=True,
        ),
        Section(
            number=4,
            name="real shapes",
            seconds=limits[3],
            cases=[part(work, "one_rank", name, config) for name, config in configs.items()],
            case_seconds=115.0 if gpus else math.inf,
        ),
        Section(
            number=5,
            name="faults",
            seconds=limits[4],
            cases=[
                part(work, "resume", "resume", tiny),
                part(work, "memory", "memory", tiny),
                part(work, "killed", "killed", tiny).of_ranks(2, gpus),
            ],
            together=True,
        ),
    ]
    if full:
        sections.append(
            Section(
                number=6,
                name="layouts",
                seconds=math.inf,
                cases=[*full_cases(work, configs, gpus)],
            )
        )
    return sections


def part(work: Path, name: str, title: str = "", config: Path | None = None) -> Case:
    """Return the command of a part of ``gpu_parts.py``."""
    figures = work / f"{name}-{file_name(title)}.figures.json"
    command = [*PARTS, name, figures]
    if config is not None:
        command += ["--config", config]
    return Case(title=title or name, command=command, figures_file=figures)


def verify(name: str, config: Path, work: Path, gpus: int) -> Case:
    """Return the comparison of a layout with one process."""
    grid, zero_stage, settings = LAYOUTS[name]
    figures = work / f"verify-{file_name(name)}.figures.json"
    case = Case(
        title=f"{name}, ZeRO-{zero_stage}",
        command=[
            *(*MEGASPEED, "verify", "--config", config, "--world-size", str(grid.world_size)),
            *("--device", "cuda" if gpus else "cpu", "--steps", "3", "--json", figures),
            *("--set", *degrees(grid), f"zero_optimization.stage={zero_stage}", *settings),
        ],
        figures_file=figures,
    ).of_ranks(grid.world_size, gpus)
    if name == "fp16" and not gpus:
        case.not_run = "fp16 needs a GPU"
    return case


def why_not(ranks: int, gpus: int) -> str | None:
    """Return why NCCL refuses so many ranks on these GPUs; None if it does not."""
    if ranks <= gpus or not torch.cuda.is_available():
        return None
    if ranks <= gpus * ranks_of_a_gpu({**os.environ, **SHARING}):
        return None
    version = ".".join(map(str, nccl_version()))
    return f"NCCL {version} refuses several ranks on a GPU; 2.30 or newer allows them"


def full_cases(work: Path, configs: Mapping[str, Path], gpus: int) -> Iterator[Case]:
    """Yield the comparison of ZeRO stages at each layout, and of megaspeed with Hugging Face."""
    size = FULL_MICRO_BATCH_SIZE if gpus else 1
    grids = [grid for grid in FULL_GRIDS if grid.world_size <= max(gpus, 1)]
    for (name, config), grid in product(configs.items(), grids):
        # Replicas are refused with ZeRO-0.
        stages = FULL_STAGES if grid.replicate == 1 else FULL_STAGES.replace("0", "")
        arguments = {"compare": ["--stages", *stages], "bench": ["--peers", "hf-deepspeed"]}
        for kind in ("compare", "bench") if grid.pp * grid.tp == 1 else ("compare",):
            title = f"{kind} {name} {grid}"
            figures = work / f"{file_name(title)}.figures.json"
            ranks = ["--world-size", str(grid.world_size)]
            command = [*MEGASPEED, kind, "--config", config, *ranks, *arguments[kind]]
            command += ["--turns", "1", "--output", work / file_name(title), "--json", figures]
            settings = [*degrees(grid), "zero_optimization.stage=1"]
            settings.append(f"train_micro_batch_size_per_gpu={size}")
            settings.append(f"train_batch_size={size * FULL_MICRO_BATCHES * grid.dp}")
            command += ["--set", *settings]
            case = Case(title=title, command=command, figures_file=figures, has_tables=True)
            try:
                load_run(config, settings, World(grid.world_size, "--world-size", "cuda"))
            except ConfigError as error:  # such as 25 heads, which 2 tensor ranks cannot share
                case.not_run = " ".join(error.problems)
            yield case


def write_config(file: Path, values: JSON) -> Path:
    """Write a run's JSON. It trains on tokens of which each is near the one before it."""
    tokens = file.with_name("tokens.bin")  # in nanoGPT's format
    if not tokens.exists():
        steps = np.random.default_rng(seed=0).integers(3, size=TOKENS)
        (np.cumsum(steps) % IDS).astype(np.uint16).tofile(tokens)
    data = {**values["data"], "train": [str(tokens)], "validation_fraction": 0.0}
    file.write_text(json.dumps({**values, "data": data}, indent=2) + "\n")
    return file


def file_name(title: str) -> str:
    """Return the title without characters that a shell requires to be quoted."""
    return re.sub(r"[^\w.]+", "-", title.lower())


def run(sections: Sequence[Section], out: Path) -> None:
    """Run all sections. After each command, write what is known."""
    begin, seconds = time.monotonic(), 0.0
    for section in sections:
        seconds += section.seconds
        end, log = begin + seconds, out / f"{section.number}-{file_name(section.name)}.log"
        log.write_text("")
        print(f"{section.title} ...", flush=True)
        for group in [section.cases] if section.together else [[case] for case in section.cases]:
            if end - time.monotonic() < section.least_seconds:
                for case in group:
                    case.not_run = case.not_run or "no time is left"
            own_end = time.monotonic() + section.case_seconds
            carry_out(group, min(end, own_end), log)
            for case in group:
                if section.as_many_as_fit and case.begun and case.code is None and end < own_end:
                    case.not_run = "not finished when the time of the section was over"
            for case in group:
                print(f"    {case.title}: {case.ending}; {case.result}", flush=True)
            write_report(sections, out)


def carry_out(cases: Sequence[Case], end: float, log: Path) -> None:
    """Run these cases side by side. Those that have not ended at ``end`` are ended then."""
    begin = time.monotonic()
    running: list[tuple[Case, subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for case in cases:
            if case.not_run is None:
                running.append((case, *start(case)))
                case.begun = True
        waited = list(running)
        while waited and time.monotonic() < end:
            time.sleep(0.05)
            for case, process, _ in waited:
                case.code, case.seconds = process.poll(), time.monotonic() - begin
            waited = [each for each in waited if each[0].code is None]
    finally:
        for _, process, _ in running:
            process.terminate()  # a command of megaspeed then ends its ranks
        last = time.monotonic() + SECONDS_TO_END
        for case, process, output in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, last - time.monotonic()))
            process.kill()
            process.wait()
            with output, log.open("a") as text:
                output.seek(0)
                case.output = output.read().decode(errors="replace")
                text.write(f"==== {case.title}: {case.ending}\n{shell(case)}\n{case.output}\n")


def start(case: Case) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
    """Start the command. What it prints goes to a file without a name."""
    output = tempfile.TemporaryFile()  # noqa: SIM115 (``carry_out`` closes it)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **(SHARING if case.lets_ranks_share else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    process = subprocess.Popen(
        list(map(str, case.command)),
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
    )
    return process, output


def shell(case: Case) -> str:
    """Return the command as a user would type it."""
    variables = [f"{k}={v}" for k, v in SHARING.items()] if case.lets_ranks_share else []
    return " ".join([*variables, shlex.join(map(str, case.command))])


def dry_run_lines(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        limit = "no limit" if section.seconds == math.inf else f"{section.seconds:.0f} s"
        yield f"{section.title}: {limit}"
        for case in section.cases:
            yield f"    {case.title}: {case.not_run or shell(case)}"


def write_report(sections: Sequence[Section], out: Path) -> None:
    """Write the report, and the figures of all cases as JSON."""
    (out / "report.md").write_text("\n".join(report_lines(sections)) + "\n")
    figures = {case.title: case.figures for section in sections for case in section.cases}
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


def report_lines(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the report in Markdown."""
    yield from ("# GPU check", "")
    versions = f"megaspeed {megaspeed.__version__}, torch {torch.__version__}"
    yield f"{time.strftime('%Y-%m-%d')}, {versions}"
    if not torch.cuda.is_available():
        yield from ("", "**These are tiny shapes on a CPU. They say nothing about a GPU.**")
    for section in sections:
        yield from ("", f"## {section.title}", "")
        rows = [(case.title, case.ending, case.result) for case in section.cases]
        yield from markdown_table(("case", "ending", "result"), rows)
        if section.name == "machine":
            yield from ("", *(f"- {name}: {value}" for name, value in machine_lines(section)))
        elif section.name == "real shapes":
            yield from ("", *real_shapes_table(section), "")
            yield "MFU counts the products of forward and backward, with attention over the full"
            yield "square and without recomputation. In brackets: what `megaspeed plan` predicts."
        for case in section.cases:
            yield from details(case)


def machine_lines(section: Section) -> Iterator[tuple[str, str]]:
    for case in section.cases:
        for name, value in case.figures.items():
            if name == "result":
                continue
            if isinstance(value, dict):
                yield from ((f"{name}, {key}", ", ".join(each)) for key, each in value.items())
            else:
                yield name, str(value)


def real_shapes_table(section: Section) -> Iterator[str]:
    """Yield a row for each model, what was measured beside what was predicted."""
    headings = ("model", "micro-batch", "step s", "tokens/s", "MFU", "peak GiB", "reserved GiB")
    rows = []
    for case in section.cases:
        found = case.figures
        if "tokens/s" not in found:
            continue

        rows.append(
            (
                case.title,
                str(found["micro-batch"]),
                beside(found, "step seconds", "planned seconds", three_digits),
                f"{found['tokens/s']:,.0f}",
                beside(found, "MFU", "planned MFU", "{:.1%}".format),
                beside(found, "peak", "predicted peak", GIB.of),
                GIB.of(found["reserved"]) if "reserved" in found else "-",
            )
        )
    yield from markdown_table(headings, rows)


def beside(figures: JSON, measured: str, predicted: str, text: Callable[[Any], str]) -> str:
    """Return the measured figure, and the predicted one in brackets."""
    both = [text(figures[key]) if figures.get(key) else "-" for key in (measured, predicted)]
    return f"{both[0]} ({both[1]})"


def details(case: Case) -> Iterator[str]:
    """Yield what a reader needs beside the row of a case."""
    lines = []
    if "kernels" in case.figures:
        total = case.figures["ms of all"]
        lines = [
            f"{ms:9.2f} ms {ms / total:6.1%} {calls:6} x  {name[:90]}"
            for name, calls, ms in case.figures["kernels"]
        ]
    elif case.failed or (case.has_tables and case.begun):
        lines = case.output.splitlines()[-LAST_LINES:]
    if lines:
        yield from ("", f"### {case.title}", "", f"    {shell(case)}", "", "```", *lines, "```")


if __name__ == "__main__":
    sys.exit(main())
