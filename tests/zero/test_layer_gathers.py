"""ZeRO-3 gathers a layer when a pass enters it and frees it when the pass leaves it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.model.gpt import Block
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero.layer_gathers import GatheredLayer, LayerGathers
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, tiny_corpus
from tests.zero.held import bytes_of
from tests.zero.one_rank import OFFLOAD_ALL, OneRank, one_rank, small_run

PER_STEP = {"gradient_reduction": "per_step"}
SELECTIVE = {"activation_checkpointing": "selective"}
RECOMPUTED = {"activation_checkpointing": "full"}
ONE_BY_ONE = {"stage3_prefetch_bucket_size": 0}


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **more}}


# --- the order ------------------------------------------------------------------------------------


@contextmanager
def watched(names: dict[int, str], events: list[str]) -> Iterator[None]:
    """Record "+name" when a layer's gather starts, "name" when it is used, "-name" when it is
    freed.

    ``names``: layer names by the number of the GatheredLayer, in the order of their creation.
    """
    numbers: dict[int, int] = {}

    def noting(mark: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(layer: GatheredLayer) -> None:
            method(layer)
            name = names.get(numbers[id(layer)])
            if name is not None:
                events.append(mark + name)

        return call

    make = GatheredLayer.__init__

    def numbered(layer: GatheredLayer, *args: Any) -> None:
        make(layer, *args)
        numbers[id(layer)] = len(numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredLayer, "__init__", numbered)
        for mark, name in (("+", "start"), ("", "finish"), ("-", "free")):
            patch.setattr(GatheredLayer, name, noting(mark, getattr(GatheredLayer, name)))
        yield


def events_of_a_step(
    launch: LaunchEnvironment,
    run: Run,
    corpus: PreparedCorpus,
    names: dict[int, str] | None = None,
) -> str:
    """Return the gathers, uses and releases of layers in this rank's first step.

    Layers are named e (embedding), 0, 1, ... (blocks) and h (head). n is the head's norm, which is
    the only part of the head that a backward gathers.
    """
    events: list[str] = []
    blocks = run.config.model.num_hidden_layers
    model = ["e", *map(str, range(blocks)), "h"]
    pp, ranks = run.grid.pp, run.grid.world_size
    own = layers_of_stages(run)[launch.rank * pp // ranks]
    # The first GatheredLayer has the parameters that stay gathered.
    if names is None:
        names = {0: "kept"} | {1 + index: model[layer] for index, layer in enumerate(own)}
        names[1 + len(own)] = "n"
    with watched(names, events), one_rank(launch, run, corpus) as rank:
        rank.train_step(0)
    return " ".join(events)


# When a backward starts and when the next forward starts, its first layers are still gathered or
# already on their way.
TO_HEAD = "+1 -0 1 +h -1 h"
FORWARD = f"+e e +0 -e 0 {TO_HEAD} +n -h"
BACKWARD = "n +1 -n 1 +0 -1 0"
FORWARD_AGAIN = f"+e e -e {TO_HEAD} +n -h"
END = "-0 -e"
KEPT = "+kept kept"


@pytest.mark.parametrize(
    "parallel",
    [{}, PER_STEP, SELECTIVE, RECOMPUTED],
    ids=["", "per step", "selective", "recomputed"],
)
def test_a_pass_gathers_every_layer_once_and_the_next_one_ahead_of_its_use(
    pool: RankPool, text: Path, cache: Path, parallel: dict[str, Any]
) -> None:
    changes = {"model": {"num_hidden_layers": 2}, "gradient_accumulation_steps": 2}
    run = small_run(text, dp=2, parallel=parallel, **changes, **zero())
    for events in pool.run(2, events_of_a_step, run, tiny_corpus(run, cache)):
        assert events == f"{FORWARD} {BACKWARD} {FORWARD_AGAIN} {BACKWARD} {END}"


def test_the_last_block_stays_from_forward_to_backward(
    pool: RankPool, text: Path, cache: Path
) -> None:
    """The head's norm stays gathered, so the backward needs the last block first."""
    changes = {"model": {"num_hidden_layers": 2}, "gradient_accumulation_steps": 2}
    run = small_run(text, dp=2, **changes, **zero(stage3_param_persistence_threshold=64))
    forward, again = "+e e +0 -e 0 +1 -0 1 +h h -h", "+e e -e +1 -0 1 +h h -h"
    backward = "+n -n +0 -1 0"
    events = pool.run(2, events_of_a_step, run, tiny_corpus(run, cache))[0]
    assert events == f"{KEPT} {forward} {backward} {again} {backward} {END}"


