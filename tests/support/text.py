"""List files of text as ``data.train`` does."""

from collections.abc import Sequence

from megaspeed.config.run import Source
from megaspeed.data.sources import SourceFile, files_by_source, find


def list_files(sources: Sequence[Source], setting: str) -> list[SourceFile]:
    """Return the files of all sources, in order."""
    return [file for files in files_by_source(find(sources), setting) for file in files]
