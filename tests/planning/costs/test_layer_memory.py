"""The memory that a layer saves for backward, compared with the paper's formula and
with the layer.
"""

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megaspeed.config.resolve import Run
from megaspeed.measurement.allocations import AllocationLog
from megaspeed.model.attention import Inputs, RotaryAngles, attention_mask
from megaspeed.model.documents import Documents, attends_without_mask
from megaspeed.model.experts import Experts, Received
from megaspeed.model.gpt import Block, ExpertBlock
from megaspeed.model.recomputation import keeping, recomputing
from megaspeed.planning.costs.activations import (
    Activations,
    hidden_bytes,
    own_tokens_of,
    tokens_of,
)
from megaspeed.tensor_parallel.parallelize import parallelize
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.rank_model import expert_axis, plain_model, tensor_axis
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, LLAMA, MOE, tiny_run

pytestmark = pytest.mark.slow

TEXT = Path(__file__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gpt2_block_keeps_what_korthikanti_et_al_count(tp: int, sequence_parallel: bool) -> None:
    """In 16 bits, the block saves s b h (10 + 24 / t) bytes, or s b h 34 / t with sequence
    parallelism. This omits the attention matrix, which the fused kernel does not save, and two
    dropout masks of one byte.
    """
    run = tiny_run(TEXT, tp=tp, parallel={"sequence_parallel": sequence_parallel}, **BF16)
    layers = Activations(run, "cuda")
    sbh = tokens_of(run) * run.config.model.hidden_size
    split = tp if sequence_parallel else 1
    of_the_paper = sbh * ((10 - 2) / split + 24 / tp)
    statistics = layers.block().kept - of_the_paper
    per_token = tokens_of(run) * (2 * 2 * 2 / split + 4 * 4 / tp)
    assert statistics == per_token, "mean and deviation of two norms, fp32 row sums of softmax"


def test_with_full_recomputation_a_block_keeps_2_sbh_bytes() -> None:
    run = tiny_run(TEXT, parallel={"activation_checkpointing": "full"}, **BF16)
    layers = Activations(run, "cuda")
    sbh = tokens_of(run) * run.config.model.hidden_size
    assert layers.block().kept == 2 * sbh == hidden_bytes(run)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_selective_recomputation_a_gpt2_block_keeps_its_products(
    tp: int, sequence_parallel: bool
) -> None:
    """In 16 bits, the block saves s b h (4 + 16 / t) bytes, and fp32 row sums of the softmax. For
    each element of the hidden states, these are the block's output and the sum before the MLP;
    queries, keys, values, the attention's output, and 4 elements of the feed-forward layer.
    """
    parallel = {"sequence_parallel": sequence_parallel, "activation_checkpointing": "selective"}
    run = tiny_run(TEXT, tp=tp, parallel=parallel, **BF16)
    sbh = tokens_of(run) * run.config.model.hidden_size
    split = tp if sequence_parallel else 1
    row_sums = tokens_of(run) * 4 * 4 // tp
    assert Activations(run, "cuda").block().kept == sbh * (4 / split + 16 / tp) + row_sums


@pytest.mark.parametrize("recomputation", ["selective", "full"])
@pytest.mark.parametrize("model", [GPT2, MOE], ids=["gpt2", "experts"])
def test_the_first_blocks_of_a_stage_are_recomputed(
    model: dict[str, Any], recomputation: str
) -> None:
    """A recomputed block with experts also keeps the choice of experts."""
    parallel = {"activation_checkpointing": recomputation, "recomputed_blocks": 2}
    run = tiny_run(TEXT, model=model, parallel=parallel)
    width = run.config.model.hidden_size
    stage = plain_model(run, [range(1, 4)]).to_empty(device="cpu")
    x = torch.zeros(run.batch.micro_batch_size, 16, width, requires_grad=True)
    layers = Activations(run, "cpu")
    held = [layers.shared()]
    log = AllocationLog(x.device)
    log.claim("parameters", [*stage.parameters(), x])
    with log:
        for block in stage.blocks.values():
            block.register_forward_hook(lambda *_: held.append(log.live().activations))
        y = stage(x)
    kept = [after - before for before, after in pairwise(held)]
    assert y.shape == x.shape
    assert kept == [layers.block(index).kept for index in range(3)]
    assert kept[0] == kept[1] < kept[2]


def keep_in_blocks(launch: LaunchEnvironment, run: Run) -> list[tuple[int, int]]:
    """Return, for each of three blocks, the bytes that it keeps, and how many rows it receives."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context:
        stage, rows = plain_model(run, [range(1, 4)]), list[int]()
        axes = tensor_axis(run, context), expert_axis(run, context)
        parallelize(stage, run.config.model, *axes)
        stage.to_empty(device="cpu")
        for parameter in stage.parameters():
            nn.init.normal_(parameter, std=0.1)
        own = run.config.data.sequence_length // (run.grid.tp if run.sequence_parallel else 1)
        torch.manual_seed(context.rank)
        x = torch.randn(run.batch.micro_batch_size, own, run.config.model.hidden_size)
        x.requires_grad_()
        held = [Activations(run, "cpu").shared()]
        scale = torch.ones(())
        log = AllocationLog(x.device)
        log.claim("parameters", [*stage.parameters(), x, scale])

        def note(block: nn.Module, *_: object) -> None:
            dist.barrier()  # a thread of gloo may hold a message for a moment
            time.sleep(0.05)
            held.append(log.live().activations)

        for block in stage.blocks.values():
            assert isinstance(block.mlp, Experts) and block.mlp.exchange is not None
            send = block.mlp.exchange.send

            def counting(packed: Tensor, received: Received, send: Any = send) -> Tensor:
                rows.append(len(received.places().tokens))
                return send(packed, received)

            block.mlp.exchange.send = counting  # type: ignore[method-assign]
            block.register_forward_hook(note)
        with log:
            y = stage(x, gradient_scale=scale)
        assert y.shape == x.shape
        return list(zip((b - a for a, b in pairwise(held)), rows, strict=True))


@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize(("dp", "tp", "ep"), [(2, 1, 2), (2, 2, 4)])
def test_a_block_with_shared_experts_really_keeps_this(
    pool: RankPool, dp: int, tp: int, ep: int, exchange: str, recomputation: str
) -> None:
    """To the byte, for the rows that each rank received. The last block is not recomputed."""
    run = tiny_run(
        TEXT,
        dp=dp,
        tp=tp,
        model={**MOE, "norm_topk_prob": True, "router_aux_loss_coef": 0.01},
        parallel={
            "expert": ep,
            "expert_exchange": exchange,
            "activation_checkpointing": recomputation,
            "recomputed_blocks": None if recomputation == "none" else 2,
        },
    )
    factors = set()
    for blocks in pool.run(dp * tp, keep_in_blocks, run):
        for index, (kept, rows) in enumerate(blocks):
            factor = rows / (own_tokens_of(run) * 2) if exchange == "all_to_all" else 1.0
            factors.add(factor)
            predicted = Activations(replace(run, load_factor=factor), "cpu")
            assert predicted.block(index).kept == kept
    assert (len(factors) > 2) == (exchange == "all_to_all")


def run_block(run: Run, precision: str) -> tuple[int, int, int]:
    """Return (saved, peak of the forward, peak of both passes) of one block on this CPU, without
    gradients.
    """
    model = run.config.model
    selective = run.config.parallel.activation_checkpointing == "selective"
    compose = recomputing if selective else keeping
    kind = Block if model.num_experts is None else ExpertBlock
    block = kind(model, name="blocks.0", seed=0, compose=compose).to(DTYPES[precision])
    shape = (run.batch.micro_batch_size, run.config.data.sequence_length, model.hidden_size)
    x = torch.randn(shape, dtype=DTYPES[precision], requires_grad=True)
    samples = torch.arange(shape[0])
    positions, mask, segments = None, None, None
    if run.config.data.reset_at_documents:
        begins = torch.arange(shape[1]).expand(shape[:2]) % 5 == 0
        documents = Documents.beginning_at(begins)
        positions, segments = documents.positions, documents.segments
        if not attends_without_mask(model, x.device, x.dtype):
            mask, segments = attention_mask(positions, x.dtype), None
    angles = None
    if model.positions == "rotary":
        angles = RotaryAngles(model).of(positions, shape[1], x.dtype, x.device)
    scale = torch.ones(()) if model.router_aux_loss_coef else None
    inputs = Inputs(samples, angles, mask, segments, gradient_scale=scale)
    y = block(x, inputs)
    y.backward(gradient := torch.randn_like(y))  # the first use creates constants
    for parameter in block.parameters():
        parameter.grad = None
    x.grad = None
    log = AllocationLog(x.device)
    log.claim("parameters", [*block.parameters(), x, gradient, scale])
    if model.residual_dropout:  # it has constants, which take a second to find
        log.claim_everything_else_alive("parameters")
    for parameter in block.parameters():
        parameter.register_hook(lambda g: log.claim("gradients", [g]))
    with log:
        y = block(x, inputs)
        kept, forward = log.live().activations, log.peak().activations
        y.backward(gradient)
    return kept, forward, log.peak().activations


@pytest.mark.parametrize("recomputation", ["none", "selective"])
@pytest.mark.parametrize(("precision", "reset"), [("fp32", True), ("bf16", False)])
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (GPT2, {}),
        (GPT2, {"residual_dropout": 0.1}),
        (LLAMA, {}),
        (LLAMA, {"num_key_value_heads": 4}),
        (GPT2, {"qk_norm": True}),
        (GPT2, {"qk_norm": True, "head_dim": 16}),
        (GPT2, {"qk_norm": True, "attention_dropout": 0.1}),
        (LLAMA, {"qk_norm": True, "head_dim": 12}),
        (LLAMA, {"qk_norm": True, "positions": "learned"}),
        (LLAMA, {"qk_norm": True, "head_dim": 32, "attention_dropout": 0.1}),
        (LLAMA, {"mlp": "gelu", "qkv_bias": True}),
        (MOE, {}),
        (MOE, {"moe_intermediate_size": 112, "residual_dropout": 0.1}),
        (MOE, {"norm_topk_prob": True, "router_aux_loss_coef": 0.01}),
    ],
    ids=lambda value: value["architecture"] if "architecture" in value else str(value),
)
def test_a_block_really_keeps_this(
    shape: dict[str, Any], changes: dict[str, Any], precision: str, reset: bool, recomputation: str
) -> None:
    run = tiny_run(
        TEXT,
        model={**shape, **changes},
        data={"reset_at_documents": reset},
        parallel={"activation_checkpointing": recomputation},
        bf16={"enabled": precision == "bf16"},
    )
    predicted = Activations(run, "cpu").block()
    kept, forward, both = run_block(run, precision)
    assert predicted.kept == pytest.approx(kept, rel=0.01)
    assert predicted.kept + predicted.forward_working == pytest.approx(forward, rel=0.1)
    highest = max(predicted.forward_working, predicted.backward_working)
    assert predicted.kept + highest == pytest.approx(both, rel=0.1)


@pytest.mark.parametrize("model", [LLAMA, MOE], ids=["llama", "experts"])
def test_a_compiled_block_recomputes_the_same(model: dict[str, Any]) -> None:
    """A block of experts has two compiled parts, which do not keep gathered rows."""
    parallel = {"activation_checkpointing": "selective"}
    run = tiny_run(TEXT, model=model, parallel=parallel, training={"compile": True})
    block, eager_block = (_selective_block(run) for _ in range(2))
    eager_block.load_state_dict(block.state_dict())
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    if isinstance(block, ExpertBlock):
        block.attend = compiled(block.attend)  # type: ignore[method-assign]
        block.add_experts = compiled(block.add_experts)  # type: ignore[method-assign]
    else:
        block.forward = compiled(block.forward)  # type: ignore[method-assign]
    x = torch.randn(run.batch.micro_batch_size, 16, run.config.model.hidden_size)
    x.requires_grad_()
    angles = RotaryAngles(run.config.model).of(None, 16, x.dtype, x.device)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(x, Inputs(angles=angles))
    note(y)
    for given in (x, *angles, *block.parameters()):
        storages.pop(given.untyped_storage().data_ptr(), None)
    assert sum(storages.values()) == pytest.approx(Activations(run, "cpu").block().kept, rel=0.02)
    gradient = torch.randn_like(y)
    (of_compiled,) = torch.autograd.grad(y, x, gradient)
    (of_eager,) = torch.autograd.grad(eager_block(x, Inputs(angles=angles)), x, gradient)
    # Gradients are large here, because a new module of experts has large weights.
    largest = float(of_eager.abs().max())
    torch.testing.assert_close(of_compiled, of_eager, rtol=1e-5, atol=1e-6 * largest)


def _selective_block(run: Run) -> Block:
    kind = Block if run.config.model.num_experts is None else ExpertBlock
    return kind(run.config.model, name="blocks.0", seed=0, compose=recomputing)


@pytest.mark.parametrize("bf16", [True, False])
def test_the_first_block_of_a_stage_keeps_positions_and_a_mask_only_in_fp32(bf16: bool) -> None:
    """Positions take 4 bytes a token. In fp32 on a GPU, the mask takes 4 B S^2 bytes."""
    precision: dict[str, Any] = {"bf16": {"enabled": bf16}}
    run = tiny_run(TEXT, data={"reset_at_documents": True}, **precision)
    rows, sequence = run.batch.micro_batch_size, run.config.data.sequence_length
    for device_type, has_mask in (("cuda", not bf16), ("cpu", False)):
        layers = Activations(run, device_type)
        added = layers.first_block().kept - layers.block().kept
        assert added == rows * (4 * sequence + (4 * sequence**2 if has_mask else 0))
    layers = Activations(tiny_run(TEXT, **precision), "cuda")
    assert layers.first_block() == layers.block()


@pytest.mark.parametrize("bf16", [True, False])
def test_a_window_has_a_mask_on_a_cpu_and_in_fp32(bf16: bool) -> None:
    model = {**GPT2, "sliding_window": 4}
    run = tiny_run(TEXT, model=model, bf16={"enabled": bf16})
    mask = run.config.data.sequence_length**2 * (2 if bf16 else 4)
    assert Activations(run, "cpu").shared() == mask
    assert Activations(run, "cuda").shared() == (0 if bf16 else mask)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_attention_dropout_keeps_two_square_matrices_and_no_mask(
    shape: dict[str, Any], precision: str
) -> None:
    """Rows are so long that the square matrices are most of the saved memory."""
    run = tiny_run(
        TEXT,
        model={**shape, "attention_dropout": 0.1, "max_position_embeddings": 128},
        data={"sequence_length": 128},
        bf16={"enabled": precision == "bf16"},
    )
    predicted = Activations(run, "cpu").block()
    kept, _, both = run_block(run, precision)
    assert predicted.kept == pytest.approx(kept, rel=0.01)
    highest = max(predicted.forward_working, predicted.backward_working)
    assert predicted.kept + highest == pytest.approx(both, rel=0.1)


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_residual_dropout_keeps_nothing(shape: dict[str, Any], precision: str) -> None:
    bf16: dict[str, Any] = {"bf16": {"enabled": precision == "bf16"}}
    without, dropping = (
        tiny_run(TEXT, model={**shape, "residual_dropout": p}, **bf16) for p in (0.0, 0.1)
    )
    assert run_block(dropping, precision)[0] == run_block(without, precision)[0]
