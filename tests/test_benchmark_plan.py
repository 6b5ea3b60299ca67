"""The script that compares predicted step times with published runs."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megaspeed.planning.costs.reserved_memory import UNEXPECTED
from megaspeed.planning.forecast import TYPICAL_FACTOR

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_plan.py"

COLUMNS = """
id src gpu n_gpus layers hidden heads kv_heads ffn mlp_mats vocab seq_len tp pp vp dp mbs gbs_seqs
zero_stage fact_fsdp recompute precision fact_flash fact_sp fact_gbytes fact_overlap framework
d_iter_time_s
""".split()  # noqa: SIM905

# Narayanan et al. 2021 (arXiv 2104.04473), Table 1: 145.6B, 148 TFLOP/s with full recomputation.
# Korthikanti et al. 2022 (arXiv 2205.05198), Table 5: 175B, 13.75 s.
# llm-foundry, scripts/train/benchmarking/README.md: MPT-30b on 256 H100, 2,148 tokens/s/GPU.
# torchtitan, benchmarks/llama3_h100_202412: Llama 3.1 8B, 6,667 tokens/s/GPU on H100 of 500 W.
# nanotron, docs/benchmark.md: 3.57B, MFU 46.68 % on 8 H100.
RUNS = """
nara narayanan A100-80GB 1536 80 12288 96 96 49152 2 51200 2048 8 8 2 24 2 2304 0 . full fp16 none . 4 . Megatron-LM 24.8174
kort korthikanti A100-80GB 64 96 12288 96 96 49152 2 51200 2048 8 8 3 1 1 64 0 . selective bf16 none 1 4 . Megatron-LM 13.75
mpt foundry H100-80GB 256 48 7168 56 56 28672 2 50368 2048 1 1 1 256 8 2048 3 1 full bf16 fa1 . 2 1 llm-foundry 7.6276
llama titan H100-96GB-HBM2e-500W 8 32 4096 32 8 14336 3 128256 8192 1 1 1 8 2 16 3 1 selective bf16 fa2 . 4 1 torchtitan 2.4575
3b nanotron H100-80GB 8 28 3072 32 32 8192 3 131072 4096 1 2 1 4 2 256 1 . none bf16 fa2 . 4 . nanotron 7.2841
"""  # noqa: E501

LAYOUTS = """
a one A100-80GB 64 40 5120 40 40 13824 3 32000 2048 2 1 1 32 1 256 1 . none bf16 fa2 . 4 . x 4.0
b one A100-80GB 64 40 5120 40 40 13824 3 32000 2048 8 1 1 8 1 256 1 . none bf16 fa2 . 4 . x 6.0
"""
"""Two layouts of one model. The times are invented. Their order is that of every
published search.
"""


def rows(text: str) -> list[dict[str, str]]:
    lines = [line.replace(" .", " ").split(" ") for line in text.strip().splitlines()]
    return [dict(zip(COLUMNS, line, strict=True)) for line in lines]


def script() -> Any:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_plan", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_plan"] = module  # its dataclasses need the module here
    spec.loader.exec_module(module)
    return module


def benchmark(folder: Path, stated: list[dict[str, str]], *options: str) -> Any:
    """Run the script. Return its exit code and the JSON that it writes."""
    file, out = folder / "rows.csv", folder / "out.json"
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, sorted({key for row in stated for key in row}))
        writer.writeheader()
        writer.writerows(stated)
    code = script().main([str(file), "--json", str(out), *options])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_published_runs_are_predicted_within_15_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, figures = benchmark(tmp_path, rows(RUNS))
    assert code == 0
    for run in figures["runs"]:
        ratio = run["predicted_seconds"] / run["reported_seconds"]
        assert 0.85 < ratio < 1.15, (run["id"], ratio)
        assert sum(run["terms"].values()) == pytest.approx(run["predicted_seconds"])
    errors = figures["errors"]["groups"]
    assert errors["all"]["runs"] == 5 and errors["H100-80GB"]["runs"] == 2
    assert "5 sources alike" in capsys.readouterr().out


NEAR = 0.006
"""The documentation rounds percentages, and other parts of the prediction change them a little."""


def percentages(pattern: str, page: str) -> list[float]:
    """Return the percentages that a page states."""
    found = re.search(pattern, page)
    assert found is not None, pattern
    return [float(each) / 100 for each in found.groups()]


def test_the_published_runs_have_the_errors_that_the_documentation_states(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert script().main(["--json", str(out)]) == 0
    errors = json.loads(out.read_text())["errors"]
    page = (SCRIPT.parents[1] / "docs" / "planning.md").read_text()
    stated = percentages(r"`--leave-one-out`\) \| (.*) % \| (.*) % \|", page)
    alike = errors["sources_alike"]
    assert stated == pytest.approx([alike["median"], alike["p90"]], abs=NEAR)
    assert f"with {errors['groups']['all']['runs']} published runs" in page


LLAMA = dict(zip(COLUMNS, RUNS.strip().splitlines()[3].replace(" .", " ").split(" "), strict=True))
"""torchtitan's run on one node. The following tests change its layout."""


