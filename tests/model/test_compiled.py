"""torch.compile turns a block into one graph, compiles it once, and saves no more for backward.

Only ``tests/training/test_compilation.py`` compiles kernels. Here the traced graph runs with
torch's own operations, so no compiler is needed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import (
    StaticTritonCompileResult,
    filter_reduction_configs_for_determinism,
)

from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.run import Recomputation
from megaspeed.model.attention import Inputs
from megaspeed.model.documents import segments_of_rows
from megaspeed.model.dropout import SampleDropout
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import DTYPES, GPT, ExpertBlock
from megaspeed.model.sequence_part import WHOLE
from megaspeed.planning.costs.activations import Activations
from megaspeed.tensor_parallel.parallelize import materialize, parallelize
from megaspeed.topology.activity import Activity
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training import worker
from megaspeed.training.compilation import Compilation
from megaspeed.training.rank_model import expert_axis, plain_model, tensor_axis
from tests.model.tiny_gpt import DROPOUTS, gpt2, initialized, llama
from tests.paper_gpu.accelerator import paper_accelerator
from tests.paper_gpu.fake_world import GPT2, LLAMA, MOE, fake_context, fake_rank, paper_run
from tests.paper_gpu.recorder import Recorder
from tests.support.rank_pool import RankPool


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    Compilation(Activity())
    yield
    torch._dynamo.reset()


def forward_and_gradient(block: torch.nn.Module, x: Tensor, given: Tensor | Inputs) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, given)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def compile_all(model: GPT, backend: Any) -> None:
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)


@pytest.mark.parametrize(
    "config", [gpt2(**DROPOUTS), llama(**DROPOUTS)], ids=lambda config: config.architecture
)
def test_all_blocks_and_steps_share_one_graph_and_evaluations_another(config: ModelConfig) -> None:
    """Version 0.1 passed samples as integers, which torch compiles into the graph. Keys are tensors
    for the same reason: an integer would cause a graph for each block.
    """
    compiled, eager = initialized(config, seed=2), initialized(config, seed=2)
    compiler = CompileCounterWithBackend("aot_eager")
    compile_all(compiled, compiler)
    assert len(compiled.blocks) > 1
    angles = None
    if compiled.angles is not None:
        angles = compiled.angles.of(None, 12, torch.float32, torch.device("cpu"))
    for step in range(4):
        x, samples = torch.randn(3, 12, 32), 3 * step + torch.arange(3)
        for name, block in compiled.blocks.items():
            inputs = Inputs(samples, angles)
            found = forward_and_gradient(block, x, inputs)
            expected = forward_and_gradient(eager.blocks[name], x, inputs)
            torch.testing.assert_close(found, expected)
        with torch.no_grad():
            compiled.eval()(torch.zeros(3, 12, dtype=torch.int64))
        compiled.train()
    assert compiler.frame_count == 2


def test_a_compiled_mask_has_the_same_bits() -> None:
    layer, x = SampleDropout(0.3, name="blocks.0.x", seed=1), torch.ones(2, 8, 16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    for first in (0, 5, 2**40):
        samples = torch.arange(first, first + 2)
        assert torch.equal(compiled(x, samples), layer(x, samples))


@pytest.mark.parametrize("recomputation", ["selective", "full"])
def test_a_compiled_block_may_be_recomputed(recomputation: Recomputation) -> None:
    config = gpt2(**DROPOUTS)
    results = []
    for compiles in (False, True):
        model = initialized(config, seed=2, chunks=[range(1, 3)], recomputation=recomputation)
        if compiles:
            compile_all(model, "aot_eager")
        torch.manual_seed(0)
        results.append(forward_and_gradient(model, torch.randn(2, 12, 32), torch.arange(2)))
    torch.testing.assert_close(results[0], results[1])


def uncompiled_kernels(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Use Inductor's decompositions and its choice of what to save, but not its kernels."""
    inner: Any = lambda part, *_, **__: make_boxed_func(part)  # noqa: E731
    return compile_fx(graph, inputs, inner_compile=inner)


