"""Fixtures of this folder: a tokenizer, its folder, and a clock of files that ticks finely."""

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
    """Let tests train on text that they have just written, without a wait of two seconds."""
    monkeypatch.setattr("megaspeed.files.paths.COARSEST_TICK_SECONDS", 0.0)
