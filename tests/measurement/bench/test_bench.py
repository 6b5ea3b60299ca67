"""``megaspeed bench``: real turns on two ranks, refusals, and figures that a person can check."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import matplotlib
import pytest

from megaspeed.cli import main
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement import turns
from megaspeed.measurement.bench.contest import (
    HOST_BOUND,
    MEGASPEED,
    RUN,
    TRAINERS,
    Contestant,
    choose_peers,
    host_bound,
)
from megaspeed.measurement.bench.peers import Settings, deepspeed_json
from megaspeed.measurement.bench.report import report
from megaspeed.measurement.bench.result import BenchResult
from megaspeed.measurement.local_ranks import RanksFailed
from megaspeed.measurement.report import draw
from megaspeed.measurement.turns import Device, TimedRank
from megaspeed.measurement.watched_step import TrafficLog
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment, free_port
from megaspeed.training.step_inputs import StepInputs
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, LLAMA, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[3] / "LICENSE"
PEERS_OF_THE_DATA_AXIS = ["plain", "hf-deepspeed", "fsdp2", "ddp"]
BOTH = ["defaults", "guide"]


def launched_alone(
    launch: LaunchEnvironment, cache: str, port: int, part: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a rank of the pool with the variables that ``run_on_ranks`` sets."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ |= {"MEGASPEED_CACHE": cache, "MASTER_PORT": str(port)}
    return list(part(launch, *arguments))


@pytest.fixture
def failing(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start turns on ranks of the pool. A turn fails if its log file is in the returned list. If
    the list has "Ctrl-C in" before the file's name, the command is stopped in this turn.

    ``test_local_ranks.py`` tests the launch that this replaces, and ``test_gpu_check.py`` runs the
    complete command.
    """
    names: list[str] = []
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))

    def run(*part: Any, world_size: int, log: Path, **_: Any) -> list[Any]:
        if f"Ctrl-C in {log.name}" in names:
            raise KeyboardInterrupt
        if log.name in names:
            raise RanksFailed("out of memory: RuntimeError: 2 GiB are missing (rank 1)")
        cache = str(tmp_path / "cache")
        return pool.run(world_size, launched_alone, cache, free_port(), *part)

    monkeypatch.setattr(turns, "run_on_ranks", run)
    monkeypatch.setattr(turns, "share_of_others", lambda: 0.0)
    return names


