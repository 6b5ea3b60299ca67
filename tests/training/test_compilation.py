"""``training.compile``: the same training at every layout, and a clear error without a compiler."""

import functools
import importlib.util
import json
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.job import pretrain
from megaspeed.measurement.verification.verify import ParallelRun, train_rank
from megaspeed.topology.activity import Activity
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.compilation import Compilation, agree_to_compile, missing_compiler
from tests.model.tiny_gpt import DROPOUTS
from tests.parallel.few_rows import few_rows
from tests.support.machine import limit
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.tiny import GPT2, LLAMA, MOE, short_documents, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
STEPS = 3
GROWING = {
    "train_batch_size": None,
    "gradient_accumulation_steps": None,
    "train_micro_batch_size_per_gpu": 3,
    "train_batch_size_schedule": "0:6 1:12 2:18",
}
BALANCED = {**MOE, "router_aux_loss_coef": 0.1, "router_bias_rate": 0.01}


def train_compiled(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> ParallelRun | None:
    """Train with the traced graphs, but with torch's own operations instead of compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        compile_eager = functools.partial(torch.compile, backend="aot_eager")
        patch.setattr(torch, "compile", compile_eager)
        result = train_rank(launch, run, corpus, STEPS)
    # One graph for all blocks (with experts two: before and after the choice; four if experts are
    # exchanged), and on the last stage one for the loss. No later step or micro-batch adds another.
    of_blocks = 1 if run.config.model.num_experts is None else 2
    of_blocks = of_blocks if run.expert_exchange is None else 4
    has_loss = run.grid.pp == 1 or launch.rank == launch.world_size - 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == of_blocks + has_loss
    return result


@pytest.mark.parametrize(
    "changes",
    [
        {
            "tp": 2,
            "model": {**LLAMA, **DROPOUTS, "num_key_value_heads": 1},
            "parallel": {"sequence_parallel": True},
            "data": {"reset_at_documents": True},
            "zero_optimization": {"stage": 2},
            **GROWING,
        },
        {
            "dp": 2,
            "model": GPT2,
            "parallel": {"activation_checkpointing": "full"},
            "zero_optimization": {"stage": 3},
        },
        {
            "pp": 2,
            "model": {**LLAMA, "num_hidden_layers": 4},
            "parallel": {"virtual_stages": 2, "micro_batch_groups": 1},
            "zero_optimization": {"stage": 3},
        },
        {
            "dp": 2,
            "model": BALANCED,
            "parallel": {"activation_checkpointing": "full"},
            "zero_optimization": {"stage": 3},
            **GROWING,
        },
        {
            "cp": 2,
            "model": BALANCED,
            "parallel": {"activation_checkpointing": "selective"},
            "data": {"reset_at_documents": True},
            "zero_optimization": {"stage": 1},
        },
        {
            "dp": 2,
            "model": {**BALANCED, "num_experts_per_tok": 1},
            "parallel": {
                "expert": 2,
                "expert_exchange": "all_gather",
                "activation_checkpointing": "full",
            },
            "zero_optimization": {"stage": 3},
        },
        {
            "tp": 2,
            "model": BALANCED,
            "parallel": {
                "expert": 2,
                "expert_exchange": "all_to_all",
                "activation_checkpointing": "selective",
            },
            "zero_optimization": {"stage": 1},
        },
    ],
    ids=[
        "tp2-zero2-documents-dropout",
        "dp2-zero3-recomputed",
        "pp2-zero3-chunks",
        "dp2-zero3-experts-recomputed",
        "cp2-zero1-experts-selective-documents",
        "dp2-zero3-experts-gathered-recomputed",
        "tp2-zero1-experts-sent-selective",
    ],
)
def test_a_compiled_layout_trains_like_an_uncompiled_one(
    changes: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """The tolerance is 1e-6, because a fused operation may add in another order."""
    text = short_documents(TEXT, tmp_path)
    eager, compiled = (
        tiny_run(text, training={"compile": compiles}, **changes) for compiles in (False, True)
    )
    corpus = tiny_corpus(eager, tmp_path / "cache")
    expected, *_ = pool.run(2, train_rank, eager, corpus, STEPS)
    found, *_ = pool.run(2, train_compiled, compiled, corpus)
    assert expected is not None and found is not None
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert found.experts.loads == expected.experts.loads


def train_with_few_rows(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> ParallelRun | None:
    with few_rows(launch.rank):
        if run.config.training.compile is True:
            return train_compiled(launch, run, corpus)
        return train_rank(launch, run, corpus, STEPS)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_a_compiled_rank_may_receive_one_row_or_none(
    pool: RankPool, tmp_path: Path, exchange: str
) -> None:
    """Each micro-batch has another number of rows. None of them needs another graph."""
    keys: dict[str, Any] = {"parallel": {"expert": 4, "expert_exchange": exchange}}
    keys |= {"model": BALANCED, "gradient_accumulation_steps": 3}
    found = []
    for compiles in (False, True):
        run = tiny_run(TEXT, dp=4, training={"compile": compiles}, **keys)
        corpus = tiny_corpus(run, tmp_path)
        found.append(pool.run(4, train_with_few_rows, run, corpus)[0])
    eager, compiled = found
    assert eager is not None and compiled is not None
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-6)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-5)
    assert compiled.experts.loads == eager.experts.loads


def losses_and_output(
    launch: LaunchEnvironment, config: Path, changes: list[str]
) -> tuple[list[float], str]:
    """Run the main entry point to the end. Return the losses and the output."""
    os.environ["MEGASPEED_CACHE"] = str(config.with_name("cache"))
    run_dir = config.with_name("-".join(["run", *changes]))
    options = ["--config", str(config), "--set", f"training.run_dir={run_dir}", *changes]
    with redirect_stdout(StringIO()) as out:
        assert pretrain.main(options) == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], out.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_kernels_train_the_same_model(pool: RankPool, tmp_path: Path) -> None:
    """This uses the real compiler, on two tensor ranks."""
    config = tmp_path / "tiny.json"
    values = {
        "model": {**GPT2, "num_hidden_layers": 2},
        "parallel": {"tensor": 2},
        "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
        "training": {"steps": 4},
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    config.write_text(json.dumps(values))
    (expected, out), _ = pool.run(2, losses_and_output, config, [])
    assert "compiled the blocks" not in out
    (found, out), (_, other) = pool.run(
        2, losses_and_output, config, ["training.compile=true"], timeout_seconds=300
    )
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-6)
    assert (out + other).count("compiled the blocks and the loss in") == 1


def agree(launch: LaunchEnvironment, run: Run) -> tuple[bool, str | None]:
    """Return what a rank decides about compilation if the second of two ranks has no compiler."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context,
    ):
        if launch.rank == 1:
            patch.setenv("CXX", "no-such-compiler")
        return agree_to_compile(run, context)


