"""Plans: the ZeRO paper's table, every file of ds_configs, and plans that the configuration
refuses.
"""

import json
from bisect import bisect_left
from pathlib import Path

import pytest

from megaspeed.cli import main
from megaspeed.planning.plan import plan
from megaspeed.planning.report import summary
from tests.planning.tiny_runs import FOLDER, MIXTURES, WORLD_SIZES, a100s, from_file, tiny

GB = 10**9


def test_the_zero_papers_table_1() -> None:
    """Rajbhandari et al. 2020, Table 1, DP 64, 7.5B: 120, 31.4, 16.6 and 1.9 GB of model states.

    A parameter has 16, 4 + 12/64, 2 + 14/64 and 16/64 bytes (figure 1). The model has 7.46B.
    """
    planned = plan(from_file(FOLDER / "zero_7.5b.json", world_size=64), None)
    psi = planned.parameters / GB
    paper = (16 * psi, (4 + 12 / 64) * psi, (2 + 14 / 64) * psi, 16 / 64 * psi)
    scaled = [f"{7.5 * gigabytes / psi:.1f}" for gigabytes in paper]
    assert scaled == ["120.0", "31.4", "16.6", "1.9"]
    for zero, gigabytes in zip(planned.zero_stages, paper, strict=True):
        assert zero.prediction is not None
        assert zero.prediction.heaviest.state_bytes / GB == pytest.approx(gigabytes, rel=0.005)


def test_a_file_is_listed_with_its_world_size() -> None:
    files = {file.stem for file in FOLDER.glob("*.json")} - {"megaspeed.schema"}
    assert files == set(WORLD_SIZES)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_every_file_plans_and_checks_at_its_world_size(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, world_size = FOLDER / f"{name}.json", WORLD_SIZES[name]
    assert main(["check", "--config", str(file), "--world-size", str(world_size)]) == 0
    assert "no problem found" in capsys.readouterr().out
    planned = plan(from_file(file, world_size=world_size), a100s())
    assert planned.run.grid.world_size == world_size
    assert planned.verdict in ("fits", "tight")


@pytest.mark.parametrize(
    ("name", "degrees", "zero_stage", "parameters"),
    [
        ("gpt3_175b", (8, 64, 8), 1, 174.6e9),
        ("mt_nlg_530b", (35, 16, 8), 1, 529.6e9),
        ("llama2_70b", (1, 256, 8), 3, 68.98e9),
        ("llama2_70b_64", (1, 64, 1), 3, 68.98e9),
        ("llama3_70b", (4, 4, 4), 1, 70.55e9),
        ("zero_7.5b", (1, 64, 1), 2, 7.464e9),
        ("gpt2_1.5b", (1, 8, 1), 1, 1.5576e9),
    ],
)
def test_the_large_files_are_what_they_are_called(
    name: str, degrees: tuple[int, int, int], zero_stage: int, parameters: float
) -> None:
    planned = plan(from_file(FOLDER / f"{name}.json", world_size=WORLD_SIZES[name]), None)
    run = planned.run
    assert (run.grid.pp, run.grid.dp, run.grid.tp) == degrees
    assert run.zero_stage == zero_stage
    assert planned.parameters == pytest.approx(parameters, rel=1e-3)
    assert planned.ranks.along("tp").between_nodes == 0


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mixtral-8x7b", "46.7B parameters, 12.88B of them active"),
        ("qwen3-30b-a3b", "30.53B parameters, 3.353B of them active"),
    ],
)
def test_a_mixture_of_experts_states_its_active_parameters(name: str, counts: str) -> None:
    """Its products take less than half of the time of a model in which a token uses all experts."""
    long = {"bf16": {"enabled": True}, "data": {"sequence_length": 4096}}
    model = MIXTURES[name]
    every = {**model, "num_experts_per_tok": model["num_experts"]}
    mixture, dense = (
        plan(tiny(world_size=8, model=shape, **long), a100s()) for shape in (model, every)
    )
    assert any(counts in line for line in summary(mixture))
    assert dense.active_parameters == dense.parameters == mixture.parameters
    assert mixture.prediction.heaviest.state_bytes == dense.prediction.heaviest.state_bytes
    assert mixture.forecast is not None and dense.forecast is not None
    assert any("experts" in warning for warning in mixture.forecast.warnings)
    assert mixture.forecast.step.products < dense.forecast.step.products / 2


