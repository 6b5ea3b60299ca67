"""README and docs are true: commands parse, configurations are valid, figures match the code."""

import argparse
import contextlib
import importlib.util
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megaspeed import cli
from megaspeed.config.document import Document, merge, read_document
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document, load_run
from megaspeed.job import pretrain
from megaspeed.job.console import COLUMNS, banner, print_folded
from megaspeed.job.resume import Start

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "ds_configs/README.md", "tests/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PLACEHOLDERS = {
    "...": "ds_configs/zero3.json",
    "N": "8",
    "K": "3",
    "F": "ds_configs/3d.json",
    "T": "tokenizer",
}
PROGRAMS = ("megaspeed", "deepspeed", "torchrun", "python", "mpirun", "srun", "sbatch")
OURS = tuple(path.name for path in ROOT.iterdir() if path.name not in ("runs", "megaspeed"))
"""The first names in paths of the repository's files."""

COMPLETE: dict[str, Any] = {
    "model": {"preset": "gpt2-tiny"},
    "data": {"sequence_length": 128},
    "training": {"steps": 300},
    "train_batch_size": 16,
}
"""The keys that a run needs. A part of a configuration is merged over them."""


def blocks(page: Path) -> list[str]:
    """Return the indented code blocks, without the indentation. A block may contain blank lines."""
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))*)+", page.read_text(), re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


def code_lines(page: Path) -> list[str]:
    """Return the lines of code blocks, without comments. Continued lines are joined."""
    text = "\n".join(re.sub(r" *\\\n +", " ", block) for block in blocks(page))
    return [re.sub(r"\s+# .*", "", line.strip()) for line in text.splitlines()]


def commands() -> list[str]:
    """Return the commands in code blocks and the complete ones in sentences, without variables."""
    found = set()
    for page in PAGES:
        spans = re.findall(r"`([^`]+)`", page.read_text())
        spans = [span for span in spans if re.search(r"--config|\.py ", span) and "..." not in span]
        lines = [*code_lines(page), *(" ".join(span.split()) for span in spans)]
        lines = [re.sub(r"^[A-Z_]+=(\"[^\"]*\"|\S+) ", "", line) for line in lines]
        found |= {line for line in lines if line.startswith(tuple(f"{p} " for p in PROGRAMS))}
    return sorted(found)


class Parsed(Exception):
    """Raised by a script as soon as it has parsed its arguments. The script then does not run."""


def check_parsed(words: list[str], monkeypatch: pytest.MonkeyPatch, ranks: int | None) -> None:
    """Parse a command as its programs do, and check its configuration for its number
    of processes.
    """
    program, *rest = words
    match program:
        case "srun":
            check_parsed(rest[2:], monkeypatch, int(rest[1]))
        case "mpirun":
            check_parsed(rest[rest.index("python") :], monkeypatch, int(rest[1]))
        case "sbatch":
            check_parsed(["python", "scripts/pretrain.py", *rest[1:]], monkeypatch, None)
        case "deepspeed":
            from deepspeed.launcher import runner  # it takes seconds

            options = runner.parse_args(rest)
            module = ["-m"] * options.module
            started = [*module, options.user_script, *options.user_args]
            number = options.num_gpus if options.num_gpus > 0 else None  # -1 if it is omitted
            check_parsed(["python", *started], monkeypatch, number)
        case "torchrun":
            from torch.distributed import run as torchrun

            options = torchrun.get_args_parser().parse_args(rest)
            nodes = options.nnodes.split(":")[-1]
            module = ["-m"] * options.module
            started = [*module, options.training_script, *options.training_script_args]
            number = int(nodes) * int(options.nproc_per_node)
            check_parsed(["python", *started], monkeypatch, number)
        case "python" if rest[0] == "scripts/pretrain.py":
            check_run(pretrain.parse_arguments(rest[1:]), ranks)
        case "python" if rest[:2] == ["-m", "megaspeed.cli"]:
            check_parsed(["megaspeed", *rest[2:]], monkeypatch, ranks)
        case "python" if rest[1:2] != ["pytest"]:
            check_script(rest, monkeypatch)
        case "megaspeed":
            options = cli.parse([word.split("|")[0] for word in rest])
            nodes = getattr(options, "nodes", None)
            number = ranks or getattr(options, "world_size", None) or (nodes and 8 * nodes)
            if options.command == "train":
                options = pretrain.parse_arguments(options.rest)
            if "overrides" in options:
                check_run(options, number)