def step_of(**changes: str) -> Any:
    """Return the predicted step of a run like torchtitan's, with some columns changed."""
    plan = script()
    return plan.predict(plan.published_run({**LLAMA, **changes}, "changed"))


PIPELINE = {"pp": "4", "dp": "1", "tp": "2", "gbs_seqs": "8", "mbs": "1"}


def test_deepspeeds_engine_multiplies_the_time_of_layers() -> None:
    plain, slow = (step_of(**PIPELINE, framework=name) for name in ("", "DeepSpeed"))
    for name in ("products", "head", "attention", "bubble"):
        assert slow.terms[name] == pytest.approx(script().FITTED.interpreted * plain.terms[name])
    assert (slow.optimizer, slow.p2p) == (plain.optimizer, plain.p2p)


def test_chunks_divide_the_bubble_and_multiply_the_messages() -> None:
    one, two = (step_of(**{**PIPELINE, "vp": chunks}) for chunks in ("1", "2"))
    # Without chunks, 1f1b waits a little longer, because the stage with the head is the slowest.
    assert two.bubble == pytest.approx(one.bubble / 2, rel=0.05)
    assert two.p2p == pytest.approx(2 * one.p2p)


def test_tensor_parallel_collectives_overlap_only_within_a_node() -> None:
    for tp, share in (("8", 0.5), ("16", 1.0)):
        layout = {"tp": tp, "dp": "1", "n_gpus": "16", "fact_sp": "1"}
        plain, overlapped = (
            step_of(**layout, fact_async_tp=overlaps).layers.block.parts.tp
            for overlaps in ("", "1")
        )
        assert overlapped == pytest.approx(share * plain)


def test_a_tensor_rank_sends_its_part_as_with_sequence_parallelism() -> None:
    plain, part, split = (
        step_of(**PIPELINE, **how).p2p
        for how in ({"fact_sp": ""}, {"fact_sp": "", "fact_scatter_gather": "1"}, {"fact_sp": "1"})
    )
    assert split == part < plain


def test_recomputed_operations_take_more_than_what_is_no_product() -> None:
    kinds = ("none", "selective", "full")
    titan, other = (
        [step_of(recompute=kind, framework=name).recomputation for kind in kinds]
        for name in ("torchtitan", "")
    )
    assert titan[0] == 0 < titan[1] < titan[2] and other[0] == 0 < other[1] < other[2]
    attention = step_of(recompute="none").layers.block.forward_parts.attention
    assert other[1] == pytest.approx(32 * attention)  # one micro-batch of 32 blocks


def test_the_head_computes_in_16_bits_beside_blocks_in_fp8() -> None:
    wide, narrow = (step_of(precision=each).layers for each in ("bf16", "fp8"))
    assert narrow.head == wide.head
    assert narrow.block.forward_parts.products < wide.block.forward_parts.products


def test_a_source_with_many_rows_counts_as_much_as_one_with_a_single_row() -> None:
    """Two sources have three quarters of the published rows."""
    plan, made = script(), {f"a{n}": 0.01 for n in range(99)} | {"b": 0.3, "c": 0.4}
    runs = [types.SimpleNamespace(id=name, source=name[0]) for name in made]
    weights = plan.weights_of(runs)
    assert weights["b"] == pytest.approx(1 / 3) and sum(weights.values()) == pytest.approx(1)
    assert plan.weighted_quantile(made, weights, 0.5) == 0.3
    assert plan.weighted_quantile(made, weights, 0.9) == 0.4


