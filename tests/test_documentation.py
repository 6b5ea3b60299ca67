"""The README and docs/ are true: their commands parse, their links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from megaspeed import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDERS = {"N": "8", "K": "3", "F": "ds_configs/3d.json", "T": "tokenizer"}


def code_lines(page: Path) -> list[str]:
    """The lines of indented code blocks, without comments; continued lines are joined."""
    text = re.sub(r" *\\\n +", " ", page.read_text())
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def megaspeed_commands() -> list[str]:
    found = {line for page in PAGES for line in code_lines(page) if line.startswith("megaspeed ")}
    return sorted(found)


def test_the_readme_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    commands = set(re.findall(r"^    ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE))
    assert len(commands) > 15
    named = {line.split()[1] for line in code_lines(ROOT / "README.md") if "megaspeed " in line}
    assert commands - named == set()


@pytest.mark.parametrize("line", megaspeed_commands())
def test_a_command_of_the_documentation_parses(line: str) -> None:
    words = [PLACEHOLDERS.get(word, word).split("|")[0] for word in shlex.split(line)[1:]]
    assert cli.parse(words).command == words[0]


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
