"""One process at a time writes to the cache."""

import socket
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer

import pytest

import megaspeed.data.cache
from megaspeed.data.cache import Cache, default_cache_dir
from megaspeed.data.errors import DataError
from tests.support.machine import limit


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


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
    monkeypatch.setattr(megaspeed.data.cache, "_SECONDS_BEFORE_REPORT", 0.2)
    command = [sys.executable, "-c", HOLD, str(cache.root)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "held\n"
        release = Timer(limit(1), other.stdin.close)
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