def test_one_rank_without_a_compiler_is_named(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1: no C\+\+ compiler was found .*no-such"):
        pool.run(2, agree, tiny_run(TEXT, dp=2, training={"compile": True}))


def test_auto_compiles_on_cuda_only_and_states_why_it_cannot(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(TEXT, dp=2)
    assert run.config.training.compiles_on("cuda")
    assert not run.config.training.compiles_on("cpu")
    assert pool.run(2, agree, run) == [(False, None)] * 2
    assert all(
        not compiles and reason is not None and reason.startswith("rank 1: no C++ compiler")
        for compiles, reason in pool.run(2, agree_as_on_cuda, run)
    )


def agree_as_on_cuda(launch: LaunchEnvironment, run: Run) -> tuple[bool, str | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.config.training), "compiles_on", lambda *_: True)
        return agree(launch, run)


@pytest.mark.parametrize(
    ("capability", "triton", "problem"),
    [
        ((6, 1), True, "Triton does not support Quadro"),
        ((9, 0), False, "Triton is not installed (pip install triton)"),
        ((9, 0), True, None),
    ],
)
def test_a_gpu_needs_triton(
    capability: tuple[int, int],
    triton: bool,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Quadro")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if triton else None) if name == "triton" else find(name),
    )
    assert missing_compiler(torch.device("cuda:0")) == problem


def test_a_function_may_have_more_than_eight_graphs() -> None:
    """torch allows 8 by default. Blocks with and without rotary embeddings, some of which are
    recomputed, need 8 with an evaluation, and one more ended the run.
    """
    compiled = Compilation(Activity()).compiled(Tensor.t)
    for columns in range(1, 20):
        assert compiled(torch.ones(2, columns)).shape == (columns, 2)