def bench(folder: Path, *options: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the figures of the command on two ranks."""
    file, out = folder / "tiny.json", folder / "out"
    values = {
        "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
        "training": {"steps": 10},
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        **changes,
    }
    file.write_text(json.dumps(values))
    words = ["bench", "--config", str(file), "--world-size", "2", "--output", str(out), *options]
    code = main(words)
    return code, json.loads((out / "bench.json").read_text())


def rows_of(figures: dict[str, Any], workload: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in figures["workloads"][workload]["contestants"]}


@pytest.mark.timeout(600)
def test_peers_of_the_data_axis_train_the_same_task(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A turn has 6 steps, fewer than the warmup.
    warmup = {"type": "cosine", "params": {"warmup_num_steps": 8}}
    changes = {"model": LLAMA, "zero_optimization": {"stage": 3}, "scheduler": warmup}
    code, figures = bench(tmp_path, "--turns", "1", "--steps", "2", **changes)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert figures["warnings"] == []
    assert figures["not_run"] == {
        "deepspeed-pipeline": "it needs a pipeline, but parallel.pipeline is 1; set it to 2 or more"
    }
    for workload in (RUN, HOST_BOUND):
        rows = rows_of(figures, workload)
        assert list(rows) == [MEGASPEED, *PEERS_OF_THE_DATA_AXIS]
        own = rows.pop(MEGASPEED)
        assert own["ratio"] is None
        others = figures["workloads"][workload]["other_settings"]
        for name in ("hf-deepspeed", "fsdp2"):
            (other,) = (row for row in others if row["name"] == name)
            assert sorted([rows[name]["settings"], other["settings"]]) == BOTH
            assert rows[name]["ratio"]["median"] <= other["ratio"]["median"]
        assert len(others) == 2
        for name, row in rows.items():
            assert len(row["turns"]) == 1 and len(row["turns"][0]) == 2
            expected = row["step_seconds"]["median"] / own["step_seconds"]["median"]
            assert row["ratio"]["median"] == pytest.approx(expected)
            # transformers draws other initial weights
            tolerance = 5e-2 if name == "hf-deepspeed" else 1e-6
            assert row["first_loss"] == pytest.approx(own["first_loss"], rel=tolerance)
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"bench.json", "bench.md", "bench.png", "logs"}
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert printed.split("\nwrote ")[0].rstrip() in (out / "bench.md").read_text()
    assert max(map(len, printed.split("\nwrote ")[0].splitlines())) <= 80


@pytest.mark.timeout(600)
def test_one_peer_alone_trains_the_run_alone_beside_compiled_blocks(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--turns", "1", "--steps", "1", "--peers", "plain", "--omit", "host-bound")
    code, figures = bench(tmp_path, *options, model=GPT2, training={"steps": 9, "compile": True})
    assert code == 0 and figures["warnings"] == []
    assert list(figures["workloads"]) == [RUN]
    assert list(rows_of(figures, RUN)) == [MEGASPEED, "plain"]
    code, figures = bench(tmp_path, *options, "megaspeed", model=GPT2)
    ((name, row),) = rows_of(figures, RUN).items()
    assert (code, name, row["ratio"]) == (0, "plain", None)
    assert "Host-bound" not in capsys.readouterr().out


def trained_by_fsdp2(
    launch: LaunchEnvironment, settings: Settings, run: Run, corpus: PreparedCorpus
) -> tuple[list[float], int]:
    """Return the losses of three steps, and the bytes that a rank gathers in the last one."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=60) as context:
        step = TRAINERS["fsdp2", settings](run, context).train_step
        inputs, samples = StepInputs(run, corpus, context), run.batch.train_batch_size
        losses = [step(inputs.load(number * samples), 0.01).loss for number in range(2)]
        with TrafficLog(context) as log:
            losses.append(step(inputs.load(2 * samples), 0.01).loss)
    return losses, log.traffic["dp", "all_gather"]


@pytest.mark.parametrize("stage", [1, 3])
def test_fsdp2_gathers_once_a_step_if_every_rank_of_the_run_holds_the_weights(
    pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """It trains the same with both settings. At ZeRO-3, both gather in every micro-batch."""
    run = tiny_run(TEXT, dp=2, zero_optimization={"stage": stage})
    assert run.batch.gradient_accumulation_steps == 4
    (defaults, sent), (guide, sent_by_guide) = (
        pool.run(2, trained_by_fsdp2, settings, run, tiny_corpus(run, tmp_path))[0]
        for settings in BOTH
    )
    assert guide == pytest.approx(defaults, rel=1e-6)
    assert sent_by_guide == sent if stage == 3 else 4 * sent_by_guide < sent


def test_deepspeeds_defaults_have_no_key_of_the_guide() -> None:
    run = tiny_run(TEXT, dp=2, zero_optimization={"stage": 3})
    assert deepspeed_json(run, "defaults")["zero_optimization"] == {"stage": 3}
    guide = deepspeed_json(run, "guide")["zero_optimization"]
    assert guide["reduce_bucket_size"] == run.config.model.hidden_size**2
    assert guide["overlap_comm"] and "stage3_prefetch_bucket_size" in guide


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tied", [True, False])
def test_deepspeeds_pipeline_trains_the_same_task_and_a_failed_turn_is_reported(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    failing += ["deepspeed-pipeline-2.log", "deepspeed-pipeline-host-bound-2.log"]
    code, figures = bench(
        tmp_path,
        *("--turns", "2" if tied else "1", "--steps", "1", "--peers", "deepspeed-pipeline"),
        model={**GPT2, "tie_word_embeddings": tied},
        parallel={"pipeline": 2},
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
    )
    printed = capsys.readouterr().out
    for workload in (RUN, HOST_BOUND):
        rows = rows_of(figures, workload)
        own, theirs = rows[MEGASPEED], rows["deepspeed-pipeline"]
        assert theirs["first_loss"] == pytest.approx(own["first_loss"], rel=1e-3)
        assert (len(own["turns"]), len(theirs["turns"])) == ((2, 1) if tied else (1, 1))
    if tied:
        warning, host_bound_warning = figures["warnings"]
        assert host_bound_warning.startswith("deepspeed-pipeline host-bound failed in turn 2: ")
        assert warning.startswith(
            "deepspeed-pipeline failed in turn 2: out of memory: RuntimeError: 2 GiB are missing"
        )
        assert code == 1 and "**Warning: deepspeed-pipeline failed in turn 2: out" in printed
    else:
        assert code == 0 and figures["warnings"] == []


@pytest.mark.timeout(600)
def test_ctrl_c_reports_the_turns_that_were_measured(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing += ["Ctrl-C in megaspeed-2.log"]
    options = ("--turns", "3", "--steps", "1", "--peers", "ddp")
    code, figures = bench(tmp_path, *options, model=GPT2)
    out, err = capsys.readouterr()
    assert code == 1 and "stopped before the last turn; all ranks have ended" in err
    assert figures["warnings"] == ["stopped after 4 turns; the figures are of these"]
    for workload in (RUN, HOST_BOUND):
        assert [len(row["turns"]) for row in rows_of(figures, workload).values()] == [1, 1]
        assert rows_of(figures, workload)["ddp"]["ratio"] is not None
    assert "**Warning: stopped after 4 turns" in out and (tmp_path / "out/bench.png").exists()


def test_ctrl_c_in_the_first_turn_leaves_an_earlier_report(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing += ["Ctrl-C in megaspeed-1.log"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/bench.json").write_text('{"earlier": 1}')
    code, figures = bench(tmp_path, "--turns", "1", "--peers", "ddp", model=GPT2)
    assert code == 130 and figures == {"earlier": 1}
    assert "megaspeed bench: stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("degrees", "changes", "peer", "reason"),
    [
        ({"tp": 2}, {}, "ddp", "a data axis, but parallel.pipeline is 1 and parallel.tensor is 2"),
        (
            {"pp": 2},
            {},
            "fsdp2",
            "a data axis, but parallel.pipeline is 2 and parallel.tensor is 1",
        ),
        ({"dp": 2}, {}, "deepspeed-pipeline", "parallel.pipeline is 1; set it to 2 or more"),
        (
            {"pp": 2},
            {"zero_optimization": {"stage": 2}},
            "deepspeed-pipeline",
            "its ZeRO stage is at most 1, but zero_optimization.stage is 2; set it to 0 or 1",
        ),
        ({"dp": 2}, {"data": {"reset_at_documents": True}}, "hf-deepspeed", "across documents"),
        (
            {"pp": 2},
            {"model": {**GPT2, "residual_dropout": 0.1}},
            "deepspeed-pipeline",
            "its model has no dropout",
        ),
        (
            {"dp": 2},
            {"model": {**GPT2, "norm": "rms_norm"}},
            "hf-deepspeed",
            "GPT2LMHeadModel of transformers has layer_norm",
        ),
        (
            {"dp": 2},
            {"bf16": {"enabled": True}},
            "hf-deepspeed",
            "but zero_optimization.stage is 0; set it to 1",
        ),
        (
            {"dp": 2},
            {"fp16": {"enabled": True}, "device_type": "cuda"},
            "ddp",
            "fp16.enabled is true; set bf16.enabled instead",
        ),
        (
            {"dp": 2},
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "ddp",
            "it is run without offload",
        ),
    ],
)
def test_a_peer_that_cannot_train_the_run_is_refused_by_name(
    degrees: dict[str, Any], changes: dict[str, Any], peer: Any, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_peers(tiny_run(TEXT, **degrees, **changes), [peer])
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(f"{peer}: ") and reason in str(refused.value)


def test_without_names_all_peers_that_can_train_the_run_take_part() -> None:
    reasons = choose_peers(tiny_run(TEXT, dp=2), None)
    assert [peer for peer, reason in reasons.items() if not reason] == PEERS_OF_THE_DATA_AXIS
    with pytest.raises(ConfigError) as refused:
        choose_peers(tiny_run(TEXT, tp=2), None)
    assert len(refused.value.problems) == 5


def test_the_host_bound_workload_keeps_what_the_host_launches(tmp_path: Path) -> None:
    run = tiny_run(TEXT, pp=2, dp=2, model=LLAMA, bf16={"enabled": True})
    tiny = host_bound(run, tmp_path / "tokens.bin")
    assert (tiny.grid, tiny.precision, tiny.zero_stage) == (run.grid, "bf16", run.zero_stage)
    assert tiny.batch.gradient_accumulation_steps == run.batch.gradient_accumulation_steps
    assert tiny.batch.micro_batch_size == 1
    model = tiny.config.model
    assert model.num_hidden_layers == run.config.model.num_hidden_layers
    assert model.num_key_value_heads < model.num_attention_heads
    assert model.hidden_size == 64 and tiny.config.data.sequence_length == 16


def a_turn(seconds: list[float], loss: float = 5.0, peak: int = 2**30) -> list[TimedRank]:
    """Return a turn of two ranks. The second one has a quarter of the memory."""
    first = TimedRank(
        losses=[loss],
        grad_norm=1.0,
        skipped_steps=0,
        warm_up_seconds=[],
        step_seconds=seconds,
        peak_bytes=peak,
        device=Device(name="CPU", memory_bytes=2**36, threads=1),
    )
    return [first, replace(first, peak_bytes=peak // 4)]


def a_result(*turns: tuple[str, list[list[TimedRank]]], device: str = "CPU") -> BenchResult:
    """Return a result of contestants. The settings of a contestant may follow its name."""
    run = tiny_run(TEXT, dp=2, bf16={"enabled": device != "CPU"})
    rows = []
    for title, each in turns:
        name, _, settings = title.partition(" ")
        on_device = [
            [replace(rank, device=replace(rank.device, name=device)) for rank in ranks]
            for ranks in each
        ]
        rows.append(
            Contestant(
                label=title,
                run=run,
                name=name,
                settings=cast(Settings | None, settings or None),
                workload=RUN,
                turns=on_device,
                extras=[[2e9, 2e9]] * len(each),
            )
        )
    runs = {RUN: run, HOST_BOUND: run}
    return BenchResult(runs=runs, turns=3, steps=3, rows=rows, not_run={})


def test_the_ratio_is_that_of_neighbouring_turns() -> None:
    """The machine slows down from turn to turn, and both contestants with it."""
    result = a_result(
        (MEGASPEED, [a_turn([1.0, 1.0, 9.0]), a_turn([2.0] * 3), a_turn([4.0] * 3)]),
        ("ddp", [a_turn([1.5] * 3), a_turn([4.0] * 3), a_turn([10.0] * 3)]),
    )
    own, theirs = result.better(RUN)
    assert own.ratio is None and theirs.ratio is not None
    assert theirs.ratio.median == 2.0  # the median of 1.5, 2 and 2.5
    assert (theirs.ratio.lower, theirs.ratio.upper) == (1.75, 2.25)
    assert own.step_seconds.median == 2.0 and theirs.step_seconds.median == 4.0
    assert theirs.peak_bytes == 2**30
    assert own.tokens_per_second == 24 * 16 / 2.0


def test_the_row_of_a_peer_is_that_of_its_better_settings() -> None:
    result = a_result(
        (MEGASPEED, [a_turn([1.0] * 3)]),
        ("hf-deepspeed defaults", [a_turn([1.4] * 3)]),
        ("hf-deepspeed guide", [a_turn([3.5] * 3)]),
    )
    _, row = result.better(RUN)
    assert row.settings == "defaults" and row.ratio is not None and row.ratio.median == 1.4
    figures = report(result).figures["workloads"][RUN]
    assert [each["settings"] for each in figures["other_settings"]] == ["guide"]
    assert "turns" in figures["other_settings"][0]
    assert (
        "hf-deepspeed: with its defaults. With the settings of its guide a step takes 2.50 times "
        "as long."
    ) in " ".join(report(result).on_screen.split())


def test_the_better_settings_are_those_with_the_lower_ratio() -> None:
    """The machine is slow in the first turn, and the defaults took one turn less."""
    result = a_result(
        (MEGASPEED, [a_turn([9.0]), a_turn([1.0]), a_turn([1.0])]),
        ("fsdp2 defaults", [a_turn([13.5]), a_turn([1.5])]),
        ("fsdp2 guide", [a_turn([16.2]), a_turn([1.8]), a_turn([1.8])]),
    )
    defaults, guide = result.figures(RUN)[1:]
    assert guide.step_seconds.median < defaults.step_seconds.median
    assert result.better(RUN)[1].settings == "defaults"


def test_without_megaspeeds_figures_there_is_no_ratio() -> None:
    (row,) = a_result((MEGASPEED, []), ("ddp", [a_turn([1.0])])).better(RUN)
    assert row.name == "ddp" and row.ratio is None


def test_operations_are_those_of_the_formula_that_is_printed() -> None:
    """The model has 3 blocks of 12 x 32^2 weights, 301 x 32 of the head, 16 tokens,
    4 heads of 8.
    """
    for device, peak, heading in (("CPU", 2e9, "of matmul"), ("NVIDIA A100", 311.8e12, "MFU")):
        result = a_result((MEGASPEED, [a_turn([2.0])]), device=device)
        weights, attention = 3 * 12 * 32**2 + 301 * 32, 4 * 16 * 32 * 3
        flops = 3 * (2 * weights + attention)
        assert flops == training_flops_per_token(result.runs[RUN].config.model, 16)
        (row,) = result.better(RUN)
        tokens_per_second_and_rank = 24 * 16 / 2.0 / 2
        assert row.flops == flops * tokens_per_second_and_rank
        assert row.causal_flops == (flops - 3 * attention / 2) * tokens_per_second_and_rank
        (figures,) = report(result).figures["workloads"][RUN]["contestants"]
        assert figures["share_of_peak"] == pytest.approx(row.flops / peak)
        text = " ".join(report(result).on_screen.split())
        assert f"3 x (2 x {weights:,} weights of matrices + 4 x 16 tokens x 32 head" in text
        assert f"| {heading} |" in text


def test_another_loss_from_the_same_weights_is_a_warning() -> None:
    turns = [
        (MEGASPEED, [a_turn([1.0], 5.0)]),
        ("hf-deepspeed", [a_turn([1.0], 5.1)]),
        ("fsdp2", [a_turn([1.0], 5.000001)]),
        ("ddp", [a_turn([1.0], 5.1)]),
    ]
    (warning,) = a_result(*turns).notes
    assert warning.startswith("ddp has loss 5.1 in step 1 (run), but megaspeed has 5; ")
    not_finite = a_result(turns[0], ("ddp", [a_turn([1.0], float("nan"))]))
    assert len(list(not_finite.notes)) == 1
    assert report(not_finite).figures["workloads"][RUN]["contestants"][1]["first_loss"] is None


def test_tables_of_slow_steps_fit_80_columns() -> None:
    slow = [a_turn([1234.567, 2000.0, 3000.0], peak=800 * 2**30)]
    result = a_result((MEGASPEED, slow), ("deepspeed-pipeline", slow), device="NVIDIA A100")
    lines = report(result).on_screen.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("| deepspeed-pipeline |  2,000 |") for line in lines) == 1


def test_the_figures_of_a_chart_do_not_touch_its_title(tmp_path: Path) -> None:
    run = (MEGASPEED, [a_turn([1.0] * 3)]), ("ddp", [a_turn([1.9, 2.0, 2.1])])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(report(a_result(*run)).panels, tmp_path / "bench.svg")
    text = (tmp_path / "bench.svg").read_text()

    def height(words: str) -> float:
        """Return the height of the text, in points from the upper edge of the picture."""
        found = re.search(rf'<text [^>]*(?: y="|translate\([\d.]+ )([\d.]+)[^>]*>{words}', text)
        assert found is not None
        return float(found[1])

    assert height("2,000 ms") > height("gpt2: ") + 10
