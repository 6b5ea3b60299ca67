"""DeepSpeed 0.19.8 fails without each work-around, and is correct with it.

If a test of a "without" fails, DeepSpeed may no longer need that work-around.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import deepspeed.ops
import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import real_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero import partitioned_param_coordinator, stage_1_and_2
from deepspeed.runtime.zero import utils as zero_functions
from deepspeed.utils import logger
from torch import Tensor, nn

from megaspeed import zero
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.model.parameters import parameters_of
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import build, engine
from megaspeed.zero.build import model_parallel_unit
from megaspeed.zero.workarounds import import_muon_uncompiled, stay_at_the_smallest_scale
from tests.support.machine import limit
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.tiny import BF16_IN_FP32, LLAMA, MOE, tiny_corpus
from tests.zero.held import is_gathered
from tests.zero.one_rank import one_rank, put_an_infinity, reference_of, small_run

# A call that takes this long hangs.
HANG_SECONDS = limit(4)

T = TypeVar("T")


def nothing(*_args: object) -> None:
    """Do nothing. This replaces a work-around."""


@contextmanager
def left_out(*names: str) -> Iterator[None]:
    """Skip the named work-arounds of ``build`` and ``engine`` within the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(engine if hasattr(engine, name) else build, name, nothing)
        yield


