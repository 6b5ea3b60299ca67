"""``megaspeed bench``: real turns on two ranks, refusals, and figures that a person can check."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megaspeed.cli import main
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement import turns
from megaspeed.measurement.bench import (
    MEGASPEED,
    TRAINERS,
    BenchResult,
    Contestant,
    choose_peers,
    report,
)
from megaspeed.measurement.deepspeed_peers import Settings, deepspeed_json
from megaspeed.measurement.local_ranks import RanksFailed
from megaspeed.measurement.turns import Device, TimedRank
from megaspeed.measurement.watched_step import TrafficLog
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import StepInputs, Worker
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, OLMOE, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
PEERS_OF_THE_DATA_AXIS = ["plain", "hf-deepspeed", "fsdp2", "ddp"]
BOTH = ["defaults", "guide"]


def as_list(launch: LaunchEnvironment, part: Callable[..., Any], *arguments: Any) -> list[Any]:
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
        return pool.run(world_size, as_list, *part)

    monkeypatch.setattr(turns, "run_on_ranks", run)
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


def rows_of(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in figures["contestants"]}


@pytest.mark.timeout(600)
def test_peers_of_the_data_axis_train_the_same_task(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A turn has 6 steps, fewer than the warmup.
    warmup = {"type": "cosine", "params": {"warmup_num_steps": 8}}
    changes = {"model": OLMOE, "zero_optimization": {"stage": 3}, "scheduler": warmup}
    code, figures = bench(tmp_path, "--turns", "1", "--steps", "2", **changes)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert figures["notes"] == []
    assert figures["not_run"] == {
        "deepspeed-pipeline": "it needs a pipeline, but parallel.pipeline is 1; set it to 2 or more"
    }
    rows = rows_of(figures)
    own = rows.pop(MEGASPEED)
    assert own["ratio"] is None and own["counts"]
    both = {name: [f"{name} {settings}" for settings in BOTH] for name in ("hf-deepspeed", "fsdp2")}
    assert list(rows) == ["plain", *both["hf-deepspeed"], *both["fsdp2"], "ddp"]
    for labels in both.values():
        better = min(labels, key=lambda label: rows[label]["ratio"]["median"])
        assert [label for label in labels if rows[label]["counts"]] == [better]
    for row in rows.values():
        assert len(row["turns"]) == 1 and len(row["turns"][0]) == 2
        expected = row["step_seconds"]["median"] / own["step_seconds"]["median"]
        assert row["ratio"]["median"] == pytest.approx(expected)
        # transformers draws other initial weights
        tolerance = 5e-2 if row["name"] == "hf-deepspeed" else 1e-6
        assert row["first_loss"] == pytest.approx(own["first_loss"], rel=tolerance)
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"bench.json", "bench.md", "bench.png", "logs"}
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert printed.split("\nwrote ")[0].rstrip() in (out / "bench.md").read_text()
    assert max(map(len, printed.split("\nwrote ")[0].splitlines())) <= 80


@pytest.mark.timeout(600)
def test_one_peer_trains_beside_compiled_blocks(failing: list[str], tmp_path: Path) -> None:
    options = ("--turns", "1", "--steps", "1", "--peers", "plain")
    code, figures = bench(tmp_path, *options, model=GPT2, training={"steps": 9, "compile": True})
    assert code == 0 and figures["notes"] == []
    assert list(rows_of(figures)) == [MEGASPEED, "plain"]


def trained_by_fsdp2(
    launch: LaunchEnvironment, settings: Settings, run: Run, corpus: PreparedCorpus
) -> tuple[list[float], int]:
    """Return the losses of three steps, and the bytes that a rank gathers in the last one."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context:
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
    failing += ["deepspeed-pipeline-2.log"]
    code, figures = bench(
        tmp_path,
        *("--turns", "2" if tied else "1", "--steps", "1", "--peers", "deepspeed-pipeline"),
        model={**GPT2, "tie_word_embeddings": tied},
        parallel={"pipeline": 2},
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
    )
    printed = capsys.readouterr().out
    rows = rows_of(figures)
    own, theirs = rows[MEGASPEED], rows["deepspeed-pipeline"]
    assert theirs["first_loss"] == pytest.approx(own["first_loss"], rel=1e-3)
    assert (len(own["turns"]), len(theirs["turns"])) == ((2, 1) if tied else (1, 1))
    if tied:
        (note,) = figures["notes"]
        assert note.startswith(
            "deepspeed-pipeline failed in turn 2: out of memory: RuntimeError: 2 GiB are missing"
        )
        assert code == 1 and "- deepspeed-pipeline failed in turn 2: out" in printed
    else:
        assert code == 0 and figures["notes"] == []


