"""Damaged input gives exit code 2 and one message, quickly, and leaves no files.

hypothesis draws damaged values, keys and texts. Damage that is not a change of text, such as pipes
and broken tokenizers, is listed.
"""

import contextlib
import copy
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspeed.cli import main
from megaspeed.config.document import merge
from megaspeed.config.foreign_keys import REFUSED
from megaspeed.config.loading import all_key_paths
from tests.config.hugging_face_files import LLAMA
from tests.config.workshop import Values, Workshop, train_tokenizer
from tests.support.machine import limit

pytestmark = pytest.mark.slow

MOST_SECONDS = limit(5)
"""The limit for one check, in processor seconds."""

CHECK = ("check", "--world-size", "2", "--device", "cpu")


@dataclass
class Check:
    """The result of ``megaspeed check``."""

    code: int
    out: str
    err: str
    seconds: float

    def complaints(self) -> list[str]:
        """Return the problems of a check that found a mistake."""
        headings = len(re.findall(r"^\d[\d,]* problems? in ", self.err, re.MULTILINE))
        messages = headings + self.err.count(" error: ")
        return [
            *([f"exit code {self.code}"] if self.code != 2 else []),
            *([f"output {self.out!r:.100}"] if self.out else []),
            *(["a traceback"] if "Traceback" in self.err else []),
            *(["pydantic's words"] if "Input should" in self.err else []),
            *([f"{messages} messages"] if messages != 1 else []),
            *([f"{len(self.err):,} characters"] if len(self.err) > 20_000 else []),
            *([f"{self.seconds:.1f} s"] if self.seconds > MOST_SECONDS else []),
        ]


def check(*options: str) -> Check:
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*CHECK, *options])
        except SystemExit as exit_:  # argparse raises it
            code = int(str(exit_.code))
    return Check(code, out.getvalue(), err.getvalue(), time.process_time() - start)


def tree(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def check_values(workshop: Workshop, values: Values | bytes, *options: str) -> Check:
    """Check a configuration. Afterwards, the folder must be as it was."""
    file = workshop.write(values)
    before = tree(workshop.folder)
    found = check("--config", str(file), *options)
    assert tree(workshop.folder) == before, "a file was written"
    file.unlink()
    return found


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MEGASPEED_CACHE", str(folder / "cache"))
        yield Workshop(folder)


def test_the_valid_configurations_have_no_mistake(workshop: Workshop) -> None:
    for values in (
        workshop.good,
        workshop.with_data(tokenizer=str(workshop.tokenizer)),
        workshop.with_data(train=[str(workshop.folder / "ids.bin")], validation=None),
        workshop.with_model(workshop.model),
        {"extends": str(workshop.write(workshop.good))},
    ):
        found = check_values(workshop, values)
        assert (found.code, found.err) == (0, "")


# --- drawn damage ---------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**10, 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "auto", "nvme", "7", "\0", "\ud800", "n" * 300, "a/" * 3000]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def places(draw: st.DrawFn) -> list[str]:
    """Draw a known key of a configuration."""
    return draw(st.sampled_from(all_key_paths())).split(".")


@st.composite
def misspelt(draw: st.DrawFn) -> list[str]:
    """Draw a known key with one letter too few, too many, exchanged, or in another case."""
    *section, name = draw(places())
    at = draw(st.integers(0, len(name) - 2))
    edits = (
        name[:at] + name[at + 1 :],
        name[:at] + name[at] + name[at:],
        name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        name[:at] + name[at].upper() + name[at + 1 :],
    )
    return [*section, draw(st.sampled_from(edits))]


def replaced(values: Values, path: list[str], value: Any) -> Values:
    changed = copy.deepcopy(values)
    here = changed
    for section in path[:-1]:
        if not isinstance(here.get(section), dict):
            here[section] = {}
        here = here[section]
    here[path[-1]] = value
    return changed


def assert_right_or_one_message(found: Check) -> None:
    if found.code == 0:
        assert found.err == "" and found.out.endswith("no problem found\n")
    else:
        assert found.complaints() == []


@settings(max_examples=300)
@given(changes=st.lists(st.tuples(places(), JSON), min_size=1, max_size=4))
def test_values_of_any_kind(workshop: Workshop, changes: list[tuple[list[str], Any]]) -> None:
    values = workshop.good
    for path, value in changes:
        values = replaced(values, path, value)
    assert_right_or_one_message(check_values(workshop, values))


@settings(max_examples=100)
@given(path=misspelt())
def test_a_misspelt_key_is_named(workshop: Workshop, path: list[str]) -> None:
    name = ".".join(path)
    if name in all_key_paths() or name in REFUSED:
        return
    found = check_values(workshop, replaced(workshop.good, path, 3))
    assert found.complaints() == []
    possible = (f"{name} is an unknown key", "wanted", "type is missing")
    assert any(message in found.err for message in possible)


@settings(max_examples=30)
@given(path=places())
def test_a_duplicate_key_is_named(workshop: Workshop, path: list[str]) -> None:
    values = replaced(workshop.good, path, "<twice>")
    text = json.dumps(values).replace('"<twice>"', f'1, "{path[-1]}": 2')
    found = check_values(workshop, text.encode())
    assert found.complaints() == [] and f"{'.'.join(path)} is a duplicate key" in found.err


@settings(max_examples=100)
@given(data=st.data())
def test_a_text_with_other_bytes(workshop: Workshop, data: st.DataObject) -> None:
    text = json.dumps(workshop.good).encode()
    at = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 5))
    inserted = data.draw(
        st.binary(max_size=3) | st.sampled_from([b",", b"{", b'"', b"]", b"//", b"'"])
    )
    assert_right_or_one_message(check_values(workshop, text[:at] + inserted + text[at + length :]))


