"""Resolving a config replaces "auto" and computes all derived numbers."""

import cProfile
import time
from pathlib import Path

import pytest

from megaspeed.config.deepspeed_keys import WarmupLR
from megaspeed.config.document import read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document, parse_config, read_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data_axis.buckets import reduction_of_matrices
from megaspeed.planning.costs.workload import workload_of
from tests.config.small import load, patch, small, write
from tests.support.machine import limit


def resolve(*overrides: str, world_size: int = 1, device_type: str = "cpu") -> Run:
    config = parse_config(small(**patch(*overrides)))
    return resolve_run(config, World(world_size, "WORLD_SIZE", device_type), name="small")


WSD = "wsd scheduler.params.decay_num_steps=20"


@pytest.mark.parametrize(
    ("tokens", "batch", "world_size", "steps"),
    [
        ("20480", 16, 1, 40),
        ("20481", 16, 1, 41),
        ("20.48K", 32, 4, 20),
        ("1", 16, 1, 1),
        ("20K", None, 2, 157),  # 2 samples on each of 2 ranks are 128 tokens
    ],
)
def test_a_run_ends_with_the_first_step_that_has_its_tokens(
    tokens: str, batch: int | None, world_size: int, steps: int
) -> None:
    batch_text = f"train_batch_size={'null' if batch is None else batch}"
    run = resolve(f"training.tokens={tokens}", batch_text, world_size=world_size)
    assert run.steps == run.config.training.steps == steps


def test_the_schedule_of_a_run_with_tokens_or_wsd_ends_with_the_run() -> None:
    """A number here would stay if the run resumes with another end."""
    tokens = resolve("training.tokens=20K", "scheduler.type=cosine")
    wsd = resolve(*f"scheduler.type={WSD}".split())
    stated = resolve(*f"scheduler.type={WSD} scheduler.params.total_num_steps=90".split())
    totals = [run.as_json()["scheduler"]["params"].get("total_num_steps") for run in (tokens, wsd)]
    assert totals == [None, None]
    assert stated.as_json()["scheduler"]["params"]["total_num_steps"] == 90


def test_auto_becomes_numbers() -> None:
    run = resolve("parallel.pipeline=2", "parallel.tensor=2", world_size=8)
    assert (run.grid.pp, run.grid.dp, run.grid.tp) == (2, 2, 2)
    assert run.grid.world_size == 8
    assert run.config.parallel.data == 2
    assert run.config.gradient_accumulation_steps == run.batch.gradient_accumulation_steps == 4
    assert run.run_dir == Path("runs/small")
    assert run.tokens_per_step == 16 * 32


@pytest.mark.parametrize(
    ("stage", "reduction"),
    [(0, "per_step"), (1, "per_step"), (2, "per_micro_batch"), (3, "per_micro_batch")],
)
def test_gradients_are_reduced_so_that_the_stage_keeps_its_promise(
    stage: int, reduction: str
) -> None:
    run = resolve(f"zero_optimization.stage={stage}")
    assert run.gradient_reduction == run.config.parallel.gradient_reduction == reduction
    stated = resolve(f"zero_optimization.stage={stage}", "parallel.gradient_reduction=per_step")
    assert stated.gradient_reduction == "per_step"


@pytest.mark.parametrize(
    ("settings", "device_type", "splits"),
    [
        ((), "cuda", True),
        ((), "cpu", False),
        (("parallel.sequence_parallel=true",), "cpu", True),
        (("parallel.sequence_parallel=false",), "cuda", False),
        (("data.sequence_length=31",), "cuda", False),
        (("parallel.tensor=1",), "cuda", False),
    ],
)
def test_the_sequence_is_split_on_cuda_if_it_can_be(
    settings: tuple[str, ...], device_type: str, splits: bool
) -> None:
    run = resolve("parallel.tensor=2", *settings, world_size=2, device_type=device_type)
    assert run.sequence_parallel is run.config.parallel.sequence_parallel is splits


