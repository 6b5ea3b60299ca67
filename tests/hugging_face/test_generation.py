"""Continuations are the likeliest tokens or drawn, and end with the model's end ids."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face.text_model import (
    Continuation,
    Sampling,
    TextModel,
    continue_prompt,
)
from megaspeed.hugging_face.weights import ComputationError
from tests.hugging_face.models import mistral
from tests.hugging_face.tiny_text import tiny_model, tiny_tokenizer
from tests.model.tiny_gpt import gpt2, llama

GREEDY = Sampling(temperature=0, max_tokens=12)
LIVELY = Sampling(temperature=2.0, top_k=0, max_tokens=12)


def generate(
    model: TextModel, prompts: Sequence[str], samples: int, sampling: Sampling
) -> list[Continuation]:
    """Generate some continuations of each prompt."""
    return [
        continue_prompt(model, prompt, number, sampling)
        for prompt in prompts
        for number in range(1, samples + 1)
    ]


def likeliest(stock: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Return the ids with the largest logits, from one forward pass each. The id 0 ends them."""
    drawn: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            token = int(stock(torch.tensor([[*ids, *drawn]])).logits[0, -1].argmax())
        if token == 0:
            break
        drawn.append(token)
    return drawn


@pytest.mark.parametrize("config", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_greedy_tokens_are_the_likeliest(config: ModelConfig, tmp_path: Path) -> None:
    """Of a long prompt, the model sees the last tokens, and all 12 drawn tokens but the last."""
    model, stock = tiny_model(config, tmp_path)
    prompts = ["", "Licensor", "the terms and conditions of this agreement " * 3]
    found = generate(model, prompts, 1, GREEDY)
    assert [continuation.prompt for continuation in found] == prompts
    for prompt, continuation in zip(prompts, found, strict=True):
        (ids,) = model.tokenizer.encode([prompt])
        seen = [0, *ids][-(config.max_position_embeddings - 11) :]
        expected = likeliest(stock, seen, 12)
        assert list(continuation.ids) == expected
        assert continuation.ended == (len(expected) < 12)
    assert len(seen) < 1 + len(ids)


def test_a_continuation_ends_at_the_models_positions(model: TextModel) -> None:
    (found,) = generate(replace(model, ends=(300,)), ["You"], 1, replace(GREEDY, max_tokens=99))
    assert not found.ended and len(found.ids) == model.positions


def test_greedy_tokens_of_a_sliding_window_are_the_likeliest(tmp_path: Path) -> None:
    """The cache drops keys beyond the window."""
    stock = mistral(sliding_window=12, max_position_embeddings=96)
    model = TextModel(tmp_path, stock, tiny_tokenizer(tmp_path), (0,), (0,), 96)
    (found,) = generate(model, ["Licensor"], 1, replace(GREEDY, max_tokens=40))
    (ids,) = model.tokenizer.encode(["Licensor"])
    assert list(found.ids) == likeliest(stock, [0, *ids], 40)
    assert len(found.ids) > 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return tiny_model(gpt2(), tmp_path_factory.mktemp("model"))[0]


def test_a_sample_is_a_function_of_seed_prompt_and_number(model: TextModel) -> None:
    together = generate(model, ["You", "a longer prompt"], 3, LIVELY)
    assert [(c.prompt, c.number) for c in together] == [
        (prompt, number) for prompt in ("You", "a longer prompt") for number in (1, 2, 3)
    ]
    assert len({continuation.ids for continuation in together}) == 6
    torch.manual_seed(99)
    assert generate(model, ["a longer prompt"], 2, LIVELY) == together[3:5]
    other = generate(model, ["You"], 3, replace(LIVELY, seed=1))
    assert not {c.ids for c in other} & {c.ids for c in together}


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1e-5}, {"temperature": 1e-300}, {"top_k": 1}],
    ids=str,
)
def test_if_only_the_likeliest_can_be_drawn_it_is(
    model: TextModel, options: dict[str, Any]
) -> None:
    (greedy,) = generate(model, ["You"], 1, GREEDY)
    (lively,) = generate(model, ["You"], 1, LIVELY)
    (drawn,) = generate(model, ["You"], 1, replace(LIVELY, **options))
    assert drawn == greedy != lively


def test_the_text_is_what_the_ids_spell_after_the_prompt(model: TextModel) -> None:
    for continuation in generate(model, ["", "You may "], 2, LIVELY):
        (ids,) = model.tokenizer.encode([continuation.prompt])
        whole = model.tokenizer.tokenizer.decode([*ids, *continuation.ids])
        assert continuation.prompt + continuation.text == whole


@pytest.mark.parametrize("place", [2, 9])
def test_an_end_ends_a_sample_and_is_not_part_of_it(model: TextModel, place: int) -> None:
    def written(*ends: int) -> Continuation:
        (found,) = generate(replace(model, ends=ends), ["You"], 1, LIVELY)
        return found

    endless = written(300)
    assert not endless.ended and len(endless.ids) == 12
    last = endless.ids[place]
    ended = written(300, last)
    assert ended.ended and ended.ids == endless.ids[: endless.ids.index(last)]


def test_an_end_within_the_prompt_does_not_end_it(model: TextModel) -> None:
    (ids,) = model.tokenizer.encode(["You"])
    (found,) = generate(replace(model, ends=(300, ids[-1])), ["You"], 1, GREEDY)
    assert found.ids and found.ids[0] != ids[-1]


@pytest.mark.parametrize("sampling", [GREEDY, LIVELY], ids=["greedy", "lively"])
def test_logits_that_are_not_finite_are_an_error_that_names_the_checkpoint(
    tmp_path: Path, sampling: Sampling
) -> None:
    model, stock = tiny_model(gpt2(), tmp_path)
    with torch.no_grad():
        next(iter(stock.parameters()))[5, 5] = torch.nan
    with pytest.raises(ComputationError, match=f"the model of {tmp_path} computes others"):
        generate(model, ["You"], 1, sampling)
