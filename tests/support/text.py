"""List files of text as ``data.train`` does."""

from collections.abc import Sequence

from megaspeed.config.data import Source
from megaspeed.data.search import find
from megaspeed.data.sources import SourceFile, files_by_source


def list_files(sources: Sequence[Source], setting: str, report: bool = False) -> list[SourceFile]:
    """Return the files of all sources, in order."""
    found = find(sources, setting, report)
    return [file for files in files_by_source(found, setting, report) for file in files]