MIXTRAL = (
    "model.architecture=mixtral",
    "model.intermediate_size=384",
    "model.num_experts=8",
    "model.num_experts_per_tok=2",
)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("expert", [1, 2])
def test_the_sequence_is_split_for_experts_on_any_device(device_type: str, expert: int) -> None:
    settings = (*MIXTRAL, "parallel.tensor=2", f"parallel.expert={expert}")
    run = resolve(*settings, world_size=2, device_type=device_type)
    assert run.sequence_parallel is run.config.parallel.sequence_parallel is True
    alone = resolve(*MIXTRAL, f"parallel.expert={expert}", world_size=expert)
    assert alone.sequence_parallel is alone.config.parallel.sequence_parallel is False


@pytest.mark.parametrize(
    ("experts", "active", "ep", "method"),
    [
        # rows in memory: ep x min(k, E / ep) of all_gather, about k of all_to_all
        (8, 2, 2, "all_gather"),  # 4 <= 2 x 2, as many rows are sent
        (8, 2, 4, "all_to_all"),  # more is sent
        (8, 3, 2, "all_gather"),
        (8, 4, 4, "all_gather"),  # 8 <= 2 x 4
        (16, 4, 4, "all_to_all"),  # 16 > 2 x 4
        (8, 8, 8, "all_gather"),
        (8, 1, 2, "all_to_all"),
    ],
)
def test_tokens_are_gathered_if_this_sends_no_more_and_takes_at_most_twice_the_memory(
    experts: int, active: int, ep: int, method: str
) -> None:
    model = [f"model.num_experts={experts}", f"model.num_experts_per_tok={active}"]
    model += ["model.norm_topk_prob=false"] * (active == 1)
    settings = (*MIXTRAL, *model, f"parallel.expert={ep}")
    run = resolve(*settings, world_size=8)
    assert run.expert_exchange == run.config.parallel.expert_exchange == method
    for stated in ("all_to_all", "all_gather"):
        run = resolve(*settings, f"parallel.expert_exchange={stated}", world_size=8)
        assert run.expert_exchange == stated


def test_without_an_expert_axis_nothing_is_exchanged() -> None:
    for settings in ((), MIXTRAL):
        run = resolve(*settings, world_size=2)
        assert run.expert_exchange is None
        assert run.config.parallel.expert_exchange == "auto"
        assert not run.grid.has_expert_axes or settings


@pytest.mark.parametrize("settings", ["", "parallel.tensor=2 zero_optimization.stage=3"])
def test_a_resolved_config_with_experts_resolves_to_itself(settings: str) -> None:
    run = resolve(*MIXTRAL, "parallel.expert=4", *settings.split(), world_size=4)
    again = resolve_run(parse_config(run.as_json()), World(4, "x"), name="small")
    assert again == run


@pytest.mark.parametrize(
    ("width", "tp", "bucket"),
    [(96, 1, 8 << 20), (768, 1, 8 << 20), (1536, 1, 12 * 1536**2), (1536, 4, 8 << 20)],
)
def test_a_bucket_has_the_size_of_a_block_but_is_never_small(
    width: int, tp: int, bucket: int
) -> None:
    """With a bucket for each block of width 64, a step of 12 blocks took twice as long."""
    run = resolve(f"model.hidden_size={width}", f"parallel.tensor={tp}", world_size=tp)
    assert run.config.zero_optimization.reduce_bucket_size == bucket
    stated = resolve(f"model.hidden_size={width}", "zero_optimization.reduce_bucket_size=3000")
    assert stated.config.zero_optimization.reduce_bucket_size == 3000


INT8 = 'parallel.gradient_compression={"type": "int8"}'


@pytest.mark.parametrize(
    ("settings", "device_type", "overlaps"),
    [
        ((), "cuda", True),
        ((), "cpu", False),
        (("zero_optimization.overlap_comm=true",), "cpu", True),
        (("zero_optimization.overlap_comm=false",), "cuda", False),
        (("parallel.gradient_compression=bf16",), "cuda", True),
        ((INT8,), "cuda", False),
        ((INT8.replace("int8", "powersgd"),), "cuda", False),
    ],
)
def test_reductions_overlap_with_the_backward_on_cuda(
    settings: tuple[str, ...], device_type: str, overlaps: bool
) -> None:
    """With ZeRO-3 on 8 H100, a 7B model would wait 1.7 of 28.8 s for reductions."""
    run = resolve("zero_optimization.stage=3", *settings, world_size=2, device_type=device_type)
    assert run.config.zero_optimization.overlap_comm is overlaps
    assert reduction_of_matrices(run, device_type, run.grid.copies).overlaps is overlaps
    assert workload_of(run).reduces_in_backward is overlaps