def bytes_kept(compiles: bool, **changes: Any) -> tuple[int, int]:
    """Return the bytes that a block saves for backward, and the prediction.

    Each storage counts once. The input counts. The output, weights and angles do not.
    """
    run = paper_run(**changes)
    dtype, sequence = DTYPES[run.precision], run.config.data.sequence_length
    with fake_context(run.grid, rank=0) as context:
        model = plain_model(run)
        shards = parallelize(model, run.config.model, tensor_axis(run, context))
        materialize(
            model,
            lambda name: torch.randn(shards[name].local_shape) / 50,
            device=context.device,
            dtype=dtype,
        )
        if compiles:
            compile_all(model, uncompiled_kernels)
        angles = None
        if model.angles is not None:
            angles = model.angles.of(None, sequence, dtype, context.device)
        rows, width = run.batch.micro_batch_size, run.config.model.hidden_size
        x = torch.randn(rows, sequence // model.sequence_parts, width, dtype=dtype)
        x.requires_grad_()
        others = [*model.parameters(), *model.buffers(), *(angles or ())]
        segments = None
        if run.config.data.reset_at_documents:
            segments = segments_of_rows(rows, sequence, WHOLE, context.device)
            others.append(segments.cu_seqlens)
        not_counted = {tensor.untyped_storage().data_ptr() for tensor in others}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = model.blocks["0"](x, Inputs(torch.arange(rows), angles, None, segments))
        y.backward(torch.ones_like(y))
    counted = [t for storage, t in kept.items() if storage not in not_counted]
    predicted = Activations(run, context.device.type).block().kept
    return sum(tensor.untyped_storage().nbytes() for tensor in counted), predicted


COMPILED = {"training": {"compile": True}}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": GPT2},
        {"model": GPT2 | {"residual_dropout": 0.1}, "tp": 2},
        {"model": LLAMA},
        {"model": LLAMA, "bf16": {"enabled": False}},
        {"model": LLAMA, "data": {"reset_at_documents": True}},
    ],
    ids=["gpt2", "gpt2-dropout-tp2", "llama", "llama-fp32", "llama-documents"],
)
def test_a_compiled_block_keeps_what_is_predicted(changes: dict[str, Any]) -> None:
    kept, predicted = bytes_kept(True, **changes, **COMPILED)
    assert kept == predicted
    assert kept <= bytes_kept(False, **changes)[0]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_with_sequence_parallelism_a_compiled_block_gathers_again(model: dict[str, Any]) -> None:
    """Otherwise, the block would save two gathered inputs of n D elements each."""
    changes = {"model": model, "tp": 2, "parallel": {"sequence_parallel": True}}
    kept, predicted = bytes_kept(True, **changes, **COMPILED)
    assert 0.7 * predicted < kept <= predicted


class NotCompiled(Exception):
    """Raised when the code of a graph is known, so the graph is not compiled."""


def calls_of(
    block: torch.nn.Module, *inputs: Any, parts: Sequence[str] = ("forward",)
) -> list[list[str]]:
    """Return the kernels that its code calls in a forward and in a backward: Inductor's and
    torch's.

    If several methods are compiled, each has a forward and a backward.
    """
    codes: list[str] = []

    def only_write(graph: GraphLowering) -> Any:
        codes.append(graph.codegen()[0].value)
        raise NotCompiled

    def inner(part: torch.fx.GraphModule, example: Any, **options: Any) -> Any:
        with pytest.raises(Exception, match="NotCompiled"):
            compile_fx_inner(part, example, **options)
        return make_boxed_func(part)

    # No vector instructions, because Inductor would need a compiler to find out which ones exist.
    options = {"fx_graph_cache": False, "cpp.simdlen": 1}
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(options):
        patch.setattr(GraphLowering, "compile_to_module", only_write)
        for part in parts:
            compiled: Any = torch.compile(
                getattr(block, part),
                fullgraph=True,
                dynamic=False,
                backend=lambda graph, example: compile_fx(graph, example, inner_compile=inner),
            )
            patch.setattr(block, part, compiled)
        block(*inputs).sum().backward()
    call = re.compile(
        r"^ +(?:\w+ = )?(extern_kernels\.\w+|cpp_fused|torch\.ops\.[\w.]+)", re.MULTILINE
    )
    return [call.findall(code[code.rindex("def call(") :]) for code in codes]


