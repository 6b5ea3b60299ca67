"""Continuations: the likeliest are transformers', and a sample does not see its neighbours."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.inference import text_model
from megaspeed.inference.errors import InferenceError
from megaspeed.inference.generation import Continuation, generate
from megaspeed.inference.sampling import Sampling
from megaspeed.inference.text_model import TextModel
from tests.inference.tiny_text import both_models
from tests.model.tiny_gpt import gpt2, llama

GREEDY = Sampling(temperature=0, max_tokens=40)
LIVELY = Sampling(temperature=2.0, top_k=0, max_tokens=30)


def likeliest(stock: PreTrainedModel, ids: list[int], window: int, count: int) -> list[int]:
    """By transformers' logits, one token after the other; 0 ends it."""
    drawn: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            token = int(stock(torch.tensor([[*ids, *drawn][-window:]])).logits[0, -1].argmax())
        if token == 0:
            break
        drawn.append(token)
    return drawn


@pytest.mark.parametrize("config", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_the_likeliest_tokens_are_those_of_transformers_beyond_the_window_too(
    config: ModelConfig, tmp_path: Path
) -> None:
    model, stock = both_models(config, tmp_path)
    prompts = ["", "Licensor", "the terms and conditions of this agreement " * 3]
    found = list(generate(model, prompts, 1, GREEDY))
    assert [continuation.prompt for continuation in found] == prompts
    for prompt, continuation in zip(prompts, found, strict=True):
        (ids,) = model.tokenizer.encode([prompt])
        expected = likeliest(stock, [0, *ids], config.max_position_embeddings, 40)
        assert list(continuation.ids) == expected
        assert 1 + len(ids) + len(expected) > config.max_position_embeddings
        assert continuation.ended == (len(expected) < 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return both_models(gpt2(), tmp_path_factory.mktemp("model"))[0]


def test_a_sample_is_a_function_of_seed_prompt_and_number(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = list(generate(model, ["You", "a longer prompt"], 3, LIVELY))
    assert [(c.prompt, c.number) for c in together] == [
        (prompt, number) for prompt in ("You", "a longer prompt") for number in (1, 2, 3)
    ]
    assert len({continuation.ids for continuation in together}) == 6
    assert list(generate(model, ["a longer prompt"], 2, LIVELY)) == together[3:5]
    other = list(generate(model, ["You"], 3, replace(LIVELY, seed=1)))
    assert not {c.ids for c in other} & {c.ids for c in together}
    monkeypatch.setattr(text_model, "_LARGEST_LOGITS_BYTES", 1)  # one row at a time
    assert list(generate(model, ["You", "a longer prompt"], 3, LIVELY)) == together


def test_the_text_is_what_the_ids_spell_behind_the_prompt(model: TextModel) -> None:
    for continuation in generate(model, ["", "You may "], 2, LIVELY):
        (ids,) = model.tokenizer.encode([continuation.prompt])
        whole = model.tokenizer.tokenizer.decode([*ids, *continuation.ids])
        assert continuation.prompt + continuation.text == whole


def test_the_end_of_text_ends_a_sample_and_is_no_part_of_it(model: TextModel) -> None:
    def written(end_of_text: int) -> Continuation:
        tokenizer = replace(model.tokenizer, end_of_text=end_of_text)
        (found,) = generate(replace(model, tokenizer=tokenizer), ["You"], 1, GREEDY)
        return found

    endless = written(end_of_text=300)
    assert not endless.ended and len(endless.ids) == 40
    third = endless.ids[2]
    ended = written(end_of_text=third)
    assert ended.ended and ended.ids == endless.ids[: endless.ids.index(third)]


def test_logits_that_are_not_finite_are_an_error_that_names_the_checkpoint(
    tmp_path: Path,
) -> None:
    model, _ = both_models(gpt2(), tmp_path)
    with torch.no_grad():
        next(iter(model.model.parameters()))[5, 5] = torch.nan
    with pytest.raises(InferenceError, match=f"{tmp_path} gives logits that are not finite"):
        list(generate(model, ["You"], 1, GREEDY))
