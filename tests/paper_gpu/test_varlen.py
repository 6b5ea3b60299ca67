"""Attention within documents on a GPU: one kernel for a block, no host read, one compiled graph.

torch's operator (``torch.nn.attention.varlen``) has no kernel for CPUs. This file registers one,
written from FlashAttention's documentation. Everything else on a GPU's path is real: the arguments
of the operator, its autograd, recomputation, shards and the compiler.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import varlen

from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.run import Recomputation
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.reference import train_reference
from megaspeed.measurement.verification.verify import ParallelRun, train_rank, whole_batch
from megaspeed.model.attention import attention_mask
from megaspeed.model.documents import (
    Documents,
    Segments,
    _has_flash_attention,
    attends_without_mask,
    gathered_rows,
    places_in,
    segments_of_rows,
    take,
    varlen_attention,
)
from megaspeed.model.gpt import GPT, Block
from megaspeed.model.sequence_part import WHOLE, SequencePart
from megaspeed.topology.activity import Activity
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.compilation import Compilation
from tests.model.tiny_gpt import gpt2, gradients, initialized, llama, packed
from tests.paper_gpu.fake_world import LLAMA
from tests.paper_gpu.paper_step import PaperStep, step_of
from tests.paper_gpu.rows_of_documents import (
    CONFIGS,
    KEY_VALUE_HEADS,
    OTHERS,
    ROWS,
    SHARES_HEADS,
    compare_with_mask,
    has_kernel,
    largest_difference,
    path,
    trained,
)
from tests.paper_gpu.shrunk_presets import every_model
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA as TINY_LLAMA
from tests.support.tiny import short_documents, tiny_corpus, tiny_run

WITH_KERNEL = llama(num_key_value_heads=KEY_VALUE_HEADS)
PAPER_LLAMA = {**LLAMA, "num_key_value_heads": KEY_VALUE_HEADS}


def weights_of(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, cu_k: Tensor, window: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the softmax (H, T, T_k) of q (T, H, K) and k, and the logarithms (H, T) of its sums.

    The last query of a run is aligned with the last key of the run with the same number. A window
    (left, right) limits the keys before and after a query; -1 is unlimited.
    """
    queries, keys = torch.arange(len(q)), torch.arange(len(k))
    of_query = torch.searchsorted(cu_seqlens, queries, right=True)
    of_key = torch.searchsorted(cu_k, keys, right=True)
    aligned = queries + (cu_k - cu_seqlens)[of_query]
    before = aligned.unsqueeze(1) - keys
    left, right = (len(k) if side < 0 else side for side in window)
    seen = (of_query.unsqueeze(1) == of_key) & (before <= left) & (-before <= right)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def shared(x: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads (T, H_kv, K) for each query head that shares them."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1)


@varlen._varlen_attn.register_kernel("cpu")
def forward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
    window: list[int],
    grouped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    assert max_q == max(2, int(cu_seqlens.diff().max()))
    assert max_k == max(2, int(cu_k.diff().max())) and cu_seqlens.dtype == cu_k.dtype == torch.int32
    assert is_causal == (window == [-1, 0]) and grouped == (q.shape[1] != k.shape[1])
    scale = scale or q.shape[-1] ** -0.5
    weights, sums = weights_of(q, shared(k, q.shape[1]), cu_seqlens, cu_k, window, scale)
    out = torch.einsum("hqk,khd->qhd", weights, shared(v, q.shape[1]))
    return out.to(q.dtype).contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward_kernel(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    cu_seqlens, cu_k, scale, window = options[0], options[1], options[-2], options[-1]
    scale = scale or q.shape[-1] ** -0.5
    keys, values, gradient = shared(k, q.shape[1]), shared(v, q.shape[1]), gradient.float()
    weights, _ = weights_of(q, keys, cu_seqlens, cu_k, window, scale)
    of_weights = torch.einsum("qhd,khd->hqk", gradient, values)
    inner = (gradient * out).sum(-1).T.unsqueeze(-1)
    of_scores = weights * (of_weights - inner) * scale
    of_q = torch.einsum("hqk,khd->qhd", of_scores, keys)
    of_k = torch.einsum("hqk,qhd->khd", of_scores, q.float())
    of_v = torch.einsum("hqk,qhd->khd", weights, gradient)
    grouped = [x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (of_k, of_v)]
    return tuple(x.to(q.dtype).contiguous() for x in (of_q, *grouped))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_without_a_mask_logits_and_gradients_are_those_with_one(config: ModelConfig) -> None:
    for documents in (ROWS, *OTHERS):
        with path("mask"):
            expected = trained(config, documents)
        for name in ("cpu", "gpu"):
            with path(name):
                assert largest_difference(trained(config, documents), expected) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_torchs_own_kernel_agrees_with_the_mask(config: ModelConfig) -> None:
    compare_with_mask(config, torch.device("cuda"))


def test_torch_2_11_has_the_kernel_unless_heads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, calls = varlen.varlen_attn, []

    def of_torch_2_11(
        *arguments: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
    ) -> Any:
        calls.append(window_size)
        return attend(*arguments, scale=scale, window_size=window_size)

    gpu, decide = torch.device("cuda"), attends_without_mask
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_11)
    monkeypatch.setattr(
        "megaspeed.model.documents._has_flash_attention", _has_flash_attention.__wrapped__
    )
    assert [decide(each, gpu, torch.bfloat16) for each in (gpt2(), llama())] == [True, False]
    assert not decide(gpt2(), gpu, torch.float32)
    with path("gpu"):
        trained(gpt2(), ROWS)
    assert calls == [(-1, 0)] * 2, "one for each block"
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert decide(llama(), gpu, torch.bfloat16) == SHARES_HEADS


def test_a_window_in_rows_of_one_document_needs_no_mask() -> None:
    config = WITH_KERNEL.model_copy(update={"sliding_window": 3})
    with path("mask"):
        expected = trained(config, None)
    with path("gpu"):
        assert largest_difference(trained(config, None), expected) < 1e-6
        assert segments_of_rows.cache_info().currsize == 1
        segments_of_rows.cache_clear()
        with torch.inference_mode():
            initialized(config)(torch.zeros(4, 24, dtype=torch.int64))
        model = initialized(config)
        model(torch.zeros(4, 24, dtype=torch.int64)).sum().backward()
        assert segments_of_rows.cache_info().hits == 1


@pytest.mark.parametrize("recomputation", ["selective", "full"])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_recomputed_blocks_give_the_same_bits(name: str, recomputation: Recomputation) -> None:
    with path(name):
        expected = trained(llama(), ROWS)
        found = trained(llama(), ROWS, recomputation=recomputation)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_wrong_boundary_is_noticed() -> None:
    with path("mask"):
        expected = trained(WITH_KERNEL, ROWS)
    ROWS.segments.cu_seqlens[2] += 1
    for name in ("cpu", "gpu"):
        with path(name):
            assert largest_difference(trained(WITH_KERNEL, ROWS), expected) > 1e-2
    ROWS.segments.cu_seqlens[2] -= 1


SCALE = 0.8
"""Multiplies the scores. It is more than twice 1 / sqrt(8), which is usual."""


def shared_by(parts: Sequence[SequencePart], window: int | None) -> dict[str, list[Tensor]]:
    """Return output and gradients of attention by path, computed by all ranks, one after another,
    or at once if there is one part.
    """
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(4, 24, heads, 8, generator=generator) for heads in (4, *[KEY_VALUE_HEADS] * 2)
    ]
    weight = torch.randn(4, 24, 32, generator=generator)
    found = {}
    for name in ("mask", "cpu", "gpu"):
        if name == "cpu" and window is not None:
            continue
        q, k, v = (x.clone().requires_grad_() for x in whole)
        mixed, loss = torch.empty_like(weight), torch.zeros(())
        for part in parts:
            own = part.ranges(24)
            sent = [
                torch.cat(
                    [
                        take(x, replace(part, rank=r).ranges(24)).flatten(0, 1)
                        for r in range(part.size)
                    ]
                )
                for x in (k, v)
            ]
            if name == "mask":
                index = gathered_rows(4, 24, part)
                mask = attention_mask(take(ROWS.positions, own), torch.float32, window, part)
                pair = [x[index].view(4, 24, KEY_VALUE_HEADS, 8).transpose(1, 2) for x in sent]
                queries = take(q, own).transpose(1, 2)
                y = F.scaled_dot_product_attention(
                    queries, pair[0], pair[1], attn_mask=mask, scale=SCALE, enable_gqa=True
                )
                y = y.transpose(1, 2).flatten(2)
            else:
                segments = Segments.of(ROWS.positions, part)
                pair = [x.view(4, 24, KEY_VALUE_HEADS, 8) for x in sent]
                if segments.keys is not None:
                    pair = [x[segments.keys].unsqueeze(0) for x in sent]
                with path(name):
                    y = varlen_attention(take(q, own), pair[0], pair[1], segments, window, SCALE)
            loss = loss + (y * take(weight, own)).sum()
            mixed[:, places_in(own)] = y.detach()
        loss.backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        found[name] = [mixed, q.grad, k.grad, v.grad]
    return found


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_parts_of_the_queries_are_those_of_all(size: int, window: int | None) -> None:
    parts = [SequencePart("all_gather", rank, size) for rank in range(size)]
    found = shared_by(parts, window)
    for results in found.values():
        assert largest_difference(results, shared_by([WHOLE], window)["mask"]) < 1e-6


