"""Fixtures of this folder: a tokenizer and its folder."""

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
