"""Token folders of real text, as `megaspeed tokenize` writes them, and opened token sources."""

import hashlib
from pathlib import Path

import numpy as np

from megaspeed.data.cache import Cache
from megaspeed.data.documents import corpus_fingerprint, read_documents, read_pieces
from megaspeed.data.encode import encode
from megaspeed.data.search import paths_at
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import TokenFile, id_type
from megaspeed.data.token_folder import Shard, TokenFolderIndex, write_index
from megaspeed.data.token_sources import open_tokens, token_paths
from megaspeed.data.tokenizer import TextTokenizer


def write_token_folder(folder: Path, text: Path, tokenizer: TextTokenizer) -> Path:
    """The documents of one text file, in one shard."""
    documents = read_documents([SourceFile(text.name, text)])
    ids = np.concatenate([packed.ids for packed in encode(read_pieces(documents), tokenizer)])
    tokenizer.save(folder)
    content = ids.tobytes()
    (folder / "tokens-00000.bin").write_bytes(content)
    checksum = hashlib.sha256(content).hexdigest()
    index = TokenFolderIndex(
        dtype=id_type(tokenizer.vocab_size),
        documents=len(documents),
        tokens=len(ids),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer_fingerprint=tokenizer.fingerprint,
        corpus_fingerprint=corpus_fingerprint(documents),
        largest_id=int(ids.max()),
        shards=(Shard("tokens-00000.bin", len(ids), len(documents), checksum),),
    )
    write_index(folder, index)
    return folder


def open_all(path: Path | str, cache: Cache) -> tuple[TokenFile, ...]:
    """The token files that a source of this path has."""
    return tuple(
        file for each in token_paths(paths_at(str(path))) for file in open_tokens(each, cache)
    )
