"""The ids before a document: those that the model saw there in its training."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenizers.processors import PostProcessor, Sequence, TemplateProcessing

from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.inference.opening import Opening, opening_ids
from tests.inference.tiny_text import tiny_tokenizer


def template(text: str) -> PostProcessor:
    """Of a tokenizer in which 0 ends a text and ! and " have the ids 1 and 2."""
    return TemplateProcessing(single=text, special_tokens=[("!", 1), ('"', 2)])


@pytest.mark.parametrize(
    ("post_processor", "expected"),
    [
        (None, ()),
        (template("$A"), ()),
        (template("! $A"), (1,)),
        (template('! " $A'), (1, 2)),
        (template('! $A "'), (1,)),
        (template('$A "'), ()),
        (Sequence([template("$A"), template("! $A")]), (1,)),
    ],
    ids=["no template", "text", "one", "two", "one and an end", "an end", "in a sequence"],
)
def test_a_template_opens_with_what_it_puts_before_a_text(
    post_processor: PostProcessor | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    if post_processor is not None:
        tokenizer.tokenizer.post_processor = post_processor
    assert opening_ids(Opening.TOKENIZER, tokenizer, imported=False) == expected
    assert opening_ids(Opening.AUTO, tokenizer, imported=True) == expected
    assert opening_ids(Opening.AUTO, tokenizer, imported=False) == (0,)
    for imported in (True, False):
        assert opening_ids(Opening.END_OF_TEXT, tokenizer, imported=imported) == (0,)
        assert opening_ids(Opening.NOTHING, tokenizer, imported=imported) == ()


def test_a_vocabulary_need_not_know_the_letter_a() -> None:
    digits = Tokenizer(models.BPE({"</s>": 0, "!": 1, '"': 2, "3": 3, "4": 4}, []))
    digits.post_processor = template('! $A "')
    assert digits.encode("a").ids == [1, 2]
    assert opening_ids(Opening.TOKENIZER, TextTokenizer(digits, 0), imported=True) == (1,)
