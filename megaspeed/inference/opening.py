"""What opens a document: ids that stand before its text, for the model's sake.

    trained here    e t o   b e e n o t ...    training packs documents with end-of-text (e) between
                                               them: it is what stands before a document's text
    imported        b t o   b e                whoever trained it put before a text what the
                                               tokenizer's template puts there: Llama's b, say

A model that is shown text in another way than in its training predicts it worse, and is not what
transformers computes. The template is the tokenizer's post-processor. It may put ids behind a text
as well; these are left out, for the text is to go on.
"""

from enum import StrEnum

from megaspeed.data.tokenizer import TextTokenizer


class Opening(StrEnum):
    """Where the ids come from."""

    AUTO = "auto"
    END_OF_TEXT = "end-of-text"
    TOKENIZER = "tokenizer"
    NOTHING = "nothing"


def opening_ids(opening: Opening, tokenizer: TextTokenizer, *, imported: bool) -> tuple[int, ...]:
    """The ids before a document; none where nothing opens it.

    Args:
        opening: AUTO is what the model was trained with.
        tokenizer: of the model.
        imported: whether the model was trained elsewhere.
    """
    if opening == Opening.AUTO:
        opening = Opening.TOKENIZER if imported else Opening.END_OF_TEXT
    match opening:
        case Opening.END_OF_TEXT:
            return (tokenizer.end_of_text,)
        case Opening.TOKENIZER:
            return _ids_before_text(tokenizer)
        case _:
            return ()


def _ids_before_text(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Found on a text, since a template shows itself only there: the first that has an id."""
    for text in ("a", *tokenizer.tokenizer.get_vocab()):
        encoding = tokenizer.tokenizer.encode(text)
        added = encoding.special_tokens_mask  # 1 where the template put the id
        if 0 in added:
            return tuple(encoding.ids[: added.index(0)])
    return ()
