"""The lines before the first step: the layout, the batch, the model, the kernels."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

from megaspeed.config.resolve import Run
from megaspeed.job.console import (
    COLUMNS,
    banner,
    describe_attention,
    print_folded,
)
from megaspeed.job.resume import Start
from megaspeed.model.parameters import training_flops_per_token
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


def printed(run: Run) -> list[str]:
    console = Console(file=StringIO(), width=COLUMNS)
    for part in banner(run, torch.device("cpu"), Start()):
        print_folded(console, part)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_run_is_described_by_its_layout_batch_model_and_files() -> None:
    run = tiny_run(
        TEXT,
        pp=2,
        tp=2,
        dp=2,
        train_batch_size=12,
        gradient_accumulation_steps=3,
        zero_optimization={"stage": 3},
        training={"run_dir": "runs/[b]tiny", "report_to": ["tensorboard"]},
    )
    flops = training_flops_per_token(run.config.model, 16)
    assert printed(run) == [
        "tiny: pp 2 x dp 2 x tp 2 = 8 ranks on cpu, ZeRO-3, fp32",
        "step: 12 samples of 16 tokens; each data rank takes 3 micro-batches of 2, 1f1b",
        f"model: 48,576 parameters, {flops / 1e6:.4g} MFLOP a token",
        "attention: scaled_dot_product_attention, fused",
        "files: runs/[b]tiny, tensorboard",
    ]


def test_recomputation_is_described() -> None:
    full = {"activation_checkpointing": "full"}
    described = "activations: recomputed in backward"
    assert described in printed(tiny_run(TEXT, parallel=full))
    few = {"activation_checkpointing": "selective", "recomputed_blocks": 2}
    lines = printed(tiny_run(TEXT, parallel=few))
    assert f"{described} (selective, 2 blocks of each pipeline stage)" in lines


def test_no_line_is_wider_than_80_columns_but_a_path_stays_in_one_piece() -> None:
    folder = "/scratch/" + "long/" * 20
    run = tiny_run(
        TEXT,
        pp=16,
        dp=8,
        tp=8,
        train_batch_size=64,
        model={"num_hidden_layers": 20, "attention_dropout": 0.1, "num_attention_heads": 8},
        training={"run_dir": folder},
    )
    *lines, path = printed(replace(run, name="a_name_of_a_run_that_is_rather_long"))
    assert max(map(len, lines)) <= 80
    assert path.strip() == str(Path(folder))


def test_attention_is_described_with_the_reason() -> None:
    fused, cpu = "scaled_dot_product_attention, fused", torch.device("cpu")
    assert describe_attention(tiny_run(TEXT), cpu) == fused
    dropping = describe_attention(tiny_run(TEXT, model={"attention_dropout": 0.1}), cpu)
    assert dropping.startswith("written out, not fused, because model.attention_dropout is 0.1")
    documents = tiny_run(TEXT, data={"reset_at_documents": True})
    assert describe_attention(documents, cpu).startswith("FlashAttention, without a mask for data.")
    on_gpu = describe_attention(documents, torch.device("cuda"))  # in fp32
    assert on_gpu.startswith(f"{fused}, with a mask for data.reset_at_documents")
