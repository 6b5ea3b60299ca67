"""An entry of the cache is complete or absent."""

import socket
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer
from typing import BinaryIO

import pytest

import megaspeed.files.lock
from megaspeed.data.cache import Cache, cache_key, default_cache_dir, index_path
from megaspeed.data.errors import DataError
from megaspeed.files.durable import TEMPORARY
from megaspeed.files.json_values import Facts


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def write(cache: Cache, size_bytes: int = 10_000) -> Path:
    path = cache.root / "things" / f"{cache_key(1)}.bin"

    def fill(stream: BinaryIO) -> Facts:
        stream.write(bytes(range(250)) * (size_bytes // 250))
        return {"answer": 42}

    with cache.lock():
        cache.write(path, fill)
    return path


def test_a_complete_entry_is_read_with_its_facts(cache: Cache) -> None:
    facts = cache.read(write(cache))
    assert facts is not None
    assert (facts["answer"], facts["bytes"]) == (42, 10_000)


@pytest.mark.parametrize("size_bytes", [10_000, 100_000_000])
def test_a_payload_that_is_cut_short_or_longer_is_not_trusted(
    cache: Cache, size_bytes: int
) -> None:
    path = write(cache, size_bytes)
    whole = path.read_bytes()
    for broken in (whole[:-1], whole + b"x", b"", b"\xff" + whole[1:], whole[:-1] + b"\x00"):
        path.write_bytes(broken)
        assert cache.read(path) is None
    path.write_bytes(whole)
    assert cache.read(path) is not None


def test_an_index_that_is_missing_cut_or_altered_is_not_trusted(cache: Cache) -> None:
    path = write(cache)
    index = index_path(path)
    whole = index.read_bytes()
    for broken in (
        b"",
        whole[: len(whole) // 2],
        whole.replace(b"42", b"43"),
        b"[]",
        b"{}",
        b"\xff",
    ):
        index.write_bytes(broken)
        assert cache.read(path) is None
    index.unlink()
    assert cache.read(path) is None


def test_a_failed_write_leaves_nothing_and_the_next_lock_clears_the_rest_of_a_killed_one(
    cache: Cache,
) -> None:
    path = cache.root / "things" / f"{cache_key(1)}.bin"

    def fill(stream: BinaryIO) -> Facts:
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), cache.lock():
        cache.write(path, fill)
    assert list(path.parent.iterdir()) == []
    path.with_name(path.name + TEMPORARY).write_bytes(b"half")
    with cache.lock():
        assert list(path.parent.iterdir()) == []


def test_what_others_keep_in_the_folder_is_left_alone(cache: Cache) -> None:
    """A user's checkpoint in the same folder was once removed while it was written."""
    checkpoint = cache.root / "run" / "checkpoints" / "step-00000001.writing"
    plan = cache.root / "tokens" / "plan.json.writing"
    for file in (checkpoint / "weights", plan):
        file.parent.mkdir(parents=True)
        file.write_text("under way")
    with cache.lock():
        assert (checkpoint / "weights").read_text() == plan.read_text() == "under way"


def test_a_map_of_an_entry_outlives_its_replacement(cache: Cache) -> None:
    path = write(cache)
    with path.open("rb") as before:
        write(cache, size_bytes=500)
        assert len(before.read()) == 10_000
    assert path.stat().st_size == 500


def test_a_folder_that_cannot_be_written_is_named_with_its_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    lock = Cache(tmp_path / "file" / "cache").lock()
    message = r"file/cache cannot be written .*set MEGASPEED_CACHE"
    with pytest.raises(DataError, match=message), lock:
        pass


HOLD = """
import sys
from pathlib import Path
from megaspeed.data.cache import Cache

with Cache(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("speaks", [True, False])
def test_a_long_wait_for_another_process_is_reported_once_with_its_number(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], speaks: bool
) -> None:
    monkeypatch.setattr(megaspeed.files.lock, "_SECONDS_BEFORE_REPORT", 0.2)
    command = [sys.executable, "-c", HOLD, str(cache.root)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "held\n"
        release = Timer(1, other.stdin.close)
        release.start()
        with Cache(cache.root, speaks).lock():
            pass
        release.join()
    printed = (
        f"another process (process {other.pid} on {socket.gethostname()}) is preparing data in "
        f"{cache.root}; waiting until it is done. To prepare it elsewhere, set MEGASPEED_CACHE to "
        "another folder\n"
    )
    assert capfd.readouterr().err == (printed if speaks else "")


def test_the_environment_chooses_the_folder() -> None:
    assert default_cache_dir({"MEGASPEED_CACHE": "/data/cache"}) == Path("/data/cache")
    assert default_cache_dir({}) == Path.home() / ".cache" / "megaspeed"
    nobodys = default_cache_dir({"MEGASPEED_CACHE": "~no-such-user/cache"})
    assert nobodys == Path("~no-such-user/cache")
