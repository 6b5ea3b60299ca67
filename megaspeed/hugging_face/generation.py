"""Continuations of prompts by transformers' ``generate``."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from megaspeed.data.tokenizer import quiet_transformers
from megaspeed.hugging_face.text_model import TextModel

_LOWEST_TEMPERATURE = 1e-6
"""Below it the likeliest token is taken, because logits divided by it could overflow in fp32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8  # logits are divided by it; 0 takes the likeliest token
    # only this many likeliest tokens are drawn (Fan et al. 2018); 0 for all
    top_k: int = 50
    # only the likeliest tokens that together have this probability are drawn (Holtzman et al.
    # 2020); 1 for all
    top_p: float = 1.0
    max_tokens: int = 100  # the largest number of tokens of a continuation
    seed: int = 0  # of all draws


@dataclass(frozen=True)
class Continuation:
    """One sample."""

    prompt: str  # the text that is continued
    number: int  # of the sample among those of the prompt, from 1
    text: str  # what the model wrote, without the prompt
    ids: tuple[int, ...]  # its tokens, without the one that ends the document
    ended: bool  # whether the model ended the document; if not, the limit of tokens did


def continue_prompt(model: TextModel, prompt: str, number: int, sampling: Sampling) -> Continuation:
    """Continue a prompt. The result is a function of (seed, prompt, number) up to rounding.

    If the prompt is empty and no id precedes a document, it begins with an end-of-text.

    Raises:
        ComputationError: the model computes NaN or infinite logits.
    """
    (text,) = model.tokenizer.encode([prompt])
    before = [*model.opening, *text] or [model.tokenizer.end_of_text]
    digest = hashlib.sha256(f"sample/{sampling.seed}/{number}/{prompt}".encode()).digest()
    devices = [model.model.device] if model.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), quiet_transformers():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = _draw(model, before, sampling)
    ended = drawn[-1] in model.ends
    if ended:
        drawn.pop()
    return Continuation(prompt, number, _text_after(model, before, drawn), tuple(drawn), ended)


def _draw(model: TextModel, before: list[int], sampling: Sampling) -> list[int]:
    """The ids that follow ``before``, up to one that ends the document or the limit of tokens.

    One call computes them as long as all ids fit into the model's positions. After that, the model
    sees its last ``positions`` ids, which shift with each token, so each needs a call.
    """
    how: dict[str, Any] = {"do_sample": sampling.temperature >= _LOWEST_TEMPERATURE}
    if how["do_sample"]:
        how |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    drawn: list[int] = []
    while len(drawn) < sampling.max_tokens and not (drawn and drawn[-1] in model.ends):
        ids = [*before, *drawn][-model.positions :]
        room = model.positions + 1 - len(ids)  # the last token is drawn, but not seen
        seen = torch.tensor([ids], device=model.model.device)
        found = model.model.generate(
            seen,
            attention_mask=torch.ones_like(seen),
            generation_config=GenerationConfig(
                max_new_tokens=min(sampling.max_tokens - len(drawn), room),
                eos_token_id=list(model.ends),
                pad_token_id=model.ends[0],
                **how,
            ),
            logits_processor=[model.finite],
        )
        drawn += found[0, len(ids) :].tolist()
    return drawn


def _text_after(model: TextModel, before: list[int], drawn: list[int]) -> str:
    """The text of ``drawn``, decoded after ``before``.

    Some tokenizers drop the first space of a text, and the ids of one character may be in both.
    """
    decode = model.tokenizer.tokenizer.decode
    prompt = decode(before, skip_special_tokens=True)
    both = decode(before + drawn, skip_special_tokens=True)
    return both.removeprefix(prompt) if both.startswith(prompt) else decode(drawn)
