"""Token folders of real text, as `megaspeed tokenize` leaves them."""

import hashlib
from pathlib import Path

import numpy as np

from megaspeed.data.documents import corpus_fingerprint, read_documents, read_pieces
from megaspeed.data.encode import encode
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import id_type
from megaspeed.data.token_folder import Shard, TokenFolderIndex, write_index
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