@pytest.mark.timeout(600)
def test_ctrl_c_reports_the_turns_that_were_measured(
    failing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing += ["Ctrl-C in megaspeed-2.log"]
    options = ("--turns", "3", "--steps", "1", "--peers", "ddp")
    code, figures = bench(tmp_path, *options, model=GPT2)
    out, err = capsys.readouterr()
    assert code == 1 and "stopped before the last turn; all ranks have ended" in err
    assert figures["notes"] == ["stopped after 2 turns; the figures are of these"]
    assert [len(row["turns"]) for row in figures["contestants"]] == [1, 1]
    assert rows_of(figures)["ddp"]["ratio"] is not None
    assert "- stopped after 2 turns" in out and (tmp_path / "out/bench.png").exists()


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
        ({"dp": 2}, {"optimizer": {"type": "Muon"}}, "ddp", 'AdamW, but optimizer.type is "Muon"'),
        ({"dp": 2}, {"optimizer": {"type": "Muon"}}, "hf-deepspeed", 'set it to "AdamW"'),
        (
            {"dp": 2},
            {"model": {**OLMOE, "router_aux_loss_coef": 0.01}},
            "hf-deepspeed",
            "it does not balance experts, but model.router_aux_loss_coef is 0.01; set it to 0",
        ),
        (
            {"pp": 2},
            {"model": {**OLMOE, "router_bias_rate": 0.001}},
            "deepspeed-pipeline",
            "model.router_bias_rate is 0.001; set it to 0",
        ),
        (
            {"dp": 2},
            {"model": OLMOE, "parallel": {"expert": 2}},
            "fsdp2",
            "it has no expert axis, but parallel.expert is 2; set it to 1",
        ),
        (
            {"dp": 2},
            {"model": OLMOE, "bf16": {"enabled": True}},
            "plain",
            "bf16.enabled is true; set it to false",
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


def a_turn(seconds: list[float], loss: float = 5.0, peak: int = 2**30) -> list[TimedRank]:
    """Return a turn of two ranks. The second one has a quarter of the memory."""
    first = TimedRank(
        losses=[loss],
        grad_norm=1.0,
        skipped_steps=0,
        step_seconds=seconds,
        peak_bytes=peak,
        device=Device(name="CPU", memory_bytes=2**36),
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
                make=Worker,
                name=name,
                settings=cast(Settings | None, settings or None),
                turns=on_device,
            )
        )
    return BenchResult(run=run, turns=3, steps=3, rows=rows, not_run={})


def test_the_ratio_is_that_of_neighbouring_turns() -> None:
    """The machine slows down from turn to turn, and both contestants with it."""
    result = a_result(
        (MEGASPEED, [a_turn([1.0, 1.0, 9.0]), a_turn([2.0] * 3), a_turn([4.0] * 3)]),
        ("ddp", [a_turn([1.5] * 3), a_turn([4.0] * 3), a_turn([10.0] * 3)]),
    )
    own, theirs = result.timed
    ratio = result.ratio(theirs)
    assert result.ratio(own) is None and ratio is not None
    assert ratio.median == 2.0  # the median of 1.5, 2 and 2.5
    assert (ratio.lower, ratio.upper) == (1.75, 2.25)
    assert own.step_seconds.median == 2.0 and theirs.step_seconds.median == 4.0
    assert theirs.peak_bytes == 2**30
    figures = report(result).figures["contestants"][0]
    assert figures["tokens_per_second"] == 24 * 16 / 2.0


def test_the_row_of_a_peer_is_that_of_its_better_settings() -> None:
    result = a_result(
        (MEGASPEED, [a_turn([1.0] * 3)]),
        ("hf-deepspeed defaults", [a_turn([1.4] * 3)]),
        ("hf-deepspeed guide", [a_turn([3.5] * 3)]),
    )
    _, row = result.counted
    ratio = result.ratio(row)
    assert row.settings == "defaults" and ratio is not None and ratio.median == 1.4
    counts = [each["counts"] for each in report(result).figures["contestants"]]
    assert counts == [True, True, False]
    assert "those that count: hf-deepspeed defaults." in report(result).text


def test_the_better_settings_are_those_with_the_lower_ratio() -> None:
    """The machine is slow in the first turn, and the defaults took one turn less."""
    result = a_result(
        (MEGASPEED, [a_turn([9.0]), a_turn([1.0]), a_turn([1.0])]),
        ("fsdp2 defaults", [a_turn([13.5]), a_turn([1.5])]),
        ("fsdp2 guide", [a_turn([16.2]), a_turn([1.8]), a_turn([1.8])]),
    )
    defaults, guide = result.timed[1:]
    assert guide.step_seconds.median < defaults.step_seconds.median
    assert result.counted[1].settings == "defaults"


def test_without_megaspeeds_figures_there_is_no_ratio() -> None:
    result = a_result((MEGASPEED, []), ("ddp", [a_turn([1.0])]))
    (row,) = result.counted
    assert row.name == "ddp" and result.ratio(row) is None


def test_another_loss_from_the_same_weights_is_a_warning() -> None:
    turns = [
        (MEGASPEED, [a_turn([1.0], 5.0)]),
        ("hf-deepspeed", [a_turn([1.0], 5.1)]),
        ("fsdp2", [a_turn([1.0], 5.000001)]),
        ("ddp", [a_turn([1.0], 5.1)]),
    ]
    (warning,) = a_result(*turns).notes
    assert warning.startswith("ddp has loss 5.1 in step 1, but megaspeed has 5; ")
    not_finite = a_result(turns[0], ("ddp", [a_turn([1.0], float("nan"))]))
    assert len(list(not_finite.notes)) == 1
    assert report(not_finite).figures["contestants"][1]["first_loss"] is None


def test_tables_of_slow_steps_fit_80_columns() -> None:
    slow = [a_turn([12.34567, 20.0, 30.0], peak=800 * 2**30)]
    result = a_result((MEGASPEED, slow), ("deepspeed-pipeline", slow), device="NVIDIA A100")
    lines = report(result).text.splitlines()
    assert max(map(len, lines)) <= 80
    assert (
        sum(line.startswith("| deepspeed-pipeline | 20,000 (16,173-25,000)") for line in lines) == 1
    )
