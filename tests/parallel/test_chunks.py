"""Interleaved schedules train like one process, at every ZeRO stage.

layers            0 1 2   3 4    5 6    7 8
pipeline stage    0       1      0      1        pp 2, two chunks on each stage
chunk             0       0      1      1
"""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.pipeline.schedules import pipeline_of
from tests.parallel.covering import CHUNKED, Row, pairs_of, possible_pairs, rows_of
from tests.parallel.references import FEW_STEPS, References, train_and_compare
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, LLAMA, tiny_run

ROWS = rows_of(CHUNKED)
# ZeRO-3 gathers the chunk of the next visit ahead only if there are three.
ROWS += [
    {**row, "chunks": 3, "gathers_ahead": True}
    for row in ROWS
    if row["zero_stage"] == 3 and not (row["chunks"] == 3 and row["gathers_ahead"])
]


def run_of(row: Row, text: Path) -> Run:
    pp, dp, tp = row["layout"]
    zero: dict[str, Any] = {
        "stage": row["zero_stage"],
        "overlap_comm": row["overlap_comm"],
        "stage3_param_persistence_threshold": row["persistent"],
    }
    if not row["gathers_ahead"]:
        zero["stage3_prefetch_bucket_size"] = 0
    return tiny_run(
        text,
        pp=pp,
        dp=dp,
        tp=tp,
        train_batch_size=dp * row["micro_batches"],
        data={"reset_at_documents": row["reset_at_documents"]},
        model={
            **(GPT2 if row["architecture"] == "gpt2" else LLAMA),
            # Chunks and stages have different lengths.
            "num_hidden_layers": pp * row["chunks"] + 1,
            "tie_word_embeddings": row["tied"],
            "embedding_dropout": row["dropout"],
            "attention_dropout": row["dropout"],
            "residual_dropout": row["dropout"],
        },
        parallel={
            "virtual_stages": row["chunks"],
            "micro_batch_groups": row["groups"],
            **{
                name: row[name]
                for name in (
                    "replicate",
                    "gradient_reduction",
                    "sequence_parallel",
                    "activation_checkpointing",
                )
            },
        },
        gradient_accumulation_steps=row["micro_batches"],
        zero_optimization=zero,
    )


def name_of(row: Row) -> str:
    (pp, dp, tp), rest = row["layout"], list(row.items())[2:]
    return f"pp{pp}-dp{dp}-tp{tp}-zero{row['zero_stage']}-{'-'.join(str(v) for _, v in rest)}"


def test_every_possible_pair_of_settings_is_covered(documents: Path) -> None:
    assert possible_pairs(CHUNKED) == set().union(*map(pairs_of, ROWS))
    gathers = {pipeline_of(run_of(row, documents)).gather_policy for row in ROWS}
    assert gathers == {"layers", "chunks", "chunks_ahead"}


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_chunks_equal_one_process(
    row: Row, pool: RankPool, references: References, documents: Path
) -> None:
    comparison = train_and_compare(pool, references, run_of(row, documents), FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest
