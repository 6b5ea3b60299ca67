"""A real browser without a window: Chromium opens a page, and the tests inspect the result.

If Chromium is missing, the tests are skipped with the command that installs it. Continuous
integration sets CI. There a missing browser is a failure, because ``.ci/run`` installs it.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from tests.support.machine import limit

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_MISSING = "there is no Chromium here; install one with: apt-get install chromium-headless-shell"
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # root may not use the sandbox, and continuous integration runs as root
    "--disable-gpu",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


@dataclass(frozen=True)
class Opened:
    """A page that a browser has opened.

    Attributes:
        dom: its elements after rendering, as HTML.
        console: the messages of the browser's console: errors of scripts, resources and policies.
    """

    dom: str
    console: list[str]


def open_page(page: Path) -> Opened:
    ended = _run("--dump-dom", page.as_uri())
    return Opened(ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line])


def photograph(page: Path, picture: Path, width: int, height: int, *, dark: bool) -> Image.Image:
    """Take a picture of the page in a window of this size, in the light or in the dark mode."""
    mode = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run(f"--screenshot={picture}", f"--window-size={width},{height}", mode, page.as_uri())
    return Image.open(picture).convert("RGB")


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(_MISSING)
        pytest.skip(_MISSING)
    command = [program, *_OPTIONS, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit(100))
