"""Over tensor ranks, the GPT computes the same as the plain one. Each mistake is noticed."""

import pytest

from megaspeed.config.model import ModelConfig
from tests.model.tiny_gpt import DROPOUTS, gpt2, llama
from tests.support.rank_pool import RankPool
from tests.tensor_parallel import mutations
from tests.tensor_parallel.side_by_side import (
    Case,
    Mutation,
    differences,
    plain_step,
    steps_on_rank,
)

CONFIGS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(tie_word_embeddings=False),
    "llama kv 4": llama(num_key_value_heads=4),
    "llama kv 2": llama(),
    "llama kv 1 tied": llama(num_key_value_heads=1, tie_word_embeddings=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
REGIMES = [False, True]  # sequence parallelism off and on


def found(pool: RankPool, tensor_size: int, *cases: Case) -> list[set[str]]:
    """Return the differences between each case on so many ranks and the plain model."""
    by_rank = pool.run(tensor_size, steps_on_rank, cases)
    return [
        set(differences(plain_step(case.config), ranks))
        for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@every_config
def test_loss_logits_and_every_gradient_are_those_of_one_process(
    pool: RankPool, config: ModelConfig, tensor_size: int
) -> None:
    with_dropout = config.model_copy(update=DROPOUTS)
    without, dropping, split, split_dropping = found(
        pool,
        tensor_size,
        Case(config=config),
        Case(config=with_dropout),
        Case(config=config, sequence_parallel=True),
        Case(config=with_dropout, sequence_parallel=True),
    )
    assert without == set()
    assert dropping == set()
    assert split == set()
    assert split_dropping == set()


@pytest.mark.parametrize("vocab_size", [5, 33])
def test_ranks_without_a_logical_token_take_part(pool: RankPool, vocab_size: int) -> None:
    cases = [
        Case(config=config, sequence_parallel=sequence_parallel)
        for config in (gpt2(vocab_size=vocab_size), llama(vocab_size=vocab_size))
        for sequence_parallel in REGIMES
    ]
    assert found(pool, 4, *cases) == [set()] * 4


def test_recomputed_blocks_give_the_same_gradients(pool: RankPool) -> None:
    config = llama(num_key_value_heads=1, **DROPOUTS)
    cases = [
        Case(config=config, sequence_parallel=sequence_parallel, recomputation=recomputation)
        for sequence_parallel in REGIMES
        for recomputation in ("selective", "full")
    ]
    assert found(pool, 2, *cases) == [set()] * 4


FORWARD = {"logits", "losses"}


@pytest.mark.parametrize(
    ("mutation", "sequence_parallel", "wrong"),
    [
        (mutations.bias_before_the_sum, False, FORWARD),
        (mutations.bias_before_the_sum, True, FORWARD),
        (mutations.gradient_summed_on_leaving, False, {"blocks.0.mlp.down.weight"}),
        (
            mutations.gradient_not_summed_on_entry,
            False,
            {"blocks.1.mlp_norm.weight", "copies of blocks.1.mlp_norm.weight", "head.norm.bias"},
        ),
        (mutations.gradient_not_summed_on_entry, True, {"blocks.1.mlp_norm.weight"}),
        (
            mutations.replicated_gradients_not_summed,
            True,
            {
                "blocks.0.attention_norm.weight",
                "copies of blocks.0.attention_norm.weight",
                "blocks.0.mlp_norm.bias",
                "head.norm.weight",
                "blocks.0.attention.output.bias",
                "blocks.0.mlp.down.bias",
            },
        ),
        (
            mutations.gradient_not_gathered_at_the_split,
            True,
            {"embedding.tokens.weight", "embedding.positions.weight"},
        ),
    ],
)
def test_a_wrong_collective_is_noticed(
    pool: RankPool, mutation: Mutation, sequence_parallel: bool, wrong: set[str]
) -> None:
    case = Case(config=gpt2(), sequence_parallel=sequence_parallel, mutation=mutation)
    (differing,) = found(pool, 2, case)
    assert wrong <= differing
    if not wrong >= FORWARD:  # the error is only in the backward pass
        assert not differing & FORWARD


def test_a_rms_norm_of_a_split_sequence_whose_gradient_is_not_summed_is_noticed(
    pool: RankPool,
) -> None:
    case = Case(
        config=llama(),
        sequence_parallel=True,
        mutation=mutations.replicated_gradients_not_summed,
    )
    norms = {f"blocks.{i}.{name}_norm.weight" for i in range(2) for name in ("attention", "mlp")}
    norms |= {"head.norm.weight"}
    (differing,) = found(pool, 2, case)
    assert differing == norms | {f"copies of {name}" for name in norms}


@pytest.mark.parametrize("key_value_heads", [1, 2])
def test_key_value_gradients_that_are_not_summed_over_their_copies_are_noticed(
    pool: RankPool, key_value_heads: int
) -> None:
    case = Case(
        config=llama(num_key_value_heads=key_value_heads),
        mutation=mutations.key_value_gradients_not_summed,
    )
    shared = {f"blocks.{i}.attention.qkv.weight" for i in range(2)}
    (differing,) = found(pool, 4, case)
    assert differing == shared | {f"copies of {name}" for name in shared}


@pytest.mark.parametrize(
    ("mutation", "sequence_parallel", "dropout"),
    [
        (mutations.first_mask_shard_everywhere, False, "attention_dropout"),
        (mutations.first_mask_shard_everywhere, True, "residual_dropout"),
        (mutations.mask_of_the_local_shape, False, "attention_dropout"),
        (mutations.mask_of_the_local_shape, True, "residual_dropout"),
        (mutations.another_mask_on_each_rank, False, "embedding_dropout"),
        (mutations.another_mask_on_each_rank, False, "attention_dropout"),
        (mutations.another_mask_on_each_rank, False, "residual_dropout"),
        (mutations.another_mask_on_each_rank, True, "residual_dropout"),
    ],
)
def test_a_wrong_dropout_mask_is_noticed(
    pool: RankPool, mutation: Mutation, sequence_parallel: bool, dropout: str
) -> None:
    case = Case(
        config=gpt2(**{dropout: 0.2}),
        sequence_parallel=sequence_parallel,
        mutation=mutation,
    )
    (differing,) = found(pool, 2, case)
    assert differing >= FORWARD
