"""Which tokenizer a configuration comes to.

data.tokenizer   sources                          tokenizer
a path           any                              that one; token folders must be of it
train            token folders, and other ones    the folders'; they must be of one
train            text                             one that is trained on the text
train            foreign token files              none is needed, so none is known
train            text and foreign token files     refused: nothing says what the ids mean
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megaspeed.config.data import DataConfig
from megaspeed.data.errors import DataError
from megaspeed.data.shares import Share, token_places
from megaspeed.data.tokenizer.text_tokenizer import TOKENIZER_FILE, TRAIN, load_tokenizer
from megaspeed.data.tokens.token_folder import is_token_folder, read_index
from megaspeed.files.paths import expand_home


def choose_tokenizer(data: DataConfig, shares: Sequence[Share]) -> str | None:
    """The path of a tokenizer that exists; None where it is to be trained, or none is needed.

    Args:
        data: the `data` section.
        shares: of training and of validation.

    Raises:
        DataError: token folders of other tokenizers, or ids that no tokenizer is known for.
    """
    places = token_places(shares)
    folders = [place for place in places if is_token_folder(place)]
    if data.tokenizer != TRAIN:
        named = str(expand_home(data.tokenizer))
        if folders:
            _check_named(named, folders)
        return named
    if folders:
        _check_equal(folders)
        return str(folders[0])
    has_text = any(share.files for share in shares)
    if places and has_text:
        raise DataError(
            f'data.tokenizer is "{TRAIN}", and the ids in {places[0]} are of a tokenizer that the '
            "file does not name, which the text must be tokenized with as well; "
            "name that tokenizer in data.tokenizer"
        )
    return None


def _check_named(named: str, folders: Sequence[Path]) -> None:
    wanted = load_tokenizer(named).fingerprint
    problems = [
        f"data.tokenizer {named!r} must be the one that token files were made with: its "
        f"fingerprint is {wanted[:16]}..., and that of {folder} is {found[:16]}...; name "
        f"{folder} in data.tokenizer, or make that folder again with this tokenizer"
        for folder in folders
        if (found := read_index(folder).tokenizer_fingerprint) != wanted
    ]
    if problems:
        raise DataError(*problems)


def _check_equal(folders: Sequence[Path]) -> None:
    """Folders of one tokenizer, which is the one that the first of them has with it."""
    first, *others = folders
    if not (first / TOKENIZER_FILE).is_file():
        raise DataError(
            f"a token folder has its tokenizer with it, and {first / TOKENIZER_FILE} is missing; "
            "copy it again, or name the tokenizer in data.tokenizer"
        )
    wanted = read_index(first).tokenizer_fingerprint
    found = {folder: read_index(folder).tokenizer_fingerprint for folder in others}
    found |= {first / TOKENIZER_FILE: load_tokenizer(str(first)).fingerprint}
    problems = [
        f"all token files must be of one tokenizer, and {first} is of {wanted[:16]}... while "
        f"{place} is of {fingerprint[:16]}...; tokenize one of the two again with the other's "
        "tokenizer"
        for place, fingerprint in found.items()
        if fingerprint != wanted
    ]
    if problems:
        raise DataError(*problems)
