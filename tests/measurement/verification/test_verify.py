"""``megaspeed verify``, from the command line to the exit code, on two real ranks."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaspeed.measurement.local_ranks import children_on
from tests.support.forked import run_forked
from tests.support.tiny import GPT2

pytestmark = pytest.mark.ranks

TEXT = Path(__file__).parents[3] / "LICENSE"
MEGASPEED = ("-m", "megaspeed.cli")
WRONG_BUILD = Path(__file__).with_name("verify_without_tied_sum.py")
WRONG_RATE = Path(__file__).with_name("verify_with_a_wrong_rate.py")
STEPS = 3


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.json"
    values = {
        "model": GPT2,
        "parallel": {"pipeline": 2},
        "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
        "training": {"steps": 10},
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
    }
    file.write_text(json.dumps(values))
    return file


def run_to_the_end(program: list[str], config: Path) -> tuple[int, str, dict[str, Any]]:
    """Run the program. Return (exit code, its output, the JSON that it writes)."""
    figures = config.with_name("figures.json")
    done = run_on_two_ranks([*program, "--json", str(figures)], config)
    assert figures.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(figures.read_text())


def run_on_two_ranks(program: list[str], config: Path) -> subprocess.CompletedProcess[str]:
    command = [
        *program,
        *("--config", str(config)),
        *("--world-size", "2"),
        *("--steps", str(STEPS)),
    ]
    return run_forked(command, config.parent, COLUMNS="200")


@pytest.mark.timeout(300)
def test_a_layout_that_trains_the_same_model_exits_with_0(config: Path) -> None:
    code, printed, figures = run_to_the_end([*MEGASPEED, "verify"], config)
    assert code == 0, printed
    assert "pp 2 x dp 1 x tp 1, ZeRO-1, fp32, against one process" in printed
    assert "EQUAL: initial weights bitwise equal; largest difference: " in printed
    assert figures["equal"] is True and figures["weights_bitwise_equal"] is True
    assert [loss["name"] for loss in figures["losses"]] == [
        f"loss of step {step}" for step in range(1, STEPS + 1)
    ]
    assert len(figures["grad_norms"]) == STEPS
    gradients = {gradient["name"]: gradient for gradient in figures["gradients"]}
    assert {"embedding.tokens.weight", "blocks.2.mlp.down.weight"} <= gradients.keys()
    assert "head.output.weight" not in gradients, "it is tied: one logical parameter"
    for numbers in (*figures["losses"], *figures["grad_norms"], *gradients.values()):
        assert 0.0 <= numbers["relative"] <= numbers["allowed"] <= 1e-5
        assert numbers["reference"] > 0.0


@pytest.mark.timeout(300)
def test_a_layout_that_trains_another_model_exits_with_1(config: Path) -> None:
    code, printed, figures = run_to_the_end([str(WRONG_BUILD)], config)
    assert code == 1, printed
    assert "DIFFERENT: " in printed and " !" in printed
    assert figures["equal"] is False
    wrong = [
        gradient["name"]
        for gradient in figures["gradients"]
        if gradient["relative"] > gradient["allowed"]
    ]
    assert wrong == ["embedding.tokens.weight"]
    assert figures["losses"][0]["relative"] <= 1e-6, "the first forward pass is correct"
    assert figures["losses"][-1]["relative"] > 1e-6


@pytest.mark.timeout(300)
def test_a_mistake_after_step_1_is_not_taken_for_rounding(config: Path) -> None:
    code, printed, figures = run_to_the_end([str(WRONG_RATE)], config)
    assert code == 1, printed
    assert "DIFFERENT: " in printed
    for kind in ("losses", "grad_norms"):
        first, second, third = figures[kind]
        assert first["relative"] <= first["allowed"]
        assert second["relative"] <= second["allowed"], "the second step has the wrong rate"
        assert third["relative"] > 10 * third["allowed"]


def test_on_cuda_every_rank_needs_a_gpu(config: Path) -> None:
    done = run_on_two_ranks([*MEGASPEED, "verify", "--device", "cuda"], config)
    assert done.returncode == 2 and done.stdout == ""
    assert "--world-size 2 is more than the 0 ranks that this machine with 0 GPUs" in done.stderr
    assert "--device cpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_fp16_is_verified_on_cuda_alone_and_with_a_constant_loss_scale(config: Path) -> None:
    config.write_text(json.dumps({**json.loads(config.read_text()), "fp16": {"enabled": True}}))
    on_cuda = run_on_two_ranks([*MEGASPEED, "verify", "--device", "cuda"], config)
    assert on_cuda.returncode == 2
    assert "2 problems in verify --device cuda" in on_cuda.stderr
    assert "--set fp16.loss_scale=1024" in on_cuda.stderr
    on_cpu = run_on_two_ranks([*MEGASPEED, "verify"], config)
    assert on_cpu.returncode == 2
    assert "a CPU, which cannot train in fp16" in on_cpu.stderr


def test_the_ranks_see_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for device in ("cpu", "cuda"):
        with children_on(device):
            seen.append((os.environ["CUDA_VISIBLE_DEVICES"], os.environ["DS_ACCELERATOR"]))
    assert seen == [("", "cpu"), ("2,5", "cuda")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5" and "DS_ACCELERATOR" not in os.environ


@pytest.mark.timeout(300)
def test_a_compressing_layout_is_verified_without_compression(config: Path) -> None:
    override = 'parallel={"pipeline": 1, "gradient_compression": {"type": "int8"}}'
    code, printed, figures = run_to_the_end([*MEGASPEED, "verify", "--set", override], config)
    assert code == 0 and figures["equal"]
    assert (
        'with parallel.gradient_compression "int8", a run is close but not equal to one process, '
        'so this layout is verified with "none"'
    ) in printed
