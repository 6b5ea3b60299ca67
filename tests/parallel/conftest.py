"""What all tests of layouts share: the runs of one process, and a text of short documents."""

from pathlib import Path

import pytest

from tests.parallel.references import TEXT, References
from tests.support.tiny import short_documents


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_documents(TEXT, tmp_path_factory.mktemp("text"))
