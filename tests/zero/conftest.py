"""Text for tiny runs."""

import argparse
import inspect
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return real text: the source of one module of the standard library."""
    file = tmp_path_factory.mktemp("text") / "argparse.txt"
    file.write_text(inspect.getsource(argparse))
    return file


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for prepared corpora, which all tests of the session share."""
    return tmp_path_factory.mktemp("cache")
