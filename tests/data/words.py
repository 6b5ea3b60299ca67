"""Text of random words, and a tokenizer with most words: many bytes, few tokens."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from megaspeed.data.documents import read_documents
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import TextTokenizer, train_tokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyzäöü"
_GENERATOR = random.Random(0)
WORDS = ["".join(_GENERATOR.choices(_LETTERS, k=_GENERATOR.randint(4, 12))) for _ in range(200)]


def documents(size_bytes: int, *, longest_words: int = 500) -> Iterator[str]:
    """Yield texts of about ``size_bytes`` in total, always the same ones."""
    generator = random.Random(1)
    while size_bytes > 0:
        text = " ".join(generator.choices(WORDS, k=generator.randint(1, longest_words)))
        size_bytes -= len(text.encode("utf-8"))
        yield text


def write_json_lines(path: Path, size_bytes: int) -> Path:
    """Write a file of such documents."""
    with path.open("w", encoding="utf-8") as stream:
        for text in documents(size_bytes):
            stream.write(json.dumps({"text": text}) + "\n")
    return path


def words_tokenizer(folder: Path) -> TextTokenizer:
    """Train a byte-level BPE in which nearly every word is one token, and save it."""
    text = folder / "words.txt"
    text.write_text(" ".join(f"{word} {word}" for word in WORDS), encoding="utf-8")
    tokenizer = train_tokenizer(read_documents([SourceFile(text.name, text)]), 2000)
    tokenizer.save(folder)
    return tokenizer