def test_a_run_of_queries_ends_with_its_keys() -> None:
    """The second of two ranks has the tokens ". d" and "e f" of "b c . d e f . g"."""
    begins = torch.tensor([[False, False, True, False, False, False, True, False]] * 2)
    segments = Documents.beginning_at(begins, SequencePart("all_gather", 1, 2)).segments
    assert segments.cu_seqlens.tolist() == [0, 2, 4, 6, 8]
    assert segments.cu_keys is not None and segments.cu_keys.tolist() == [0, 2, 6, 8, 12]
    assert (segments.longest, segments.longest_keys) == (2, 4)
    # Of the first rank: b c . g of both rows, then of the second one: . d e f.
    assert segments.keys is not None
    assert segments.keys.tolist() == [8, 9, 8, 9, 10, 11, 12, 13, 12, 13, 14, 15]


@pytest.mark.parametrize("heads", [4, 2])
def test_the_operator_for_cpus_keeps_torchs_rules(heads: int) -> None:
    q, k, v = (torch.randn(24, n, 8, requires_grad=True) for n in (4, heads, heads))
    lengths = packed(((5, 1, 18),)).segments.cu_seqlens
    operator = torch.ops.megaspeed.document_attention.default
    torch.library.opcheck(operator, (q, k, v, lengths, lengths, None))
    keys = [torch.randn(40, heads, 8, requires_grad=True) for _ in range(2)]
    longer = torch.tensor([0, 7, 10, 40], dtype=torch.int32)
    torch.library.opcheck(operator, (q, *keys, lengths, longer, SCALE))