def check_script(rest: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(parser: argparse.ArgumentParser, arguments: Any = None, _: Any = None) -> None:
        found, unknown = parser.parse_known_args(arguments)
        raise Parsed(found) if not unknown else SystemExit(f"unknown: {unknown}")

    is_module = rest[0] == "-m"
    monkeypatch.setattr(sys, "argv", rest[is_module:])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed):
        if is_module:
            runpy.run_module(rest[1], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / rest[0]), run_name="__main__")


def check_run(options: argparse.Namespace, ranks: int | None) -> None:
    """Check a run. If the number of processes is unknown, check only what does not depend on it."""
    if options.config.exists():
        world = None if ranks is None else World(ranks, "the documentation", "cuda")
        document = read_document(options.config, options.overrides)
        assert check_document(document, world).problems == ()


def test_the_readme_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    names = set(re.findall(r"^    ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE))
    assert len(names) > 15
    named = {line.split()[1] for line in code_lines(ROOT / "README.md") if "megaspeed " in line}
    assert names - named == set()


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_documentation_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
    check_parsed(words, monkeypatch, None)
    for word in words:
        if word.split("/")[0] in OURS:
            assert Path(word).exists(), word


def configurations() -> list[Any]:
    """Return (page, JSON, the block after it) of each block with JSON, and of each line with a
    part.
    """
    found = []
    for page in PAGES:
        pieces = blocks(page)
        for block, after in zip(pieces, [*pieces, ""][1:], strict=True):
            text, _, printed = block.partition("\n}\n")
            if block.startswith("{\n"):
                found.append(pytest.param(text + "\n}", printed or after, id=page.name))
            elif re.match(r'"\w+": ', block):
                lines = [line.replace(", ...", "").rstrip(",") for line in block.splitlines()]
                found += [pytest.param(f"{{{line}}}", "", id=page.name) for line in lines]
    return found


@pytest.mark.parametrize(("text", "after"), configurations())
def test_a_configuration_of_the_documentation_is_accepted_or_has_the_mistakes_shown(
    text: str,
    after: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model/config.json", *re.findall(r'"([\w/*.]+[*][\w/*.]+)"', text)):
        file = tmp_path / name.replace("**/", "").replace("*", "file")
        file.parent.mkdir(exist_ok=True)
        content = b'{"model_type": "gpt2", "text": "a"}'
        file.write_bytes(zstandard.compress(content) if file.suffix == ".zst" else content)
    Tokenizer(WordLevel({"<|endoftext|>": 0})).save("model/tokenizer.json")
    values = json.loads(text)
    is_complete = {"model", "data", "training"} <= values.keys()
    if "from_hf" in values.get("model", {}):
        values = {**COMPLETE, **values}
    elif not is_complete:
        values = merge(COMPLETE, values)
    Path("run.json").write_text(json.dumps(values))
    if heading := re.match(r"\s*\d+ problems in run.json:", after):
        options = ["--world-size", "8", "--set", "parallel.tensor=2"]
        error = StringIO()
        with contextlib.redirect_stderr(error):
            assert cli.main(["check", "--config", "run.json", *options]) == 2
        assert " ".join(error.getvalue().split()) == " ".join(after.split())
    else:
        assert heading is None
        assert cli.main(["check", "--config", "run.json", "--world-size", "8"]) == 0
        printed = capsys.readouterr().out
        notes = [line for line in after.splitlines() if line.startswith("note: ")]
        found = [line for line in printed.splitlines() if line.startswith("note: ")]
        assert not notes or found == notes


def test_the_example_of_a_file_that_extends_another() -> None:
    (block,) = (b for b in blocks(ROOT / "docs" / "configuration.md") if b.startswith("base.json"))
    base, run, result = (json.loads(line.split(maxsplit=1)[1]) for line in block.splitlines())
    assert run.pop("extends") == "base.json" and merge(base, run) == result
    assert check_document(Document(merge(COMPLETE, result))).problems == ()


def outputs(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each command that a page shows with its output: (the command, the lines
    of the output). A line ``...`` stands for omitted lines.
    """
    for block in blocks(page):
        first, *rest = re.sub(r" *\\\n +", " ", block).splitlines()
        shown = [line for line in rest if line.strip()]
        is_command = first.startswith(("megaspeed plan", "megaspeed schedule", "megaspeed check"))
        if is_command and shown and not shown[0].startswith("megaspeed "):
            yield first, shown


@pytest.mark.parametrize(("command", "shown"), [each for page in PAGES for each in outputs(page)])
def test_a_command_prints_what_the_documentation_shows(
    command: str,
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = [re.sub("─+", "", line).split() for line in capsys.readouterr().out.splitlines()]
    remaining, omits = list(filter(None, printed)), False
    for line in shown:
        words = re.sub("-{9,}", "", line).split()
        if words and words != ["..."]:
            assert words in remaining, line
            place = remaining.index(words)
            assert (place > 0) is omits, f"a line ... is missing or not needed before {line}"
            del remaining[: place + 1]
        omits = words == ["..."] or (omits and not words)
    assert bool(remaining) is omits, "a line ... is missing or not needed at the end"


@pytest.mark.parametrize(("page", "count"), [("README.md", 3), ("docs/watching.md", 5)])
def test_the_first_lines_of_a_run_are_those_shown(page: str, count: int) -> None:
    run = load_run(ROOT / "ds_configs" / "3d.json", (), World(8, "the test"))
    console = Console(file=StringIO(), width=COLUMNS)
    for part in banner(run, torch.device("cpu"), Start()):
        print_folded(console, part)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    (block,) = (b for b in blocks(ROOT / page) if "3d: pp 2 x dp 2" in b)
    shown = block[block.index("3d: ") :].splitlines()
    assert [line.split() for line in shown[:count]] == [line.split() for line in lines[:count]]


def tables() -> Any:
    """Import the script that writes the tables."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "write_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_table_of_figures_is_stale() -> None:
    script, named = tables(), []
    for page in script.PAGES:
        text = page.read_text()
        assert script.with_tables(text) == text, "run python scripts/write_tables.py"
        words = " ".join(re.sub(r" *\\\n +", " ", text).split())
        for name in re.findall(r"<!-- figures (\S+) -->", text):
            named.append(name)
            command = json.loads((script.FIGURES / f"{name}.json").read_text()).get("command", "")
            assert command in words, f"{page.name} does not name the command of {name}"
    assert sorted(named) == sorted(file.stem for file in script.FIGURES.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_file_or_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]
            assert heading in anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_list_is_the_same_on_github_and_in_the_site(page: Path) -> None:
    """The site needs an empty line before a list, and four spaces before the blocks of an item."""
    lines = ["", *page.read_text().splitlines()]
    for before, line in pairwise(lines):
        if re.match(r"(-|\d+\.) ", line):
            assert re.match(r"$|(-|\d+\.|) ", before), f"{before}\n{line}"
        is_block = re.match(r" +([-|]|\d+\.) ", line) or not before
        assert not (is_block and re.match(r" {1,3}\S", line)), line


def test_each_module_has_a_test_of_its_name_or_is_listed_with_its_tests() -> None:
    package, tests = ROOT / "megaspeed", ROOT / "tests"
    _, _, table = (tests / "README.md").read_text().partition("| modules | tests |\n|---|---|\n")
    listed: set[str] = set()
    for row in table.splitlines():
        modules, files = (re.findall(r"`([^`]+)`", cell) for cell in row.strip("| ").split("|"))
        listed.update(modules)
        assert files and [name for name in files if not (tests / name).is_file()] == [], row
    named_otherwise = {
        str(module.relative_to(package))
        for module in package.rglob("*.py")
        if module.name != "__init__.py"
        and not any((tests / module.relative_to(package).parent).rglob(f"test_{module.name}"))
    }
    assert listed == named_otherwise
