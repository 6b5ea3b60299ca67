"""Continuations of prompts, token by token.

    prompt a, sample 1    o . . . . x    one row each, of any length; every step computes the rows
    prompt a, sample 2    o . . . . x    anew and adds a token to each; a row ends at end-of-text
    prompt b, sample 1    o . . x

A prompt is the beginning of a document, and opens as one (o, ``opening.py``). A row sees its last
``max_position_embeddings`` tokens: beyond them its window slides, and positions begin anew with it.
A sample is a function of (seed, prompt, number), up to the rounding of logits: its random numbers
are its own, whatever is computed beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megaspeed.inference.sampling import Sampling
from megaspeed.inference.text_model import TextModel


@dataclass(frozen=True)
class Continuation:
    """One sample.

    Attributes:
        prompt: what it goes on from.
        number: which of the prompt's samples, from 1.
        text: what the model wrote, without the prompt.
        ids: its tokens, without the end-of-text.
        ended: whether the model ended the document; else the limit of tokens did.
    """

    prompt: str
    number: int
    text: str
    ids: tuple[int, ...]
    ended: bool


def generate(
    model: TextModel, prompts: Sequence[str], samples: int, sampling: Sampling
) -> Iterator[Continuation]:
    """``samples`` continuations of each prompt, in their order.

    An empty prompt that nothing opens stands for an end-of-text token: there must be something to
    go on from.

    Raises:
        InferenceError: the model gives logits that are not finite.
    """
    rows = [
        _Row.begin(model, prompt, number, sampling)
        for prompt in prompts
        for number in range(1, samples + 1)
    ]
    longest = max(len(row.ids) for row in rows) + sampling.max_tokens
    # Logits of every position are made for the last one's sake.
    at_once = model.rows_at_once(min(longest, model.config.max_position_embeddings))
    for first in range(0, len(rows), at_once):
        batch = rows[first : first + at_once]
        _continue(model, batch, sampling)
        yield from (row.continuation(model) for row in batch)


@dataclass
class _Row:
    """One sample under way.

    Attributes:
        ids: those that open a document, the prompt's, and those drawn so far.
        prompt_length: how many of them are not drawn.
        ended: whether the model ended the document.
    """

    prompt: str
    number: int
    ids: list[int]
    generator: torch.Generator
    prompt_length: int = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)

    @classmethod
    def begin(cls, model: TextModel, prompt: str, number: int, sampling: Sampling) -> "_Row":
        (text,) = model.tokenizer.encode([prompt])
        ids = [*model.opening, *text] or [model.tokenizer.end_of_text]
        return cls(prompt, number, ids, sampling.generator(prompt, number))

    def continuation(self, model: TextModel) -> Continuation:
        drawn = self.ids[self.prompt_length :]
        text = _text_behind(model, self.ids[: self.prompt_length], drawn)
        return Continuation(self.prompt, self.number, text, tuple(drawn), self.ended)


def _continue(model: TextModel, rows: Sequence[_Row], sampling: Sampling) -> None:
    window = model.config.max_position_embeddings
    for _ in range(sampling.max_tokens):
        open_rows = [row for row in rows if not row.ended]
        if not open_rows:
            return
        seen = [row.ids[-window:] for row in open_rows]
        logits = model.logits(seen)
        last = logits[range(len(seen)), [len(ids) - 1 for ids in seen]].cpu()  # (B, V)
        for row, row_logits in zip(open_rows, last, strict=True):
            token = sampling.choose(row_logits, row.generator)
            if token == model.tokenizer.end_of_text:
                row.ended = True
            else:
                row.ids.append(token)


def _text_behind(model: TextModel, prompt: list[int], drawn: list[int]) -> str:
    """The text of ``drawn``, as it reads behind the prompt.

    Some tokenizers leave a text's first space out, and a character may lie across the border.
    """
    decode = model.tokenizer.tokenizer.decode
    before = decode(prompt, skip_special_tokens=True)
    both = decode(prompt + drawn, skip_special_tokens=True)
    return both.removeprefix(before) if both.startswith(before) else decode(drawn)