def ends_the_rank_where_it_hangs(name: str, function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function`` with a time limit. If a call hangs, the rank prints its name and ends.

    The clock starts at the call, so a slow machine has the same time for it.
    """

    def give_up() -> None:
        os.write(1, f"{name} hangs\n".encode())
        os._exit(1)

    def watched(*args: Any, **kwargs: Any) -> T:
        timer = threading.Timer(HANG_SECONDS, give_up)
        timer.start()
        try:
            return function(*args, **kwargs)
        finally:
            timer.cancel()

    return watched


# --- module_hooks ---------------------------------------------------------------------------------


class NoGathers:
    """Gathers nothing, so only DeepSpeed's hooks gather."""

    def __init__(self, *_args: object) -> None:
        pass

    expect = begin = end_backward = nothing


@contextmanager
def hooks_of_deepspeed() -> Iterator[None]:
    with left_out("remove_module_hooks"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "LayerGathers", NoGathers)
        yield


def two_zero3_stages(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> float:
    check = ends_the_rank_where_it_hangs(
        "the check", zero_functions.assert_ints_same_as_other_ranks
    )
    with hooks_of_deepspeed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", check)
        with one_rank(launch, run, corpus) as rank:
            return rank.train_step(0).loss


def test_with_deepspeeds_hooks_zero3_hangs_in_a_pipeline(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, pp=2, zero_optimization={"stage": 3})
    with pytest.raises(RankFailure, match="the check hangs"):
        pool.run(2, two_zero3_stages, run, tiny_corpus(run, cache))


def most_gathered_by_hooks(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[int, int]:
    """Return (most gathered parameters when a backward enters a module, all parameters)."""
    with hooks_of_deepspeed(), one_rank(launch, run, corpus) as rank:
        parameters = list(rank.engine.module.parameters())
        coordinator = rank.optimizer.parameter_offload.get_param_coordinator()
        fetch, gathered = coordinator.fetch_sub_module, []

        def watched(module: nn.Module, forward: bool) -> None:
            fetch(module, forward=forward)
            if not forward:
                gathered.append(sum(map(is_gathered, parameters)))

        coordinator.fetch_sub_module = watched
        rank.train_step(0)
        return max(gathered), len(parameters)


def test_with_deepspeeds_hooks_micro_batches_in_flight_keep_everything_gathered(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": 3}, parallel={"schedule": "gpipe"})
    for gathered, everything in pool.run(2, most_gathered_by_hooks, run, tiny_corpus(run, cache)):
        assert gathered > 0.9 * everything


# --- gradient_hooks -------------------------------------------------------------------------------


def gathers_and_hooks(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, omitted: bool
) -> tuple[int, int]:
    """Return (all-gathers while the engine is built, hooks on gradients)."""
    gathers = 0
    gather = comm.all_gather_into_tensor

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_gather_into_tensor", count)
        if omitted:
            patch.setattr(build, "without_gradient_hooks", nullcontext)
        with one_rank(launch, run, corpus) as rank:
            return gathers, len(rank.optimizer._grad_acc_hooks)


@pytest.mark.parametrize("stage", [2, 3])
def test_without_it_deepspeed_has_a_hook_on_every_gradient(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": stage})
    corpus = tiny_corpus(run, cache)
    parameters = len(parameters_of(run.config.model))
    (gathers, hooks), _ = pool.run(2, gathers_and_hooks, run, corpus, True)
    assert hooks == parameters
    assert gathers == (parameters if stage == 3 else 0)
    assert pool.run(2, gathers_and_hooks, run, corpus, False) == [(0, 0)] * 2


# --- parameter_views ------------------------------------------------------------------------------


def calls_of_python_code(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, *names: str
) -> tuple[int, dict[str, Tensor]]:
    """Return (calls of ``Tensor.narrow`` in DeepSpeed's step, the weights after it)."""
    calls = 0
    narrow = Tensor.narrow

    def count(tensor: Tensor, *args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return narrow(tensor, *args)

    with left_out(*names), one_rank(launch, run, corpus) as rank:
        step = rank.optimizer.step

        def watched() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Tensor, "narrow", count)
                step()

        rank.optimizer.step = watched
        rank.train_step(0)
        return calls, rank.weights()


def test_without_keeping_its_views_a_step_visits_every_parameter(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": 1})
    corpus = tiny_corpus(run, cache)
    (visits, made), _ = pool.run(2, calls_of_python_code, run, corpus, "keep_parameter_views")
    (kept, same), _ = pool.run(2, calls_of_python_code, run, corpus)
    assert visits - kept == len(parameters_of(run.config.model))
    assert all(torch.equal(weight, same[name]) for name, weight in made.items())


# --- gathers_in_the_step --------------------------------------------------------------------------


def gathers_of_deepspeed(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, prevented: bool
) -> tuple[int, dict[str, Tensor]]:
    """Return (how often DeepSpeed's step gathers all parameters, the weights after two steps)."""
    calls = 0
    gather = stage_1_and_2.all_gather_dp_groups

    def count(**buckets: Any) -> None:
        nonlocal calls
        calls += 1
        gather(**buckets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_1_and_2, "all_gather_dp_groups", count)
        if not prevented:
            patch.setattr(engine, "without_gathers", nullcontext)
        with one_rank(launch, run, corpus) as rank:
            for step in range(2):
                rank.train_step(step)
            return calls, rank.weights()


@pytest.mark.parametrize("stage", [1, 2])
def test_without_this_deepspeed_gathers_all_parameters_in_its_step(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": stage})
    corpus = tiny_corpus(run, cache)
    (gathers, once), _ = pool.run(2, gathers_of_deepspeed, run, corpus, False)
    (others, same), _ = pool.run(2, gathers_of_deepspeed, run, corpus, True)
    assert (gathers, others) == (2, 0)
    assert all(torch.equal(weight, same[name]) for name, weight in once.items())


# --- no_compilation -------------------------------------------------------------------------------


def extensions_wanted(launch: LaunchEnvironment, declared: bool) -> list[str]:
    """Return the names of the extensions that DeepSpeed requests when its communication starts."""
    wanted: list[str] = []
    with (
        ParallelContext.create(
            Grid(pp=1, dp=1, tp=1), launch, timeout_seconds=limit(30)
        ) as context,
        pytest.MonkeyPatch.context() as patch,
        nullcontext() if declared else left_out("declare_no_compiled_ops"),
    ):
        patch.setattr(OpBuilder, "load", lambda builder, **_: wanted.append(builder.name))
        # A fresh process has this value if there is a compiler.
        compatible = {"deepspeed_shm_comm": True}
        patch.setattr(deepspeed.ops, "__compatible_ops__", compatible, raising=False)
        # DeepSpeed calls functions of the extension. Here it is not built, so it has none.
        with suppress(AttributeError):
            build._prepare_deepspeed(context)
    return wanted


def test_without_declaring_that_nothing_is_compiled_an_extension_is_built(pool: RankPool) -> None:
    assert pool.run(1, extensions_wanted, False) == [["deepspeed_shm_comm"]]
    assert pool.run(1, extensions_wanted, True) == [[]]


# --- own_norm -------------------------------------------------------------------------------------


def all_axes(context: ParallelContext) -> SimpleNamespace:
    """Return an mpu that has the tensor and pipeline axes, which DeepSpeed's own norm needs."""
    grid = context.grid
    ranks = range(grid.world_size)
    one_model = [r for r in ranks if grid.coordinates_of(r).dp == context.dp_rank]
    model_group = dist.new_group(one_model, use_local_synchronization=True)
    alone = dist.new_group([context.rank], use_local_synchronization=True)
    mpu = model_parallel_unit(context)
    mpu.get_model_parallel_group = lambda: model_group
    mpu.get_model_parallel_world_size = lambda: dist.get_world_size(model_group)
    mpu.get_model_parallel_rank = lambda: dist.get_rank(model_group)
    mpu.get_tensor_model_parallel_group = lambda: context.tp_group or alone
    mpu.get_tensor_model_parallel_world_size = lambda: grid.tp
    mpu.get_tensor_model_parallel_rank = lambda: context.tp_rank
    return mpu


def norm_by_deepspeed(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> float:
    """Return the norm by which DeepSpeed clips, with its best possible configuration."""
    with left_out("use_norm"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "model_parallel_unit", all_axes)
        with one_rank(launch, run, corpus) as rank:
            if run.zero_stage < 3:
                norm = ends_the_rank_where_it_hangs("the norm", rank.optimizer.scaled_global_norm)
                rank.optimizer.scaled_global_norm = norm
            for name, parameter in rank.engine.module.named_parameters():
                owned = rank.engine.owned_elements[name]
                parameter.model_parallel = owned > 0  # type: ignore[attr-defined]
            rank.train_step(0)
            return float(rank.optimizer._global_grad_norm)


def norm_of_step_1(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> float:
    with one_rank(launch, run, corpus) as rank:
        return rank.train_step(0).grad_norm


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_norm_counts_replicated_key_value_heads_more_than_once(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    run = small_run(text, tp=4, model=LLAMA, zero_optimization={"stage": stage})
    corpus = tiny_corpus(run, cache)
    expected = reference_of(run, corpus).grad_norms[0]
    assert pool.run(4, norm_by_deepspeed, run, corpus)[0] > 1.01 * expected
    assert pool.run(4, norm_of_step_1, run, corpus) == pytest.approx([expected] * 4, rel=1e-5)


def test_deepspeeds_own_norm_hangs_where_pipeline_stages_differ_in_their_parameter_groups(
    pool: RankPool, text: Path, cache: Path
) -> None:
    # The tied embedding is a parameter group of its own on the first and last of three stages.
    run = small_run(text, pp=3, zero_optimization={"stage": 1})
    corpus = tiny_corpus(run, cache)
    # The last norm may also meet another collective of the same ranks. Then gloo aborts.
    with pytest.raises(RankFailure, match=r"the norm hangs|in scaled_global_norm"):
        pool.run(3, norm_by_deepspeed, run, corpus)
    expected = reference_of(run, corpus).grad_norms[0]
    assert pool.run(3, norm_of_step_1, run, corpus) == pytest.approx([expected] * 3, rel=1e-5)


# --- drop_gradient_partitions ---------------------------------------------------------------------


def has_deepspeeds_gradients(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, *names: str
) -> bool:
    """Return whether ZeRO-3's flat gradient is in memory, without these work-arounds."""
    with left_out(*names), one_rank(launch, run, corpus) as rank:
        return rank.optimizer.grad_partitions_flat_buffer is not None


def test_without_it_zero3_holds_a_second_flat_gradient(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, zero_optimization={"stage": 3})
    corpus = tiny_corpus(run, cache)
    held = pool.run(1, has_deepspeeds_gradients, run, corpus, "drop_gradient_partitions")
    assert held == [True]
    assert pool.run(1, has_deepspeeds_gradients, run, corpus) == [False]


# --- stage1_fp32_accumulation ---------------------------------------------------------------------


def optimizer_of_zero1(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, overruled: bool
) -> str:
    chosen: list[str] = []

    def remember(optimizer: Any) -> None:
        chosen.append(type(optimizer).__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "stay_at_the_smallest_scale", remember)
        if not overruled:
            patch.setattr(build, "always_the_zero_optimizer", nullcontext)
        with suppress(AttributeError), one_rank(launch, run, corpus):
            pass
    return chosen[0]


def test_without_overruling_bf16_with_fp32_gradients_takes_another_optimizer_at_zero1(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, zero_optimization={"stage": 1}, **BF16_IN_FP32)
    corpus = tiny_corpus(run, cache)
    assert pool.run(1, optimizer_of_zero1, run, corpus, False) == ["BF16_Optimizer"]
    assert pool.run(1, optimizer_of_zero1, run, corpus, True) == ["DeepSpeedZeroOptimizer"]


# --- experts on other ranks -----------------------------------------------------------------------

MATRICES = "blocks.0.mlp.down.weight"
"""8 experts of a block."""
PARTITIONED_OTHERWISE = "DeepSpeed partitions parameters differently"


def two_ranks_share_experts(text: Path, stage: int) -> Run:
    """Return a run of two data ranks with four experts of a block each."""
    changes: dict[str, Any] = {"parallel": {"expert": 2}, "zero_optimization": {"stage": stage}}
    return small_run(text, dp=2, model=MOE, **changes)


def initial_experts(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, broadcasts: bool
) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        if broadcasts:
            patch.setattr(build, "without_broadcast", nullcontext)
        with one_rank(launch, run, corpus) as rank:
            return rank.weights()[MATRICES]


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_replaces_the_experts_of_a_rank_by_those_of_the_first(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    run = two_ranks_share_experts(text, stage)
    corpus = tiny_corpus(run, cache)
    expected = reference_of(run, corpus, steps=0).initial_weights[MATRICES].chunk(2)
    first, second = pool.run(2, initial_experts, run, corpus, True)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[0])
    first, second = pool.run(2, initial_experts, run, corpus, False)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def elements_of_partitions(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, omitted: dict[str, Any]
) -> list[int]:
    """Return the elements of the experts, and of another weight, that a rank updates."""
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in omitted.items():
            patch.setattr(build, name, replacement)
        with one_rank(launch, run, corpus) as rank:
            fragments = [*rank.engine.state_fragments()]
    names = (MATRICES, "blocks.0.attention.output.weight")
    return [sum(len(part.weights) for part in fragments if part.name == name) for name in names]


@pytest.mark.parametrize(
    ("stage", "omitted"),
    [
        (1, {"partitions_of_groups_over": nullcontext}),
        (2, {"partitions_of_groups_over": nullcontext}),
        (3, {"partition_over": nothing}),
    ],
)
def test_deepspeed_partitions_experts_over_ranks_that_have_others(
    pool: RankPool, text: Path, cache: Path, stage: int, omitted: dict[str, Any]
) -> None:
    run = two_ranks_share_experts(text, stage)
    corpus = tiny_corpus(run, cache)
    with pytest.raises(RankFailure, match=PARTITIONED_OTHERWISE):
        pool.run(2, elements_of_partitions, run, corpus, omitted)
    found = pool.run(2, elements_of_partitions, run, corpus, {})
    assert [experts for experts, _ in found] == [4 * 32 * 24] * 2
    assert sum(other for _, other in found) == 32 * 32


# --- announced_renames ----------------------------------------------------------------------------


def future_warnings(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, hidden: bool
) -> list[str]:
    """Return torch's warnings during a step that reduces gradients as over NCCL."""
    with (
        warnings.catch_warnings(record=True) as caught,
        nullcontext() if hidden else left_out("hide_announced_renames"),
    ):
        warnings.simplefilter("always")
        with one_rank(launch, run, corpus) as rank:
            rank.train_step(0)
            part, complete = torch.empty(1), torch.ones(launch.world_size)
            comm.reduce_scatter_fn(part, complete, group=rank.context.data_group)
    return [str(w.message) for w in caught if issubclass(w.category, FutureWarning)]


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch renames them in 2.13")
def test_without_hiding_them_torch_announces_the_renames_of_collectives(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": 3})
    corpus = tiny_corpus(run, cache)
    announced = pool.run(2, future_warnings, run, corpus, False)[0]
    assert any("torch.distributed" in message for message in announced)
    assert pool.run(2, future_warnings, run, corpus, True) == [[], []]


# --- skipped_steps --------------------------------------------------------------------------------


def lines_about_a_skipped_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, hidden: bool
) -> list[str]:
    """Return what DeepSpeed logs during a step with an infinite gradient."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "filters", [])
        patch.setattr(logger, "handlers", [handler])
        with (
            nullcontext() if hidden else left_out("hide_skipped_steps"),
            one_rank(launch, run, corpus) as rank,
        ):
            logged.clear()
            assert rank.train_step(0, look=lambda: put_an_infinity(rank)).skipped
    return logged


def test_without_hiding_them_deepspeed_logs_each_skipped_step_too(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, zero_optimization={"stage": 3})
    corpus = tiny_corpus(run, cache)
    ((line,),) = pool.run(1, lines_about_a_skipped_step, run, corpus, False)
    assert "OVERFLOW! Skipping step" in line
    assert pool.run(1, lines_about_a_skipped_step, run, corpus, True) == [[]]


# --- process_environment --------------------------------------------------------------------------


def zero3_without_a_launcher(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, named: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK")
        with (
            nullcontext() if named else left_out("name_the_local_rank"),
            one_rank(launch, run, corpus) as rank,
        ):
            rank.train_step(0)


def test_without_a_local_rank_zero3_cannot_partition(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, zero_optimization={"stage": 3})
    corpus = tiny_corpus(run, cache)
    with pytest.raises(RankFailure, match="KeyError: 'LOCAL_RANK'"):
        pool.run(1, zero3_without_a_launcher, run, corpus, False)
    pool.run(1, zero3_without_a_launcher, run, corpus, True)


def warnings_of_the_accelerator(_launch: LaunchEnvironment, named: bool) -> list[str]:
    """Return DeepSpeed's warnings if it finds no accelerator."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DS_ACCELERATOR", raising=False)
        patch.setattr(real_accelerator, "ds_accelerator", None)
        patch.setattr(real_accelerator.accel_logger, "warning", said.append)
        if named:
            importlib.reload(zero)
        assert real_accelerator.get_accelerator().device_name() == "cpu"
    return said


def test_without_a_named_accelerator_deepspeed_warns_of_the_cpu(pool: RankPool) -> None:
    without, named = (
        pool.run(1, warnings_of_the_accelerator, False)[0],
        pool.run(1, warnings_of_the_accelerator, True)[0],
    )
    assert without and "Setting accelerator to CPU" in without[0]
    assert named == []


TRAIN_ALONE = """
import json, sys
from megaspeed.job.pretrain import main
before = "torch.distributed.checkpoint" in sys.modules
code = main(sys.argv[1:])
print(json.dumps([before, code, "torch._dynamo" in sys.modules]))
"""


def test_a_run_names_the_accelerator_and_imports_no_compiler(tmp_path: Path, text: Path) -> None:
    """torch's compiler takes 0.7 s of each rank's processor time, its checkpoint package 1.2 s."""
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    values = small_run(text, training={"steps": 1, "run_dir": str(tmp_path / "run")}).config
    (tmp_path / "run.json").write_text(json.dumps(values.to_json()))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_ALONE, "--config", str(tmp_path / "run.json")],
        capture_output=True,
        text=True,
        env={**environment, "MEGASPEED_CACHE": str(tmp_path / "cache")},
        check=True,
    )
    assert "Setting accelerator" not in done.stdout + done.stderr
    checkpoints, code, compiler = json.loads(done.stdout.splitlines()[-1])
    assert (checkpoints, code, compiler) == (False, 0, False), done.stdout


def muon_imports_inductor(launch: LaunchEnvironment, uncompiled: bool) -> bool:
    """Return whether importing Muon, as a ZeRO optimizer does, imports inductor."""
    assert "torch._inductor.compile_fx" not in sys.modules, "otherwise this test proves nothing"
    if uncompiled:
        import_muon_uncompiled()
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    return "torch._inductor.compile_fx" in sys.modules


def test_without_importing_muon_uncompiled_every_rank_imports_torchs_compiler(
    pool: RankPool,
) -> None:
    assert pool.run(1, muon_imports_inductor, False) == [True]
    assert pool.run(1, muon_imports_inductor, True) == [False]


def use_of_deepspeeds_muon(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[Any, bool]:
    """Return (the optimizer that DeepSpeed knows of, whether it would run its Muon)."""
    with one_rank(launch, run, corpus) as rank:
        rank.train_step(0)
        uses = getattr(rank.optimizer, "use_muon", False) or any(
            getattr(parameter, "use_muon", False) for parameter in rank.engine.module.parameters()
        )
        return rank.engine._engine._config.optimizer_name, uses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_with_muon_never_uses_deepspeeds(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    run = small_run(
        text, model=LLAMA, optimizer={"type": "Muon"}, zero_optimization={"stage": stage}
    )
    assert pool.run(1, use_of_deepspeeds_muon, run, tiny_corpus(run, cache)) == [(None, False)]


def local_ranks_under_open_mpi(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> None:
    """mpirun sets its own variables and no LOCAL_RANK. DeepSpeed compares the two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK")
        patch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(launch.local_rank))
        with one_rank(launch, run, corpus) as rank:
            rank.train_step(0)


def test_every_rank_of_mpirun_finds_its_own_local_rank(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": 1})
    pool.run(2, local_ranks_under_open_mpi, run, tiny_corpus(run, cache))


# --- smallest_loss_scale --------------------------------------------------------------------------


def overflow_at_the_minimum(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, mended: bool
) -> float:
    """Return the loss scale after an overflow at the minimum. The scaler of fp16 needs no GPU."""
    with one_rank(launch, run, corpus):
        scaler = DynamicLossScaler(
            init_scale=1,
            scale_window=10,
            min_scale=1,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
            dtype=torch.half,
        )
        if mended:
            stay_at_the_smallest_scale(SimpleNamespace(loss_scaler=scaler))
        scaler.update_scale(overflow=True)
        return scaler.cur_scale


def test_without_it_the_loss_scaler_raises_once_it_is_at_its_minimum(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(text, zero_optimization={"stage": 1})
    corpus = tiny_corpus(run, cache)
    with pytest.raises(RankFailure, match="already at minimum"):
        pool.run(1, overflow_at_the_minimum, run, corpus, False)
    assert pool.run(1, overflow_at_the_minimum, run, corpus, True) == [1]
