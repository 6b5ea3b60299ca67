"""Documents packed into one row give the same results as each document alone.

A row holds the end of a document that began before it, whole documents, and the beginning of the
last one. Its logits and gradients are those of the pieces, each given to the model by itself.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.model.attention import attention_mask, positions_in, window_mask
from megaspeed.model.gpt import GPT
from tests.model.documents.packed_rows import (
    DOCUMENTS,
    difference,
    numbers,
    ours,
    pieces,
    stock_of,
    tokens_of,
)
from tests.model.tiny_gpt import gpt2, gradients, llama, random_tokens

ROUNDING = 1e-5  # relative to the largest logit or gradient
PLAINLY_WRONG = 1e-2


# --- by hand --------------------------------------------------------------------------------------


def test_positions_count_within_each_document() -> None:
    # Numbers begin anywhere and need not be consecutive.
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [7, 9, 9, 9, 3, 4, 4, 4]])
    assert positions_in(documents).tolist() == [[0, 1, 0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 0, 0, 1, 2]]
    assert positions_in(torch.zeros(1, 5, dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_sees_its_document_up_to_itself(dtype: torch.dtype) -> None:
    mask = attention_mask(torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]]), dtype)
    assert mask.shape == (2, 1, 6, 6)
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, float("-inf")}
    drawn = ["".join("x" if value == 0 else "." for value in query) for query in mask[0, 0]]
    assert drawn == [
        "x.....",
        "xx....",
        "..x...",
        "..xx..",
        "..xxx.",
        ".....x",
    ]
    assert torch.equal(mask[1, 0] == 0, torch.ones(6, 6).tril() == 1)


# --- a packed row equals its documents alone ------------------------------------------------------


@torch.no_grad()
def test_logits_are_those_of_each_document_alone(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    model, tokens = ours(config, stock), tokens_of(config)
    packed = model(tokens, documents=DOCUMENTS)
    assert difference(packed, [model(piece) for piece in pieces(tokens)]) < ROUNDING


@torch.no_grad()
def test_logits_are_those_that_transformers_gives_each_document_alone(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    tokens = tokens_of(config)
    packed = ours(config, stock)(tokens, documents=DOCUMENTS)
    assert difference(packed, [stock(piece).logits for piece in pieces(tokens)]) < ROUNDING


def test_gradients_are_the_sums_over_the_documents_alone(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    tokens = tokens_of(config)
    weights = torch.randn(*tokens.shape, config.vocab_size, generator=torch.manual_seed(5))
    together, apart = ours(config, stock), ours(config, stock)
    (together(tokens, documents=DOCUMENTS) * weights).sum().backward()
    for piece, piece_weights in zip(pieces(tokens), pieces(weights), strict=True):
        (apart(piece) * piece_weights).sum().backward()
    alone = gradients(apart)
    for name, gradient in gradients(together).items():
        assert (gradient - alone[name]).norm() < ROUNDING * alone[name].norm(), name


@torch.no_grad()
def test_a_row_of_one_document_is_a_row_without_documents(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    model, tokens = ours(config, stock), tokens_of(config)
    whole = model(tokens)
    one = model(tokens, documents=torch.full_like(tokens, 3))
    assert float((one - whole).abs().max() / whole.abs().max()) < ROUNDING


@torch.no_grad()
def test_what_stands_in_another_document_changes_no_bit(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    model, tokens = ours(config, stock), tokens_of(config)
    others = torch.where(DOCUMENTS == 1, (tokens + 1) % config.vocab_size, tokens)
    before, after = (model(x, documents=DOCUMENTS) for x in (tokens, others))
    elsewhere = DOCUMENTS != 1
    assert torch.equal(before[elsewhere], after[elsewhere])
    assert not torch.equal(before[~elsewhere], after[~elsewhere])


# --- the comparison notices -----------------------------------------------------------------------


def all_that_is_not_later(documents: Tensor, dtype: torch.dtype, window: None) -> Tensor:
    return attention_mask(torch.zeros_like(documents), dtype)


def later_ones_of_the_document_too(documents: Tensor, dtype: torch.dtype, window: None) -> Tensor:
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return torch.zeros(same.shape, dtype=dtype).masked_fill(~same, float("-inf")).unsqueeze(1)


def places_in_the_row(documents: Tensor) -> Tensor:
    return torch.arange(documents.shape[1]).expand_as(documents)


def transposed_mask(documents: Tensor, dtype: torch.dtype, window: None) -> Tensor:
    return attention_mask(documents, dtype).transpose(2, 3)


WRONG = {
    "the mask of one document": ("attention_mask", all_that_is_not_later),
    "a mask that is not causal": ("attention_mask", later_ones_of_the_document_too),
    "a transposed mask": ("attention_mask", transposed_mask),
    "positions in the row": ("positions_in", places_in_the_row),
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "wrong"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_noticed(
    name: str, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Learned positions; rotary ones matter by their differences alone, which are the same anywhere.
    stock = stock_of(gpt2())
    model, tokens = ours(gpt2(), stock), tokens_of(gpt2())
    alone = [stock(piece).logits for piece in pieces(tokens)]
    monkeypatch.setattr("megaspeed.model.gpt." + name, wrong)
    assert difference(model(tokens, documents=DOCUMENTS), alone) > PLAINLY_WRONG


@torch.no_grad()
def test_without_documents_a_row_differs(config: ModelConfig, stock: PreTrainedModel) -> None:
    model, tokens = ours(config, stock), tokens_of(config)
    assert difference(model(tokens), [model(piece) for piece in pieces(tokens)]) > PLAINLY_WRONG


@torch.no_grad()
def test_rotary_angles_are_those_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only differences of rotary positions matter, but far from 0 an angle has lost digits."""
    config = llama(max_position_embeddings=4016)
    model, piece = ours(config, stock_of(config)), random_tokens(config, batch=1, sequence=8)
    row = torch.cat((piece, torch.zeros(1, 4000, dtype=torch.int64), piece), dim=1)

    def moved_by_distance() -> float:
        logits = model(row, documents=numbers(((8, 4000, 8),)))
        near, _, far = logits.split([8, 4000, 8], dim=1)
        return float((near - far).abs().max() / near.abs().max())

    assert moved_by_distance() < 1e-6
    monkeypatch.setattr("megaspeed.model.gpt.positions_in", places_in_the_row)
    assert moved_by_distance() > 3e-6


def test_a_mask_of_a_window_made_in_inference_mode_serves_a_later_step() -> None:
    model = GPT(llama(sliding_window=3))
    tokens = tokens_of(llama())
    window_mask.cache_clear()
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert window_mask.cache_info().hits > 0
    assert gradients(model)
