"""A tokenizer for all tests of this folder, and the folder it is saved in."""

from pathlib import Path

import pytest

from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer
from tests.data.words import words_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    words_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture(autouse=True)
def _fine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for two seconds before it trains on text that it has just written."""
    monkeypatch.setattr("megaspeed.files.reading.COARSEST_TICK_SECONDS", 0.0)