@settings(max_examples=100)
@given(
    key=st.text(max_size=20) | places().map(".".join) | misspelt().map(".".join),
    value=st.text(max_size=20) | JSON.map(json.dumps),
)
def test_a_set_of_any_text(workshop: Workshop, key: str, value: str) -> None:
    assert_right_or_one_message(check_values(workshop, workshop.good, "--set", f"{key}={value}"))


# --- listed damage --------------------------------------------------------------------------------


def nested(text: bytes, levels: int) -> bytes:
    return text[:-1] + b',"k":' + b"[" * levels + b"]" * levels + b"}"


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "a list": lambda text: b"[" + text + b"]",
    "two objects": lambda text: text + text,
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "UTF-32": lambda text: text.decode().encode("utf-32"),
    "two byte order marks": lambda text: b"\xef\xbb\xbf\xef\xbb\xbf" + text,
    "NUL bytes": lambda text: text + bytes(100),
    "gzip": lambda text: b"\x1f\x8b\x08\x00" + text,
    "nested 900 deep": lambda text: nested(text, 900),
    "nested 100,000 deep": lambda text: nested(text, 100_000),
    "objects 900 deep": lambda text: text[:-1] + b',"k":' + b'{"k":' * 900 + b"1" + b"}" * 901,
    "5,000 digits": lambda text: text[:-1] + b',"k":' + b"1" * 5_000 + b"}",
    "20 MB": lambda text: text + b" " * 20_000_000 + b"x",
    "a key of 100,000 letters": lambda text: text[:-1] + b',"' + b"k" * 100_000 + b'":1}',
}
"""Each changes the text of a configuration or of a model's config.json to an unusable one."""


@pytest.mark.parametrize("damage", TEXTS)
def test_a_text_that_is_no_json_object(workshop: Workshop, damage: str) -> None:
    damaged = TEXTS[damage](json.dumps(workshop.good).encode())
    assert check_values(workshop, damaged).complaints() == []
    assert check_values(workshop, {"extends": str(workshop.write(damaged))}).complaints() == []
    if damage not in ("5,000 digits",):
        model = workshop.new_folder()
        (model / "config.json").write_bytes(TEXTS[damage](json.dumps(LLAMA).encode()))
        found = check_values(workshop, workshop.with_model(model))
        assert damage == "a key of 100,000 letters" or found.complaints() == []


OPTIONS = [
    *(["--set", text] for text in ("", "=3", "...=3", "a." * 5_000 + "b=1", "training. steps=3")),
    *(["--set", text] for text in ("extends=a.json", 'data={"seed": 1, "seed": 2}', "model=null")),
    *(["--set", f"training.steps={value}"] for value in ("[" * 5_000, "9" * 5_000, "null", '"3"')),
    *(["--world-size", n] for n in ("0", "-1", "abc", "1.5", "", "10000000", "9" * 5_000, "NaN")),
    ["--no-such-option"],
    ["--device", "tpu"],
    ["--device"],
    ["--json", "."],
    ["--json", "no/such/figures.json"],
    ["--json", "x" * 300],
    ["--config", ""],
    ["surplus"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options)[:40])
def test_options_that_cannot_be_used(workshop: Workshop, options: list[str]) -> None:
    assert check_values(workshop, workshop.good, *options).complaints() == []


PARENTS: tuple[Any, ...] = (3, ["a"], {}, True, "", "a\0b", "n" * 300, "no.json", ".", "\ud800")


@pytest.mark.parametrize(
    "parent", PARENTS, ids=lambda parent: f"{parent!r:.20}".encode("unicode_escape").decode()
)
def test_a_parent_that_cannot_be_extended(workshop: Workshop, parent: Any) -> None:
    assert check_values(workshop, {**workshop.good, "extends": parent}).complaints() == []


