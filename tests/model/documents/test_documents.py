"""Documents packed into one row give the same results as each document alone.

A row has the end of a document that began before it, complete documents, and the beginning of the
last one. The row's logits and gradients equal those of each piece alone.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.model.attention import attention_mask, mask_of_rows
from megaspeed.model.documents import Documents
from megaspeed.model.gpt import GPT
from tests.model.documents.packed_rows import (
    DOCUMENTS,
    difference,
    ours,
    pieces,
    tokens_of,
)
from tests.model.stock_models import stock_of
from tests.model.tiny_gpt import gpt2, gradients, llama, packed, random_tokens

ROUNDING = 1e-5  # relative to the largest logit or gradient
PLAINLY_WRONG = 1e-2


# --- by hand --------------------------------------------------------------------------------------


def test_positions_and_lengths_are_of_each_document() -> None:
    begins = torch.tensor([[0, 0, 1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1, 0, 1]]) == 1
    documents = Documents.beginning_at(begins)
    assert documents.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 0, 0, 1, 0]]
    assert documents.segments.cu_seqlens.tolist() == [0, 2, 6, 8, 9, 12, 13, 15, 16]
    assert {x.dtype for x in (documents.positions, documents.segments.cu_seqlens)} == {torch.int32}
    moved = documents.moved(lambda tensor: tensor.to("meta"))
    assert documents.segments.longest == moved.segments.longest == 4
    assert Documents.beginning_at(torch.ones(2, 3) == 1).segments.longest == 2, (
        "length 1 takes another path"
    )
    one = Documents.beginning_at(torch.zeros(1, 5, dtype=torch.bool))
    assert one.segments.longest == 5
    assert (one.positions.tolist(), one.segments.cu_seqlens.tolist()) == ([[0, 1, 2, 3, 4]], [0, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_sees_its_document_up_to_itself(dtype: torch.dtype) -> None:
    mask = attention_mask(packed(((2, 3, 1), (6,))).positions, dtype)
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
    one = model(tokens, documents=packed(((24,),) * 3))
    assert float((one - whole).abs().max() / whole.abs().max()) < ROUNDING


@torch.no_grad()
def test_what_stands_in_another_document_changes_no_bit(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    model, tokens = ours(config, stock), tokens_of(config)
    second = (DOCUMENTS.positions == 0).cumsum(dim=1) == 2
    others = torch.where(second, (tokens + 1) % config.vocab_size, tokens)
    before, after = (model(x, documents=DOCUMENTS) for x in (tokens, others))
    elsewhere = ~second
    assert torch.equal(before[elsewhere], after[elsewhere])
    assert not torch.equal(before[~elsewhere], after[~elsewhere])


# --- the comparison notices -----------------------------------------------------------------------


def places_in_the_row(documents: Documents) -> Documents:
    positions = torch.arange(24, dtype=torch.int32).expand(3, 24)
    return replace(documents, positions=positions)


def with_boundaries(documents: Documents, cu_seqlens: Tensor) -> Documents:
    return replace(documents, segments=documents.segments._replace(cu_seqlens=cu_seqlens))


def one_document_too_long(documents: Documents) -> Documents:
    cu_seqlens = documents.segments.cu_seqlens.clone()
    cu_seqlens[3] += 1
    return with_boundaries(documents, cu_seqlens)


def rows_of_one_document(documents: Documents) -> Documents:
    return with_boundaries(documents, 24 * torch.arange(4, dtype=torch.int32))


@torch.no_grad()
@pytest.mark.parametrize("wrong", [places_in_the_row, one_document_too_long, rows_of_one_document])
def test_a_mistake_is_noticed(wrong: Callable[[Documents], Documents]) -> None:
    # The learned positions matter. Of rotary positions only the differences matter, which are the
    # same anywhere.
    stock = stock_of(gpt2())
    model, tokens = ours(gpt2(), stock), tokens_of(gpt2())
    alone = [stock(piece).logits for piece in pieces(tokens)]
    assert difference(model(tokens, documents=wrong(DOCUMENTS)), alone) > PLAINLY_WRONG


@torch.no_grad()
def test_without_documents_a_row_differs(config: ModelConfig, stock: PreTrainedModel) -> None:
    model, tokens = ours(config, stock), tokens_of(config)
    assert difference(model(tokens), [model(piece) for piece in pieces(tokens)]) > PLAINLY_WRONG


@torch.no_grad()
def test_rotary_angles_are_those_of_the_document() -> None:
    """Only differences of rotary positions matter. But the angles of large positions have lost
    digits.
    """
    config = llama(max_position_embeddings=4016)
    model, piece = ours(config, stock_of(config)), random_tokens(config, batch=1, sequence=8)
    row = torch.cat((piece, torch.zeros(1, 4000, dtype=torch.int64), piece), dim=1)
    documents = packed(((8, 4000, 8),))

    def moved_by_distance(documents: Documents) -> float:
        logits = model(row, documents=documents)
        near, _, far = logits.split([8, 4000, 8], dim=1)
        return float((near - far).abs().max() / near.abs().max())

    assert moved_by_distance(documents) < 1e-6
    in_the_row = replace(documents, positions=torch.arange(4016).unsqueeze(0))
    assert moved_by_distance(in_the_row) > 3e-6


def test_a_mask_of_a_window_made_in_inference_mode_serves_a_later_step() -> None:
    model = GPT(llama(sliding_window=3))
    tokens = tokens_of(llama())
    mask_of_rows.cache_clear()
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert mask_of_rows.cache_info().hits > 0
    assert gradients(model)