def test_precision_is_one_word() -> None:
    assert resolve().precision == "fp32"
    assert resolve("bf16.enabled=true").precision == "bf16"
    assert resolve("fp16.enabled=true", device_type="cuda").precision == "fp16"


def test_the_scheduler_takes_its_length_and_height_from_other_sections() -> None:
    scheduler = ("scheduler.type=WarmupDecayLR", "scheduler.params.warmup_num_steps=5")
    definite = resolve(*scheduler).config.scheduler
    assert definite is not None
    params = definite.params.model_dump()
    assert (params["total_num_steps"], params["warmup_max_lr"]) == (100, 1e-3)


@pytest.mark.parametrize(
    ("scaling", "base", "factor"), [("linear", 4, 4.0), ("sqrt", 4, 2.0), ("linear", 32, 0.5)]
)
def test_the_learning_rate_follows_the_batch(scaling: str, base: int, factor: float) -> None:
    run = resolve(
        f"training.lr_scaling={scaling}",
        f"training.base_batch_size={base}",
        "scheduler.type=WarmupLR",
        "scheduler.params.warmup_num_steps=5",
        "scheduler.params.warmup_min_lr=1e-5",
        "scheduler.params.warmup_max_lr=3e-3",
    )
    scheduler, training = run.config.scheduler, run.config.training
    assert run.config.optimizer.params.lr == factor * 1e-3
    assert isinstance(scheduler, WarmupLR)
    assert scheduler.params.warmup_max_lr == factor * 3e-3
    assert scheduler.params.warmup_min_lr == factor * 1e-5
    assert (training.lr_scaling, training.base_batch_size) == (scaling, 16)


@pytest.mark.parametrize(
    ("stated", "lr", "rates"),
    [
        ({}, 1e-3, (1e-3, 1e-3)),
        ({"lr": 2e-2}, 2e-2, (2e-2, 2e-2)),
        ({"lr": 2e-2, "adam_lr": 3e-3}, 2e-2, (2e-2, 3e-3)),
        ({"muon_lr": 2e-2, "adam_lr": 3e-3}, 2e-2, (2e-2, 3e-3)),
        ({"lr": 1e-2, "muon_lr": 2e-2, "adam_lr": 3e-3}, 1e-2, (2e-2, 3e-3)),
    ],
)
@pytest.mark.parametrize("factor", [1, 4])
def test_both_rates_of_muon_are_stated_and_follow_the_batch(
    stated: dict[str, float], lr: float, rates: tuple[float, float], factor: int
) -> None:
    texts = [f"optimizer.params.{name}={rate}" for name, rate in stated.items()]
    scaled = ["training.lr_scaling=linear", "training.base_batch_size=4"] if factor > 1 else []
    params = resolve("optimizer.type=Muon", *texts, *scaled).config.optimizer.params
    assert params.lr == factor * lr
    assert params.rates == tuple(factor * rate for rate in rates)
    again = parse_config(resolve("optimizer.type=Muon", *texts, *scaled).as_json())
    assert resolve_run(again, World(1, "x"), name="small").config.optimizer.params == params


def test_a_resolved_rate_is_not_scaled_again_but_follows_another_batch() -> None:
    scaled = resolve("training.lr_scaling=linear", "training.base_batch_size=4").as_json()
    for batch, rate in ((16, 4e-3), (32, 8e-3)):
        config = parse_config(
            {**scaled, "train_batch_size": batch, "gradient_accumulation_steps": None}
        )
        again = resolve_run(config, World(1, "x"), name="small")
        assert again.config.optimizer.params.lr == rate


@pytest.mark.parametrize("length", ["training.steps=100", "training.tokens=20K"])
@pytest.mark.parametrize("kind", ["WarmupCosineLR", "cosine", WSD])
def test_a_resolved_config_resolves_to_itself(kind: str, length: str) -> None:
    scheduler = (f"scheduler.type={kind}", "scheduler.params.warmup_num_steps=5")
    run = resolve(*" ".join(scheduler).split(), length, world_size=4)
    again = resolve_run(parse_config(run.as_json()), World(4, "x"), name="small")
    assert again == run