def special_paths(folder: Path) -> dict[str, Path]:
    """Return kind -> path of something that is not a file, or cannot exist."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(folder):
        listening.bind("socket")  # the address of a socket has at most 107 bytes
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    return {
        "a pipe": folder / "pipe",
        "a socket": folder / "socket",
        "a device": Path("/dev/zero"),
        "a loop": folder / "loop",
        "a link to nothing": folder / "dangling",
        "nothing": folder / "nothing",
        "a place below a file": Path(__file__) / "below",
        "too long a name": folder / ("n" * 300),
        "a NUL": folder / "a\0b",
    }


def linked(folder: Path, name: str, path: Path) -> str:
    """Link ``name`` in a new folder to ``path``, and return the folder."""
    (folder / name).symlink_to(path)
    return str(folder)


def test_paths_of_what_is_no_file(workshop: Workshop) -> None:
    for kind, path in special_paths(workshop.new_folder()).items():
        uses = {
            "to extend": {"extends": str(path)},
            "as text": workshop.with_data(train=[str(path)]),
            "as tokenizer": workshop.with_data(tokenizer=str(path)),
            "as model": workshop.with_model(path),
        }
        if kind != "nothing":
            uses["above run_dir"] = merge(workshop.good, {"training": {"run_dir": f"{path}/run"}})
        if kind in ("a pipe", "a socket", "a device"):
            ids = linked(workshop.new_folder(), "ids.bin", path) + "/ids.bin"
            uses["as ids"] = workshop.with_data(train=[ids], validation=None)
            model = linked(workshop.new_folder(), "config.json", path)
            uses["as config.json"] = workshop.with_model(Path(model))
            tokenizer = linked(
                train_tokenizer(workshop.new_folder() / "t"), "tokenizer_config.json", path
            )
            uses["beside a tokenizer"] = workshop.with_data(tokenizer=tokenizer)
        for use, values in uses.items():
            assert check_values(workshop, values).complaints() == [], (kind, use)
        assert check("--config", str(path)).complaints() == [], kind
    assert check("--config", str(workshop.folder)).complaints() == check().complaints() == []


TOKENIZERS: dict[str, tuple[str, Callable[[str], str] | None]] = {
    "cut": ("tokenizer.json", lambda text: text[: len(text) // 2]),
    "empty": ("tokenizer.json", lambda text: ""),
    "a list": ("tokenizer.json", lambda text: "[]"),
    "without a vocabulary": ("tokenizer.json", lambda text: "{}"),
    "missing": ("tokenizer.json", None),
    "without an end of text": (
        "tokenizer.json",
        lambda text: text.replace("<|endoftext|>", "<|other|>"),
    ),
    "a config that is cut": ("tokenizer_config.json", lambda text: '{"a": '),
    "a config 900 deep": ("tokenizer_config.json", lambda text: nested(b'{"a":1}', 900).decode()),
    "a config that is a list": ("tokenizer_config.json", lambda text: "[]"),
    "another end": ("tokenizer_config.json", lambda text: '{"eos_token": "<nowhere>"}'),
}


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used(workshop: Workshop, damage: str) -> None:
    folder = train_tokenizer(workshop.new_folder() / "tokenizer")
    name, change = TOKENIZERS[damage]
    file = folder / name
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text() if file.exists() else ""))
    assert check_values(workshop, workshop.with_data(tokenizer=str(folder))).complaints() == []


def test_a_tokenizer_larger_than_the_model(workshop: Workshop) -> None:
    values = workshop.with_data(tokenizer=str(workshop.tokenizer))
    assert check_values(workshop, merge(values, {"model": {"vocab_size": 100}})).complaints() == []


@settings(max_examples=100)
@given(key=st.sampled_from([*LLAMA, "rms_norm_eps", "rope_scaling", "layer_types"]), value=JSON)
def test_a_config_json_with_any_value(workshop: Workshop, key: str, value: Any) -> None:
    model = workshop.new_folder()
    (model / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    assert_right_or_one_message(check_values(workshop, workshop.with_model(model)))


@pytest.mark.parametrize("section", [None, "model"])
def test_of_20_000_unknown_keys_20_are_listed(workshop: Workshop, section: str | None) -> None:
    unknown = {f"key_{number}": {"a": number} for number in range(20_000)}
    found = check_values(workshop, merge(workshop.good, {section: unknown} if section else unknown))
    assert found.complaints() == []
    assert found.err.startswith("20,000 problems in ") and found.err.endswith(
        "\n  and 19,980 more; megaspeed check --json FILE writes all of them\n"
    )
    assert len(found.err.splitlines()) == 22


def test_a_process_ends_with_exit_code_2(workshop: Workshop) -> None:
    program = "import sys; from megaspeed.cli import main; sys.exit(main())"
    wrong = workshop.write(merge(workshop.good, {"model": {"hiden_size": 3}}))
    for options in (["--config", str(wrong)], ["--config", "/dev/zero"], ["--no-such-option"]):
        command = [sys.executable, "-c", program, *CHECK, *options]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=limit(60), check=False
        )
        assert Check(ended.returncode, ended.stdout, ended.stderr, 0.0).complaints() == []
