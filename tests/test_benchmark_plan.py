"""The script that compares predicted step times with published runs."""

import csv
import importlib.util
import re
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megaspeed.planning.costs.reserved_memory import UNEXPECTED
from megaspeed.planning.forecast import TYPICAL_FACTOR

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "benchmark_plan.py"


def script() -> Any:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_plan", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_plan"] = module  # its dataclasses need the module here
    spec.loader.exec_module(module)
    return module


def rows() -> list[dict[str, str]]:
    with script().ROWS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


NEAR = 0.006
"""The documentation rounds percentages, and other parts of the prediction change them a little."""


def percentages(pattern: str, page: str) -> list[float]:
    """Return the percentages that a page states."""
    found = re.search(pattern, page)
    assert found is not None, pattern
    return [float(each) / 100 for each in found.groups()]


@pytest.mark.slow
def test_an_unseen_source_has_the_error_and_the_coverage_that_are_stated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = script().benchmark(rows())
    assert capsys.readouterr().out.count("without one source") == 3
    alike, coverage = figures["errors"]["16 sources alike"], figures["coverage"]
    assert alike["median"] < 0.08 and alike["p90"] < 0.20
    assert 0.85 < coverage["coverage"] < 0.95
    assert coverage["factor"] == pytest.approx(TYPICAL_FACTOR, abs=0.015)
    assert figures["constants"] == asdict(script().FITTED)
    found = pytest.approx([alike["median"], alike["p90"]], abs=NEAR)
    page = (ROOT / "docs" / "planning.md").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"with {alike['runs']} published runs" in page
    assert (
        percentages(r"median error is (\S*) %, and nine of ten\s.*\swithin (\S*) %", page) == found
    )
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
    layouts = figures["layouts"]
    assert f"There are {layouts['groups']} groups" in page
    assert f"In {layouts['first_within_5_percent']} of them" in page


def step_of(**changes: str) -> Any:
    """Return the predicted step of torchtitan's run on one node, with some columns changed."""
    (llama,) = (row for row in rows() if row["id"] == "titan-001")
    plan = script()
    return plan.predict(
        plan.published_run({**llama, "fact_sp": "", "fact_scatter_gather": "", **changes})
    )


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
    # 8 micro-batches: 2 x 8 + 3 messages each way instead of 8 + 3.
    assert two.p2p == pytest.approx(19 / 11 * one.p2p)


def test_tensor_parallel_collectives_overlap_only_within_a_node() -> None:
    for tp, share in (("8", 0.5), ("16", 1.0)):
        layout = {"tp": tp, "dp": "1", "n_gpus": "16", "fact_sp": "True"}
        plain, overlapped = (
            step_of(**layout, fact_async_tp=overlaps).layers.block.parts.tp
            for overlaps in ("", "True")
        )
        assert overlapped == pytest.approx(share * plain)


def test_a_tensor_rank_sends_its_part_as_with_sequence_parallelism() -> None:
    plain, part, split = (
        step_of(**PIPELINE, **how).p2p
        for how in (
            {"fact_sp": ""},
            {"fact_sp": "", "fact_scatter_gather": "True"},
            {"fact_sp": "True"},
        )
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