@pytest.mark.parametrize("recomputation", ["none", "selective"])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_any_number_of_documents_is_one_graph(name: str, recomputation: Recomputation) -> None:
    Compilation(Activity())
    compiler = CompileCounterWithBackend("aot_eager")
    eager, compiled = (initialized(WITH_KERNEL, recomputation=recomputation) for _ in range(2))
    for block in compiled.blocks.values():
        block.forward = torch.compile(
            block.forward, fullgraph=True, dynamic=False, backend=compiler
        )
    tokens = torch.arange(96).view(4, 24)
    with path(name):
        for documents in (*OTHERS, ROWS):
            results = []
            for model in (eager, compiled):
                logits = model(tokens, None, documents)
                logits.square().mean().backward()
                results.append([logits.detach(), *gradients(model).values()])
                model.zero_grad()
            assert largest_difference(results[1], results[0]) < 1e-6
        assert compiler.frame_count == 1
        # A rank of a context axis has half of the queries. The other half's keys are made up.
        torch._dynamo.reset()
        part = compiled.part = SequencePart("all_gather", 1, 2)
        for block in compiled.blocks.values():
            assert isinstance(block, Block)
            block.attention.gather_rows = lambda x, index: torch.cat((x, x)).index_select(0, index)
        for documents in (*OTHERS, ROWS):
            begins = documents.positions == 0
            own = Documents.beginning_at(begins, part)
            compiled(tokens[:, :12], None, own).square().mean().backward()
    assert compiler.frame_count == 2
    torch._dynamo.reset()


MODELS = {name: config for name, config in every_model().items() if has_kernel(config)}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_torch_takes_the_shapes_of_every_preset(config: ModelConfig) -> None:
    """torch infers the shapes on the meta device, as it does for the compiler.

    torch's ``flash_api.cpp`` states what a GPU's kernel requires. The kernel loads 16 bytes at a
    time, so strides and offsets must be multiples of 8 elements.
    """
    check_shapes(config, WHOLE)
    # Half of the queries, and keys in two runs that are 5 / 4 of all.
    check_shapes(config, SequencePart("all_gather", 1, 2))


