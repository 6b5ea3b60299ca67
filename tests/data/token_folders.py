"""Token folders of real text, files of ids, and opened token sources."""

from pathlib import Path

import numpy as np

from megaspeed.data.cache import Cache
from megaspeed.data.sources import SourceFile, paths_at
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import open_tokens, token_paths
from megaspeed.data.tokenize import tokenize
from megaspeed.data.tokenizer import TextTokenizer


def write_token_folder(folder: Path, text: Path, tokenizer: TextTokenizer) -> Path:
    """Write the documents of one text file, in one shard."""
    tokenize([SourceFile(text.name, text)], tokenizer, folder, lambda _: None)
    return folder


def write_nanogpt(path: Path, ids: list[int]) -> Path:
    """Write 16-bit ids as nanoGPT's data/*/prepare.py does, with numpy's ``tofile``."""
    np.array(ids, dtype=np.uint16).tofile(path)
    return path


def open_all(path: Path | str, cache: Cache) -> tuple[TokenFile, ...]:
    """Return the token files that a source of this path has."""
    return tuple(
        file for each in token_paths(paths_at(str(path))) for file in open_tokens(each, cache)
    )
