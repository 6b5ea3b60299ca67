"""The ids of a document longer than a piece are those of the tokenizer alone on the whole of it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from megaspeed.data.text.documents import read_documents
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizer.text_tokenizer import END_OF_TEXT, TextTokenizer
from megaspeed.data.tokenizing.tokenization import How, tokenize
from megaspeed.data.tokens.token_folder import open_token_folder
from megaspeed.data.tokens.writing import packed_ids
from tests.data.tokenizing.watching import Record
from tests.data.tokenizing.words import WORDS, documents

MARK = "\u2581"


def prepended() -> Tokenizer:
    """As Llama 2's: a mark before the text and for every space, and nothing splits words."""
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


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], bool]] = {
    "prepended": (prepended, True),
    "metaspace first": (lambda: metaspace("first"), True),
    "metaspace always": (lambda: metaspace("always"), True),
    "metaspace never": (lambda: metaspace("never"), False),
    "byte level with space": (lambda: byte_level(add_prefix_space=True), True),
    "byte level": (lambda: byte_level(add_prefix_space=False), False),
}
"""Name -> (an untrained one, whether it takes a text as if a space stood before it)."""


def trained(tokenizer: Tokenizer) -> TextTokenizer:
    letters = sorted({*"".join(WORDS), *pre_tokenizers.ByteLevel.alphabet(), MARK})
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None
    return TextTokenizer(tokenizer, end_of_text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whether_a_space_is_implied_shows_in_two_words(name: str) -> None:
    make, implies_space = TOKENIZERS[name]
    assert trained(make()).implies_space == implies_space


@pytest.mark.parametrize("name", ["prepended", "metaspace first", "byte level"])
def test_the_cuts_of_a_long_document_do_not_show(tmp_path: Path, name: str) -> None:
    """Where it is tokenized beforehand, and where text is trained on directly."""
    tokenizer = trained(TOKENIZERS[name][0]())
    long = " ".join(documents(3 << 20))
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
    directly = np.concatenate(list(packed_ids(read_documents(files), tokenizer)))
    np.testing.assert_array_equal(directly, expected)
    tokenize(files, tokenizer, tmp_path / "out", How(processes=1), Record())
    (file,) = open_token_folder(tmp_path / "out")
    np.testing.assert_array_equal(file.map(), expected)
