"""The files of ds_configs/ load unchanged, and editors can check them."""

import subprocess
import sys
from pathlib import Path

import pytest

from megaspeed.config.loading import read_config
from megaspeed.config.model import ModelConfig
from megaspeed.planning.costs.reserved_memory import reserved_memory, verdict
from megaspeed.planning.prediction import predict
from megaspeed.topology.devices import DEVICES
from tests.config.small import load

FOLDER = Path(__file__).parents[2] / "ds_configs"
FILES = sorted(file for file in FOLDER.glob("*.json") if not file.name.endswith(".schema.json"))


def test_the_files_exist() -> None:
    small = {"base", "zero0", "zero1", "zero2", "zero3", "zero3_offload", "3d"}
    large = {"gpt2_1.5b", "zero_7.5b", "llama2_70b", "llama2_70b_64", "llama3_70b"}
    large |= {"gpt3_175b", "mt_nlg_530b", "llama3_8b_long"}
    assert small | large <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_every_file_loads_for_1_2_4_and_8_data_ranks(file: Path, processes: int) -> None:
    data_only = ("parallel.pipeline=1", "parallel.context=1", "parallel.tensor=1")
    run = load(file, *data_only, world_size=processes)
    assert run.grid.dp == processes
    assert run.batch.train_batch_size == load(file, *data_only).batch.train_batch_size


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_for_gpus_state_bf16(file: Path) -> None:
    config = read_config(file)
    assert config.bf16.enabled == (config.model.hidden_size > 512)


def test_3d_is_two_by_two_by_two() -> None:
    run = load(FOLDER / "3d.json", world_size=8)
    assert (run.grid.pp, run.grid.dp, run.grid.tp, run.zero_stage) == (2, 2, 2, 3)
    assert run.batch.gradient_accumulation_steps == 4
    assert run.config.zero_optimization.stage3_param_persistence_threshold == 0


@pytest.mark.parametrize(
    ("name", "world_size", "degrees", "micro_batches"),
    [
        ("zero_7.5b", 64, (1, 64, 1), 1),
        ("llama2_70b_64", 64, (1, 64, 1), 4),
        ("llama2_70b", 2048, (1, 256, 8), 1),
        ("llama3_70b", 64, (4, 4, 4), 128),
        ("gpt3_175b", 4096, (8, 64, 8), 24),
        ("mt_nlg_530b", 4480, (35, 16, 8), 120),
    ],
)
def test_the_large_files_have_their_published_layouts(
    name: str, world_size: int, degrees: tuple[int, int, int], micro_batches: int
) -> None:
    run = load(FOLDER / f"{name}.json", world_size=world_size)
    assert (run.grid.pp, run.grid.dp, run.grid.tp) == degrees
    assert run.batch.gradient_accumulation_steps == micro_batches


@pytest.mark.parametrize(
    ("name", "tokens_a_step", "tokens"),
    [
        ("gpt3_175b", 1536 * 2048, 300e9),
        ("mt_nlg_530b", 1920 * 2048, 270e9),
        ("llama2_70b", 4 * 2**20, 2e12),
        ("llama3_70b", 4 * 2**20, 15e12),
    ],
)
def test_the_large_files_train_on_the_published_number_of_tokens(
    name: str, tokens_a_step: int, tokens: float
) -> None:
    run = load(FOLDER / f"{name}.json", "parallel.pipeline=1", "parallel.tensor=1")
    assert run.tokens_per_step == tokens_a_step
    steps = run.steps
    assert (steps - 1) * tokens_a_step < tokens <= steps * tokens_a_step


@pytest.mark.parametrize("world_size", [1, 8])
def test_gpt2_1_5b_has_the_largest_micro_batch_that_fits_one_80_gb_gpu(world_size: int) -> None:
    file, device = FOLDER / "gpt2_1.5b.json", DEVICES["h100-80gb"]
    run = load(file, world_size=world_size)
    assert run.config.parallel.activation_checkpointing == "none"
    size = run.batch.micro_batch_size
    twice = load(file, f"train_micro_batch_size_per_gpu={2 * size}", world_size=world_size)
    verdicts = [
        verdict(peak, reserved_memory(each, device, 8, peak), device)
        for each in (run, twice)
        for peak in [predict(each).fullest.peak_bytes]
    ]
    assert verdicts[0] != "does not fit" and verdicts[1] == "does not fit"
    # Even if the prediction is 10 % too low, the run fits into the device's memory.
    assert 1.1 * predict(run).fullest.peak_bytes < device.memory_bytes


def test_the_readme_names_every_file() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [file.name for file in FILES if f"`{file.name}`" not in text] == [
        "zero1.json",
        "zero2.json",
    ]
    assert "`zero0.json` ... `zero3.json`" in text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_files_differ_in_nothing_but_zero(stage: int) -> None:
    base = read_config(FOLDER / "base.json")
    config = read_config(FOLDER / f"zero{stage}.json")
    assert config.zero_optimization.stage == stage
    assert config.model_copy(update={"zero_optimization": base.zero_optimization}) == base


def test_a_layout_can_be_changed_with_set_alone() -> None:
    run = load(FOLDER / "zero1.json", "parallel.tensor=2", "parallel.pipeline=4", world_size=8)
    assert (run.grid.pp, run.grid.dp, run.grid.tp) == (4, 1, 2)


def test_a_model_can_be_changed_with_set_alone() -> None:
    model = read_config(FOLDER / "zero1.json", ["model.preset=llama-tiny"]).model
    assert model == ModelConfig.model_validate({"preset": "llama-tiny"})


def test_the_configuration_loads_no_torch() -> None:
    code = "import sys, megaspeed.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
