"""A document longer than a piece has the ids that the tokenizer gives for its complete text."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megaspeed.data import pieces as cutting
from megaspeed.data.cache import Cache
from megaspeed.data.documents import read_documents, read_pieces
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_sources import open_token_folder
from megaspeed.data.tokenize import tokenize
from megaspeed.data.tokenizer import END_OF_TEXT, TextTokenizer, encode, pack
from tests.data.watching import Record
from tests.data.words import WORDS, documents

pytestmark = pytest.mark.slow

MARK = "\u2581"
HAN = [chr(0x4E00 + number) for number in range(50)]
# Llama 3's. Runs of spaces, line ends after a full stop and three digits are separate words.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prepended() -> Tokenizer:
    """Return a tokenizer as Llama 2's: a mark precedes the text and replaces each space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def byte_level(*, add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return tokenizer


def llama_3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "prepended": prepended,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "byte level with space": lambda: byte_level(add_prefix_space=True),
    "byte level": lambda: byte_level(add_prefix_space=False),
    "llama 3": llama_3,
}
"""Name -> an untrained tokenizer."""


def trained(tokenizer: Tokenizer) -> TextTokenizer:
    """Train a tokenizer on words, and on runs of spaces that some tokenizers merge."""
    letters = sorted(
        {*"".join(WORDS), *HAN, *"\n\u00a0\u3000", *pre_tokenizers.ByteLevel.alphabet(), MARK}
    )
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[END_OF_TEXT], initial_alphabet=letters, show_progress=False
    )
    runs = ["  ", "   ", "\u00a0 ", " \u00a0", "\u3000  "] * 20
    tokenizer.train_from_iterator([*WORDS, *runs], trainer)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None
    return TextTokenizer(tokenizer, end_of_text)


CHANCE = random.Random(0)
WITHOUT_SINGLE_SPACES = {
    "no space": "".join(CHANCE.choices(HAN, k=10_000)),
    "one word a line": "\n".join(CHANCE.choices(WORDS, k=4_000)),
    "one word a line of Windows": "\r\n".join(CHANCE.choices(WORDS, k=4_000)),
    "spaces in twos": "  ".join(CHANCE.choices(WORDS, k=4_000)),
    "indented lines": "\n    ".join(CHANCE.choices(WORDS, k=4_000)),
    "spaces of other widths": "".join(
        word + CHANCE.choice(["\u00a0 ", " \u00a0", "\u00a0 \u00a0", "\u3000  ", "\u3000 \n"])
        for word in CHANCE.choices(WORDS, k=4_000)
    ),
}


@pytest.mark.parametrize("text", WITHOUT_SINGLE_SPACES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_cuts_do_not_show_in_text_without_single_spaces_between_words(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """No space is added where a text continues, and no space of the text is lost or moved."""
    monkeypatch.setattr(cutting, "PIECE_BYTES", 2000)
    monkeypatch.setattr(cutting, "_CUT_WINDOW_BYTES", 500)
    tokenizer = trained(TOKENIZERS[name]())
    whole = WITHOUT_SINGLE_SPACES[text]
    pieces = list(cutting.pieces_of(whole, 0))
    assert len(pieces) > 10
    ids = pack(pieces, tokenizer).ids.tolist()
    assert ids == [*tokenizer.tokenizer.encode(whole).ids, tokenizer.end_of_text]


def test_a_tokenizer_that_removes_spaces_before_a_text_keeps_those_between_words() -> None:
    stripping = prepended()
    stripping.normalizer = normalizers.Sequence([normalizers.Strip(), stripping.normalizer])
    tokenizer = trained(stripping)
    whole, first = tokenizer.encode([f"{WORDS[0]} {WORDS[1]}", WORDS[0]])
    assert [*first, *tokenizer.encode_continued([f" {WORDS[1]}"])[0]] == whole


@pytest.mark.parametrize("name", ["prepended", "metaspace first", "byte level"])
def test_the_cuts_of_a_long_document_do_not_show(tmp_path: Path, name: str) -> None:
    tokenizer = trained(TOKENIZERS[name]())
    long = " ".join(documents(4 * cutting.PIECE_BYTES))
    text = tmp_path / "long.txt"
    text.write_text(f"{long}{END_OF_TEXT}the end", encoding="utf-8")
    files = [SourceFile(text.name, text)]
    end = tokenizer.end_of_text
    expected = [
        *tokenizer.tokenizer.encode(long).ids,
        end,
        *tokenizer.tokenizer.encode("the end").ids,
        end,
    ]
    pieces = read_pieces(read_documents(files))
    directly = np.concatenate([packed.ids for packed in encode(pieces, tokenizer)])
    np.testing.assert_array_equal(directly, expected)
    tokenize(files, tokenizer, tmp_path / "out", Record())
    (file,) = open_token_folder(tmp_path / "out", Cache(tmp_path / "cache"))
    np.testing.assert_array_equal(file.map(), expected)