@pytest.mark.parametrize(
    ("config", "uncompiled", "compiled"),
    [(gpt2(), 30, 24), (llama(), 106, 27)],
    ids=lambda value: value.architecture if isinstance(value, ModelConfig) else str(value),
)
def test_kernels_of_a_block_and_micro_batch(
    config: ModelConfig, uncompiled: int, compiled: int
) -> None:
    """These budgets may only be lowered. 12 compiled kernels are matrix products, 2 are attention.

    These are the kernels of Inductor's CPU code. On a GPU, the gradient of the fused projection is
    one kernel, not one for each of query, key and value.
    """
    model = GPT(config).to(torch.bfloat16)
    angles = None
    if model.angles is not None:
        angles = model.angles.of(None, 16, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(2, 16, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as recorder:
        model.blocks["0"](x, Inputs(angles=angles)).backward(torch.ones_like(x))
    assert sum(recorder.launches.values()) <= uncompiled
    assert sum(map(len, calls_of(model.blocks["0"], x, Inputs(angles=angles)))) <= compiled


def kernels_between_parts(block: ExpertBlock, x: Tensor, inputs: Inputs) -> int:
    """Return how many kernels a forward launches between its compiled parts."""
    with paper_accelerator(), Recorder() as recorder, pytest.MonkeyPatch.context() as patch:

        def without_kernels(part: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                before = recorder.launches.copy()
                result = part(*arguments)
                recorder.launches = before
                return result

            return run

        for name in block.COMPILED:
            patch.setattr(block, name, without_kernels(getattr(block, name)))
        block(x, inputs)
    return sum(recorder.launches.values())


@pytest.mark.parametrize(
    ("parallel", "between", "compiled"),
    [
        ({}, 22, 32),
        ({"expert": 2, "expert_exchange": "all_to_all"}, 31, 36),
        ({"expert": 2, "expert_exchange": "all_gather"}, 34, 35),
    ],
    ids=["one-rank", "all-to-all", "all-gather"],
)
def test_kernels_of_a_compiled_block_with_experts(
    parallel: dict[str, Any], between: int, compiled: int
) -> None:
    """These budgets may only be lowered. Both methods of balance are on."""
    changes: dict[str, Any] = {"model": MOE, "parallel": parallel, **COMPILED}
    run = paper_run(dp=2, **changes)
    config = run.config.model
    with fake_context(run.grid, rank=0) as context:
        model = plain_model(run)
        parallelize(model, config, tensor_axis(run, context), expert_axis(run, context))
        block = model.blocks["0"].to_empty(device="cpu").to(torch.bfloat16)
        assert isinstance(block, ExpertBlock) and isinstance(block.mlp, Experts)
        for weight in block.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        block.mlp.bias, block.mlp.counts = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
        block.mlp.auxiliary = torch.zeros(())
        assert model.angles is not None
        angles = model.angles.of(None, 16, torch.bfloat16, torch.device("cpu"))
        inputs = Inputs(angles=angles, gradient_scale=torch.ones(()))
        x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        assert kernels_between_parts(block, x, inputs) <= between
        parts = block.COMPILED[2:] if parallel else block.COMPILED[1:2]
        calls = calls_of(block, x, inputs, parts=("attend", *parts))
    assert len(calls) == 2 * (1 + len(parts))
    assert sum(map(len, calls)) <= compiled


@pytest.mark.parametrize("split", [False, True])
def test_a_compiled_backward_multiplies_while_it_communicates(split: bool) -> None:
    """The weight's gradient is computed while the input's gradient is summed over the tensor axis.
    The input's gradient is computed while the input is gathered again.
    """
    Compilation(Activity(), keeps_order=True)
    parallel = {"sequence_parallel": split}
    changes: dict[str, Any] = {"model": GPT2, "parallel": parallel, **COMPILED}
    run = paper_run(tp=2, **changes)
    with fake_context(run.grid, rank=0) as context:
        model = plain_model(run)
        parallelize(model, run.config.model, tensor_axis(run, context))
        block = model.blocks["0"].to_empty(device="cpu").to(torch.bfloat16)
        x = torch.randn(2, 16 // model.sequence_parts, 32, dtype=torch.bfloat16, requires_grad=True)
        _, backward = calls_of(block, x, Inputs())
    names = {
        "all_reduce_": "sum",
        "reduce_scatter_tensor": "sum",
        "all_gather_into_tensor": "gather",
    }
    order = [
        names.get(call.split(".")[-2], call.split(".")[-1 if "mm" in call else -2])
        for call in backward
        if "c10d" in call or call.endswith(".mm")
    ]
    column = ["gather", "mm", "wait_tensor", "sum", "mm", "wait_tensor"]
    row = ["gather", "wait_tensor", "mm", "mm"]
    if not split:
        column, row = ["mm", "sum", "mm", "wait_tensor"], ["mm", "mm"]
    assert order == [*row, *column] * 2


def test_a_launch_releases_pythons_gil() -> None:
    """torch's static launcher holds Python's GIL if CUDA's launch queue is full. Then no thread can
    report a failure. With our settings, torch does not use this launcher.
    """
    assert inductor_config.static_cuda_launcher_default(), "torch's own choice"
    kernel: Any = None
    launcher = StaticTritonCompileResult.can_statically_launch(
        kernel, {}, {"device_type": "cuda"}, HeuristicType.POINTWISE
    )
    assert launcher is None


@pytest.mark.parametrize(
    ("tp", "split", "same"), [(2, False, True), (2, True, False), (1, False, False)]
)
def test_tensor_ranks_with_copies_choose_the_same_reductions(
    pool: RankPool, tp: int, split: bool, same: bool
) -> None:
    """Each rank adds up the gradient of a norm. If each measured which kernel is the fastest, they
    could choose different kernels, and the sums could differ in the last bit.
    """
    run = paper_run(tp=tp, parallel={"sequence_parallel": split})
    assert pool.run(1, choices_of_a_reduction, run) == [1 if same else 3]


def choices_of_a_reduction(launch: LaunchEnvironment, run: Run) -> int:
    """Return how many kernels a rank measures for a reduction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "agree_to_compile", lambda *_: (True, None))
        with fake_rank(run, rank=0):
            meta = {"deterministic": inductor_config.deterministic}
            choices: Any = [
                SimpleNamespace(kwargs={"XBLOCK": 1, "R0_BLOCK": size}, num_warps=8, num_stages=1)
                for size in (512, 1024, 2048)
            ]
            return len(filter_reduction_configs_for_determinism(meta, choices))