def test_deepspeed_gets_only_its_own_keys() -> None:
    keys = resolve("zero_optimization.stage=1").config.deepspeed_json()
    assert {"model", "parallel", "data", "training"}.isdisjoint(keys)
    assert keys["zero_optimization"]["stage"] == 1
    assert keys["train_batch_size"] == 16 and keys["gradient_accumulation_steps"] == 8


def test_problems_of_keys_rules_and_world_are_reported_together(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", small(zzz=1, parallel={"tensor": 5}))
    document = read_document(file, ["training.steps=0"])
    found = check_document(document, World(8, "SLURM_NTASKS")).problems
    assert [message.split(" ")[0] for message in found] == [
        "training.steps:",
        "zzz",
        "model.num_attention_heads",
        "model.intermediate_size",
        "world",
    ]
    with pytest.raises(ConfigError) as caught:
        load(file, "training.steps=0", world_size=8)
    assert len(caught.value.problems) == len(found)
    assert str(caught.value).startswith(f"5 problems in {file}:\n  1. training.steps")


def test_a_good_file_has_no_problems(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", small())
    assert check_document(read_document(file)).problems == ()
    assert check_document(read_document(file), World(8, "WORLD_SIZE")).problems == ()
    assert load(file, world_size=8).name == "a"
    assert read_config(file) == parse_config(small())


def test_resolving_reports_the_problems_of_the_config_as_well() -> None:
    config = parse_config(small())
    data = config.data.model_copy(update={"sequence_length": 99})
    broken = config.model_copy(update={"data": data})
    with pytest.raises(ConfigError) as caught:
        resolve_run(broken, World(7, "WORLD_SIZE"), name="x")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(("world_size", "pp", "tp"), [(4096, 8, 8), (4480, 35, 8)])
def test_thousands_of_ranks_resolve_with_the_calls_of_one_replica(
    world_size: int, pp: int, tp: int
) -> None:
    def resolved(size: int) -> tuple[Run, int]:
        """Return the run and the number of calls that resolving it takes."""
        config = parse_config(
            small(
                model={"num_hidden_layers": 96, "num_attention_heads": 8},
                parallel={"pipeline": pp, "tensor": tp},
                train_batch_size=size * 2,
            )
        )
        profile = cProfile.Profile()
        run = profile.runcall(resolve_run, config, World(size, "SLURM_NTASKS"), name="big")
        return run, sum(function.callcount for function in profile.getstats())

    _, calls_of_one = resolved(pp * tp)
    start = time.process_time()
    run, calls = resolved(world_size)
    assert time.process_time() - start < limit(0.5)
    assert run.grid.dp == world_size // (pp * tp)
    assert calls < 1.1 * calls_of_one


def test_numbers_may_be_written_in_another_way() -> None:
    config = parse_config(small(zero_optimization={"reduce_bucket_size": 5e8}, gradient_clipping=1))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.gradient_clipping == 1.0


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(small())
    with pytest.raises(ValueError, match="frozen"):
        config.model.hidden_size = 5


@pytest.mark.parametrize(
    ("settings", "device_type", "method"),
    [
        ("bf16.enabled=true", "cuda", "all_gather"),
        ("", "cuda", "ulysses"),  # fp32
        ("", "cpu", "all_gather"),
        ("model.attention_dropout=0.1", "cpu", "ulysses"),
        ("bf16.enabled=true model.attention_dropout=0.1", "cuda", "ulysses"),
        ("bf16.enabled=true model.sliding_window=8", "cuda", "all_gather"),
        # Both methods need a mask, and that of all_gather is smaller.
        ("model.sliding_window=8", "cpu", "all_gather"),
        ("data.reset_at_documents=true", "cuda", "all_gather"),
        # The heads cannot be divided.
        ("parallel.context=8", "cuda", "all_gather"),
    ],
)
def test_keys_are_not_gathered_if_only_this_would_need_a_mask(
    settings: str, device_type: str, method: str
) -> None:
    """One key/value head is copied for each rank of ulysses, so all_gather sends less."""
    shared = ("model.architecture=llama", "model.num_key_value_heads=1", "parallel.context=4")
    values = (*shared, "model.intermediate_size=384", *settings.split())
    assert resolve(*values, world_size=8, device_type=device_type).context_method == method