def test_a_row_in_two_files_counts_once(tmp_path: Path) -> None:
    twice = tmp_path / "again.csv"
    twice.write_text((SCRIPT.parents[1] / "docs" / "published_runs" / "fitted.csv").read_text())
    out = tmp_path / "out.json"
    assert script().main([str(script().ROWS), str(twice), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["errors"]["groups"]["foundry"]["runs"] == 216


def test_an_unseen_source_has_the_error_and_the_coverage_that_are_stated(tmp_path: Path) -> None:
    out, root = tmp_path / "out.json", SCRIPT.parents[1]
    assert script().main(["--leave-one-out", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    alike, coverage = figures["errors"]["sources_alike"], figures["coverage"]
    assert alike["median"] < 0.08 and alike["p90"] < 0.20
    assert 0.85 < coverage["coverage"] < 0.95
    assert coverage["factor"] == pytest.approx(TYPICAL_FACTOR, abs=0.015)
    assert figures["constants"] == asdict(script().FITTED)
    found = pytest.approx([alike["median"], alike["p90"]], abs=NEAR)
    page = (root / "docs" / "planning.md").read_text()
    readme = " ".join((root / "README.md").read_text().split())
    assert percentages(r"left out of the fit \| (.*) % \| (.*) % \|", page) == found
    assert (
        percentages(r"median error is (\S*) %, and nine of ten \S* \S* within (\S*) %", readme)
        == found
    )
    memory = figures["memory"]
    shares = [memory["coverage"], coverage["coverage"]]
    pattern = r"(\S*) % of its runs need at most(?s:.*) (\S*) % of the runs of that"
    assert percentages(pattern, page) == pytest.approx(shares, abs=0.02)
    assert memory["p90"] == pytest.approx(1 + UNEXPECTED, abs=0.02)
    assert f"{memory['runs']} runs of BLOOM" in page


def test_each_source_is_predicted_with_constants_fitted_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, figures = benchmark(tmp_path, rows(RUNS), "--leave-one-out")
    assert figures["errors"]["groups"]["all"]["median"] < 0.15
    out = capsys.readouterr().out
    assert out.count("without one source") == 3


def test_the_fit_is_not_worse_than_the_constants_in_the_code(tmp_path: Path) -> None:
    _, stated = benchmark(tmp_path, rows(RUNS))
    _, fitted = benchmark(tmp_path, rows(RUNS), "--fit")
    assert fitted["constants"] != stated["constants"]

    def mean(figures: Any) -> float:
        sources = [figures["errors"]["groups"][row["src"]]["median"] for row in rows(RUNS)]
        return sum(sources) / len(sources)

    assert mean(fitted) <= mean(stated) + 0.005  # the fit minimises the logarithm of the ratio


def test_layouts_are_ordered_by_predicted_time_and_by_bytes(tmp_path: Path) -> None:
    _, figures = benchmark(tmp_path, rows(LAYOUTS))
    right = {"groups": 1, "first_within_5_percent": 1, "pairs": 1, "ordered_right": 1}
    assert figures["layouts"]["predicted time"] == right


def test_runs_without_a_time_are_only_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, figures = benchmark(tmp_path, [{**row, "d_iter_time_s": ""} for row in rows(RUNS)])
    assert "errors" not in figures and len(figures["runs"]) == 5
    assert capsys.readouterr().out.count(" s\n") == 5


def test_a_row_that_cannot_be_predicted_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, *_ = rows(RUNS)
    bad = [
        {**good, "id": "abacus", "gpu": "Abacus"},
        {**good, "id": "shapeless", "layers": ""},
        {**good, "id": "too early", "precision": "fp8"},
        {**good, "id": "excluded", "usable": "False", "why_not": "two runs in one"},
    ]
    code, figures = benchmark(tmp_path, [{**good, "usable": "True"}, *bad])
    assert code == 0 and [run["id"] for run in figures["runs"]] == ["nara"]
    out = capsys.readouterr().out
    assert "abacus: DeviceError: there is no device called 'abacus'" in out
    assert "shapeless: ValueError: the column layers is blank" in out
    assert "too early: ValueError: the table of devices has no rate of fp8 on a100-80gb" in out
    assert "excluded: two runs in one" in out
    assert benchmark(tmp_path, bad)[0] == 2


def test_a_file_without_the_columns_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, figures = benchmark(tmp_path, [{"id": "a", "gpu": "H100-80GB"}] * 9)
    assert code == 2 and figures is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "rows.csv has no column n_gpus, layers, hidden" in line


def test_a_file_that_cannot_be_read_is_refused_without_a_traceback(tmp_path: Path) -> None:
    absent = tmp_path / "absent.csv"
    command = [sys.executable, str(SCRIPT), str(absent)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{absent} cannot be read as CSV: ")
    assert len(ended.stderr.splitlines()) == 1