def test_small_blocks_are_gathered_together_and_once_a_step(
    pool: RankPool, text: Path, cache: Path
) -> None:
    """The name of the first block stands for both. A backward needs neither embedding nor head."""
    changes = {"model": {"num_hidden_layers": 2}, "gradient_accumulation_steps": 3}
    small = {"stage3_param_persistence_threshold": 64, "stage3_prefetch_bucket_size": 2 * 12_704}
    run = small_run(text, dp=2, **changes, **zero(**small))
    names = {0: "kept", 1: "e", 2: "0", 3: "h", 4: "n"}
    events = pool.run(2, events_of_a_step, run, tiny_corpus(run, cache), names)[0]
    forward, backward = "h h -h", "+n -n"
    between = f"{backward} +e e -e +{forward}"
    assert events == f"{KEPT} +e e +0 -e 0 +{forward} {between} {between} {backward} {END}"


def test_the_middle_of_a_pipeline_and_what_stays_whole(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(
        text,
        pp=3,
        dp=2,
        model={"num_hidden_layers": 4},
        parallel={"schedule": "gpipe"},
        **zero(stage3_param_persistence_threshold=1000),
    )
    stages = layers_of_stages(run)
    assert [list(stage) for stage in stages] == [[0, 1], [2, 3], [4, 5]]
    middle = pool.run(6, events_of_a_step, run, tiny_corpus(run, cache))[2]
    assert middle == f"{KEPT} +1 1 +2 2 -2 -1", "both are held until the last backward"


@pytest.mark.parametrize(
    ("zero_changes", "end"),
    [
        (ONE_BY_ONE, "+n n -n +2 2 -2 +1"),
        ({"stage3_max_live_parameters": 20_000}, "+n n +2 -n 2 -2 +1"),  # the norm and a block fit
    ],
)
def test_nothing_is_fetched_ahead_if_configured_or_if_there_is_no_room(
    pool: RankPool, text: Path, cache: Path, zero_changes: dict[str, int], end: str
) -> None:
    """A block has 12,704 elements, the embedding 10,496, the head 9,792 and its norm 64."""
    run = small_run(text, dp=2, gradient_accumulation_steps=1, **zero(**zero_changes))
    events = pool.run(2, events_of_a_step, run, tiny_corpus(run, cache))[0]
    events = events.replace("+n -h", "-h +n")  # there is room for the head and its norm
    assert events.startswith(f"+e e -e +0 0 -0 +1 1 -1 +2 2 -2 +h h -h {end}")


@pytest.mark.parametrize("together", [12_288, 1 << 23])
def test_there_is_room_for_exactly_so_many(
    pool: RankPool, text: Path, cache: Path, together: int
) -> None:
    """There is room for the embedding and a block, or for a block and the head, but not for two
    blocks. So each block is gathered by itself, even if a larger message were better.
    """
    bound = {
        "stage3_max_live_parameters": 10_496 + 12_704,
        "stage3_prefetch_bucket_size": together,
    }
    run = small_run(text, dp=2, gradient_accumulation_steps=1, **zero(**bound))
    events = pool.run(2, events_of_a_step, run, tiny_corpus(run, cache))[0]
    assert events.startswith("+e e +0 -e 0 -0 +1 1 -1 +2 2 +h -2 h +n -h n +2 -n 2 -2 +1")


# --- memory ---------------------------------------------------------------------------------------


def layers_in_memory(rank: OneRank) -> tuple[int, int]:
    """Return (layers of which this rank has gathered memory, bytes of this memory)."""
    holds = getattr(rank.engine._gathers, "_holds")  # noqa: B009
    layers = {layer for hold in holds.values() for held in hold for layer in held}
    held = [bytes_of([layer._gathered]) for layer in layers]
    return sum(size > 0 for size in held), sum(held)


def most_layers_in_memory(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[int, int, int]:
    """Return most layers in memory: (in a pass that entered a layer, between passes, after all)."""
    during, between = [], []
    with one_rank(launch, run, corpus) as rank, pytest.MonkeyPatch.context() as patch:
        enter, forward, backward = LayerGathers._enter, rank.engine.forward, rank.engine.backward

        def watched_enter(gathers: LayerGathers, *args: Any) -> None:
            enter(gathers, *args)
            during.append(layers_in_memory(rank)[0])

        def watched_forward(*args: Any) -> Tensor:
            output = forward(*args)
            between.append(layers_in_memory(rank)[0])
            return output

        def watched_backward(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            between.append(layers_in_memory(rank)[0])

        patch.setattr(LayerGathers, "_enter", watched_enter)
        patch.setattr(rank.engine, "forward", watched_forward)
        patch.setattr(rank.engine, "backward", watched_backward)
        rank.train_step(0)
    return max(during), max(between), between[-1]


@pytest.mark.parametrize(("ahead", "most"), [({}, 2), (ONE_BY_ONE, 1)], ids=["ahead", "one by one"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_layers_are_gathered_at_a_time_however_many_micro_batches_are_in_flight(
    pool: RankPool, text: Path, cache: Path, schedule: str, ahead: dict[str, int], most: int
) -> None:
    run = small_run(
        text,
        pp=2,
        dp=2,
        model={"num_hidden_layers": 8},
        parallel={"schedule": schedule},
        gradient_accumulation_steps=4,
        **zero(**ahead),
    )
    for during, between, after in pool.run(4, most_layers_in_memory, run, tiny_corpus(run, cache)):
        assert during == most
        assert between <= most, "the first layer of the next pass"
        assert after == 0


class _Parameter:
    """A parameter in DeepSpeed's partitions: equal parts, the last one padded."""

    data: Tensor

    def __init__(self, shape: tuple[int, ...], ranks: int) -> None:
        self.ds_numel, self.ds_shape = math.prod(shape), torch.Size(shape)
        self.ds_process_group = dist.group.WORLD
        self.ds_tensor = torch.zeros(-(-self.ds_numel // ranks), dtype=torch.bfloat16)
        self.dtype, self.partition_numel = self.ds_tensor.dtype, self.ds_tensor.numel


def places_of_a_block(launch: LaunchEnvironment, ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (offset in bytes in the gathered layer, shape) of GPT-2's matrices and biases."""
    shapes = [(192, 64), (192,), (64, 64), (64,), (256, 64), (256,), (64, 256), (64,)]
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    parameters = [_Parameter(shape, ranks) for shape in shapes]
    layer = GatheredLayer(parameters, torch.device("cpu"))
    layer.start()
    layer.finish()
    dist.destroy_process_group()
    found = [parameter.data for parameter in parameters]
    assert [tuple(view.shape) for view in found] == shapes
    begin = found[0].untyped_storage().data_ptr()
    # This is rank 1, which has the second part of every parameter.
    assert layer._places[0].own.data_ptr() == begin + 2 * parameters[0].partition_numel()
    return [(view.data_ptr() - begin, tuple(view.shape)) for view in found]


@pytest.mark.parametrize("ranks", range(2, 17))
def test_gathered_parameters_are_aligned_at_any_number_of_ranks(pool: RankPool, ranks: int) -> None:
    """Packed one after another, parameters would be unaligned at 3, 5, 6, 7, 9, 10, ... ranks."""
    ((first, *others),) = pool.run(1, places_of_a_block, ranks)
    assert first == (0, (192, 64))
    assert [place % 128 for place, _ in others] == [0] * len(others)


# --- what autograd keeps --------------------------------------------------------------------------


def kept_by_autograd(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, compiled: bool, frees: bool
) -> tuple[int, int, float]:
    """Return (views of gathered memory that a forward keeps, bytes of it, gradient norm)."""
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage()._cdata)
        return tensor

    with one_rank(launch, run, corpus) as rank, pytest.MonkeyPatch.context() as patch:
        if not frees:
            patch.setattr(GatheredLayer, "_free_memory", lambda _: None)
        if compiled:
            for block in rank.engine.module.modules():
                if isinstance(block, Block):
                    block.forward = torch.compile(  # type: ignore[method-assign]
                        block.forward, backend="aot_eager", fullgraph=True, dynamic=False
                    )
        gathers: Any = rank.engine._gathers
        in_forward = {layer for held in gathers._holds[("forward", 0), None] for layer in held}
        storages = {layer._gathered.untyped_storage()._cdata for layer in in_forward}
        forward, held = rank.engine.forward, []

        def watched_forward(*args: Any) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = forward(*args)
            held.append(layers_in_memory(rank)[1])
            return output

        patch.setattr(rank.engine, "forward", watched_forward)
        norm = rank.train_step(0).grad_norm
        return len(kept & storages), max(held), norm


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt2", "llama"])
def test_views_that_autograd_keeps_hold_no_memory(
    pool: RankPool, text: Path, cache: Path, model: dict[str, Any]
) -> None:
    model = {**model, "num_hidden_layers": 3}
    run = small_run(text, dp=2, model=model, **zero(**ONE_BY_ONE))
    corpus = tiny_corpus(run, cache)
    eager, _ = pool.run(2, kept_by_autograd, run, corpus, False, True)
    compiled, _ = pool.run(2, kept_by_autograd, run, corpus, True, True)
    keeping, _ = pool.run(2, kept_by_autograd, run, corpus, False, False)
    assert eager[0] >= 3 and compiled[0] >= 3, "autograd keeps each block's weights"
    assert eager[1] == compiled[1] == 0
    assert keeping[1] > 0
    assert eager[2] == keeping[2]
    assert compiled[2] == pytest.approx(eager[2], rel=1e-5)


# --- values ---------------------------------------------------------------------------------------


def loss_after_evaluation_and_weights(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, disturbed: bool
) -> list[float]:
    """Return the losses of three steps. Between them, the weights are read and evaluated."""
    losses = []
    with one_rank(launch, run, corpus) as rank:
        for step in range(3):
            losses.append(rank.train_step(step).loss)
            if disturbed:
                rank.weights()
                rank.worker.evaluate(lambda m: rank.loader.micro_batch(0, m), 1, 64)
                rank.weights()
    return losses


@pytest.mark.parametrize(
    ("threshold", "offload", "dp"),
    [
        (0, OFFLOAD_ALL, 1),
        (0, {}, 2),
        (1000, {}, 1),
        (1000, OFFLOAD_ALL, 2),
        (10**6, OFFLOAD_ALL, 1),
        (10**6, {}, 2),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "offload" * bool(value),
)
def test_gathers_between_two_steps_change_nothing(
    pool: RankPool, text: Path, cache: Path, threshold: int, offload: dict[str, Any], dp: int
) -> None:
    run = small_run(text, dp=dp, **zero(stage3_param_persistence_threshold=threshold, **offload))
    corpus = tiny_corpus(run, cache)
    alone = pool.run(dp, loss_after_evaluation_and_weights, run, corpus, False)
    assert pool.run(dp, loss_after_evaluation_and_weights, run, corpus, True) == alone
    assert alone[0][2] < alone[0][0]


def test_a_tied_weight_is_there_for_the_head_after_the_embedding_was_freed(
    pool: RankPool, text: Path, cache: Path
) -> None:
    """The blocks stay gathered. So the second forward finds the head in memory, but not the tied
    weight, because the embedding has freed it.
    """

    def losses(**more: int) -> list[float]:
        tied = {"model": {"tie_word_embeddings": True}, "parallel": {"schedule": "gpipe"}}
        run = small_run(text, dp=2, **tied, **zero(stage3_param_persistence_threshold=5000, **more))
        corpus = tiny_corpus(run, cache)
        return pool.run(2, loss_after_evaluation_and_weights, run, corpus, False)[0]

    assert losses() == losses(**ONE_BY_ONE)


def loss_after_weights_were_written(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> float:
    """Write weights as a checkpoint does, after an evaluation has gathered the old ones."""
    with one_rank(launch, run, corpus) as rank:
        rank.train_step(0)
        rank.worker.evaluate(lambda m: rank.loader.micro_batch(0, m), 1, 64)
        for fragment in rank.engine.state_fragments():
            fragment.weights.mul_(0.5)
        rank.engine.load_state(1)
        return rank.train_step(1).loss


def test_what_stays_whole_is_gathered_again_after_weights_were_written(
    pool: RankPool, text: Path, cache: Path
) -> None:
    def loss(threshold: int) -> float:
        run = small_run(text, dp=2, **zero(stage3_param_persistence_threshold=threshold))
        return pool.run(2, loss_after_weights_were_written, run, tiny_corpus(run, cache))[0]

    assert loss(10**6) == pytest.approx(loss(0), rel=1e-6)