def test_pipeline_stages_cover_the_layers_and_the_parameters() -> None:
    planned = plan(from_file(FOLDER / "mt_nlg_530b.json", world_size=4480), None)
    assert [stage.pipeline_stage for stage in planned.stages] == list(range(35))
    layers = [layer for stage in planned.stages for layer in stage.layers]
    assert layers == list(range(107))
    # 3 blocks have 12 D^2 + 13 D each. All but 9 D of this is split over 8: the biases of two
    # row-parallel layers and two norms of two vectors are complete on each rank.
    hidden = 20480
    block = 12 * hidden**2 + 13 * hidden
    whole = 6 * hidden
    assert planned.stages[1].parameters == 3 * block
    assert planned.stages[1].parameters_per_rank == 3 * ((block - whole) // 8 + whole)


def test_a_plan_with_chunks_states_the_shape_of_the_step() -> None:
    """2 stages x 2 chunks, 8 micro-batches in 2 groups. Each chunk sends 8 activations and 8
    gradients, but the first virtual stage no gradients, and the last one no activations.
    """
    keys = ("parallel.pipeline=2", "parallel.virtual_stages=2", "parallel.micro_batch_groups=2")
    training = tiny(*keys, "train_micro_batch_size_per_gpu=1", world_size=4)
    planned = plan(training, a100s())
    figures = planned.as_json()
    assert (figures["virtual_stages"], figures["micro_batch_groups"]) == (2, 2)
    assert [stage["messages"] for stage in figures["pipeline_stages"]] == [24, 24]
    # Warm-up: 2 more for each stage after it, and the first chunk of a group of 4; then one more.
    assert [stage["in_flight"] for stage in figures["pipeline_stages"]] == [7, 5]
    zero = figures["zero_stages"]
    assert [each["reductions"] for each in zero] == [1, 1, 2, 2]
    assert [each["gathers_of_chunks"] for each in zero[:3]] == [0, 0, 0]
    # At most one for each visit.
    assert 2 < zero[3]["gathers_of_chunks"] <= 8
    assert figures["bubble_fraction"] == 1 / (2 * 8 + 1)
    lines = list(summary(planned))
    assert any("1f1b, 2 chunks a stage, 2 groups of micro-batches, ideal" in line for line in lines)


def test_a_plan_states_how_many_more_micro_batches_are_in_flight() -> None:
    keys = ("parallel.pipeline=4", "train_micro_batch_size_per_gpu=1")
    for extra, text in ((1, "1 more micro-batch"), (3, "3 more micro-batches")):
        training = tiny(*keys, f"parallel.extra_in_flight={extra}", world_size=4)
        lines = "\n".join(summary(plan(training, None)))
        assert f"pipeline: 1f1b, up to {text} in flight, ideal bubble" in lines


def test_a_zero_stage_that_the_configuration_refuses_states_why() -> None:
    compressed = (
        "parallel.gradient_compression=int8",
        "parallel.gradient_reduction=per_micro_batch",
    )
    planned = plan(from_file(FOLDER / "zero1.json", *compressed, world_size=4), None)
    reasons = {zero.zero_stage: " ".join(zero.refusals) for zero in planned.zero_stages}
    assert reasons[0] == reasons[1] == ""
    assert "with zero_optimization.stage 2 and parallel.gradient_reduction" in reasons[2]
    assert planned.zero_stages[1].prediction is not None
    assert planned.zero_stages[2].prediction is None
    figures = planned.as_json()["zero_stages"]
    assert figures[2]["refused"] and figures[2]["verdict"] is None


def test_without_a_device_nothing_is_stated_about_fitting() -> None:
    planned = plan(tiny(world_size=4), None)
    assert planned.verdict is None and planned.change is None and planned.forecast is None
    figures = planned.as_json()
    assert figures["verdict"] is None
    assert all(zero["verdict"] is None and zero["time"] is None for zero in figures["zero_stages"])


def test_one_byte_decides_whether_a_run_fits_or_fits_tightly() -> None:
    training = tiny(world_size=4)
    peak = plan(training, a100s()).prediction.fullest.peak_bytes

    def fits(memory_bytes: int) -> bool:
        return plan(training, a100s(memory_bytes=memory_bytes)).verdict == "fits"

    sizes = range(peak, a100s().device.memory_bytes)
    memory = sizes[bisect_left(sizes, True, key=fits)]
    for memory_bytes, word in ((memory, "fits"), (memory - 1, "tight")):
        planned = plan(training, a100s(memory_bytes=memory_bytes))
        assert planned.verdict == word
        assert (planned.change is None) is (word == "fits")
    assert plan(training, a100s(memory_bytes=peak)).verdict == "does not fit"


def test_an_fp16_run_is_planned_without_a_gpu() -> None:
    assert plan(tiny("fp16.enabled=true", world_size=2), None).run.precision == "fp16"


def test_a_plan_names_what_dropout_costs() -> None:
    dropout = "model.attention_dropout=0.1"
    lines = [list(summary(plan(tiny(*each), None))) for each in ((dropout,), ())]
    named = [line for line in lines[0] if "without its fused kernel" in line]
    assert len(named) == 1 and "model.attention_dropout=0" in named[0]
    assert lines[1] == [line for line in lines[0] if line not in named]


def test_a_plan_takes_the_largest_layout_and_names_the_spare_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    values = {"extends": str(FOLDER / "zero3.json"), "parallel": {"spare_ranks": True}}
    file.write_text(json.dumps(values))
    command = ["--config", str(file), "--world-size", "7"]
    assert main(["check", *command]) == 0 and main(["plan", *command]) == 0
    assert "spare: 3 of 7 ranks have no work" in capsys.readouterr().out