def check_shapes(config: ModelConfig, part: SequencePart) -> None:
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
        tokens = torch.zeros(2, 16 // part.size, dtype=torch.int64)
    begins = packed(((5, 11), (16,))).positions == 0
    own = Documents.beginning_at(begins, part)
    documents = own.moved(lambda tensor: tensor.to("meta"))
    if part.size > 1:
        model.part = part
        for block in model.blocks.values():
            assert isinstance(block, Block)
            block.attention.gather_rows = lambda x, index: torch.cat((x, x)).index_select(0, index)
    calls: list[tuple[Tensor, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        attend = varlen.varlen_attn

        def watched(*args: Any, **options: Any) -> Any:
            calls.append(args[:5])
            return attend(*args, **options)

        patch.setattr(varlen, "varlen_attn", watched)
        model(tokens, None, documents).sum().backward()
    ((*operands, cu_seqlens, _),) = calls  # one for each layer
    rows = 32 // part.size, *[32 if own.segments.keys is None else len(own.segments.keys)] * 2
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()
    key_value_heads = config.num_key_value_heads
    heads_of_operands = (config.num_attention_heads, key_value_heads, key_value_heads)
    for x, heads, count in zip(operands, heads_of_operands, rows, strict=True):
        assert x.dtype == torch.bfloat16 and x.shape == (count, heads, config.head_dim)
        assert config.head_dim % 8 == 0 and config.head_dim <= 256 and x.stride(2) == 1
        assert all(n % 8 == 0 for n in (x.stride(0), x.stride(1), x.storage_offset()))
    assert len(gradients(model)) > 0


SELECTIVE = {"sequence_parallel": True, "activation_checkpointing": "selective"}


def train_as_on_a_gpu(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> ParallelRun | None:
    with path("gpu"):
        return train_rank(launch, run, corpus, steps=2)


def test_a_layout_is_one_process_with_a_mask(pool: RankPool, tmp_path: Path) -> None:
    run = tiny_run(
        short_documents(Path(__file__).parents[2] / "LICENSE", tmp_path),
        pp=2,
        tp=2,
        model={**TINY_LLAMA, "sliding_window": 6},
        parallel=SELECTIVE,
        data={"reset_at_documents": True},
        zero_optimization={"stage": 2},
    )
    corpus = tiny_corpus(run, tmp_path / "cache")
    found, *_ = pool.run(4, train_as_on_a_gpu, run, corpus)
    assert found is not None
    with path("mask"):
        expected = train_reference(run, partial(whole_batch, run, corpus), steps=2)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def step_as_on_a_gpu(launch: LaunchEnvironment, rank: int, changes: dict[str, Any]) -> PaperStep:
    with path("gpu"):
        return step_of(launch, rank, changes)


RESET: dict[str, Any] = {"model": PAPER_LLAMA, "data": {"reset_at_documents": True}}


@pytest.mark.parametrize(
    ("rank", "layout"),
    [
        (0, {"dp": 2, "tp": 2, "zero_optimization": {"stage": 3}}),
        (3, {"pp": 2, "tp": 2, "parallel": SELECTIVE}),
        (0, {"model": {**PAPER_LLAMA, "sliding_window": 4}}),
    ],
    ids=["zero3", "second-stage-selective", "window"],
)
def test_no_pass_reads_the_documents_from_the_device(
    pool: RankPool, rank: int, layout: dict[str, Any]
) -> None:
    (step,) = pool.run(1, step_as_on_a_gpu, rank, {**RESET, **layout})
    assert step.device_waits == {}
    ((place, count),) = step.reads.items()
    assert "all_gather_numbers" in place and count == 1


def test_a_block_launches_two_kernels_more_than_in_a_row_of_one_document(pool: RankPool) -> None:
    """torch creates zero gradients for the two results of the operator that nothing uses."""
    of_block = []
    for changes in ({"model": PAPER_LLAMA}, RESET):
        models = ({**PAPER_LLAMA, "num_hidden_layers": blocks} for blocks in (1, 2))
        (one,), (two,) = (
            pool.run(1, step_as_on_a_gpu, 0, {**changes, "model": model}) for model in models
        )
        of_block.append(two.launches - one.launches)
    micro_batches = 2
    assert of_block[1] - of_block[0] == 2 * micro_batches
