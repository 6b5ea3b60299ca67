"""How long a sequence fits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run, read_config
from megaspeed.planning.cluster import read_cluster
from megaspeed.planning.longest_sequence import longest_sequences
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import Training, verdict_of
from megaspeed.planning.what_if import what_if

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ds_configs/llama3_8b_long.json"
PUBLISHED = {1: 500_000, 8: 3_700_000, 32: 15_000_000}
"""GPUs -> tokens (Bekman et al. 2025, Arctic Long Sequence Training, abstract)."""


def training(world_size: int, *changes: str) -> Training:
    world = World(world_size, "a test", "cuda")
    return Training(
        stated=read_config(FILE, changes), run=load_run(FILE, changes, world), device_type="cuda"
    )


def cluster(world_size: int) -> Any:
    ranks = min(8, world_size)
    return read_cluster(
        {"device": "h100-80gb", "nodes": world_size // ranks, "gpus_per_node": ranks}
    ).cluster()


def test_the_documented_lengths_are_predicted_and_near_the_published_ones() -> None:
    page = (ROOT / "docs/context_parallelism.md").read_text()
    for ranks, published in PUBLISHED.items():
        own = training(ranks, f"parallel.context={ranks}")
        longest = longest_sequences(own, cluster(ranks))[0]
        row = re.search(rf"\| {ranks} \| ([\d,]+)(?: tokens)? \(cp (\d+)\)", page)
        assert row is not None
        assert (longest.tokens, longest.settings.cp) == (
            int(row[1].replace(",", "")),
            int(row[2]),
        )
        # On one node, the published run had no host memory for more.
        assert longest.tokens == pytest.approx(published, rel=0.35 if ranks == 8 else 0.25)


def test_the_next_longer_sequence_does_not_fit() -> None:
    own = training(8)
    for found in longest_sequences(own, cluster(8)):
        settings, count = found.settings, own.run.batch.gradient_accumulation_steps
        run = own.at_length(settings, found.tokens, count)
        peak = predict(run, "cuda").fullest.peak_bytes
        assert peak == found.peak_bytes and verdict_of(run, peak, cluster(8)) == "fits"
        longer = own.at_length(settings, found.tokens + 1024, count)
        peak = predict(longer, "cuda").fullest.peak_bytes
        assert verdict_of(longer, peak, cluster(8)) == "tight"


def test_learned_positions_limit_the_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "ds_configs/gpt2_1.5b.json"
    options = ["--world-size", "8", "--device", "h100-80gb", "--longest-sequence"]
    assert main(["plan", "--config", str(file), *options]) == 0
    printed = capsys.readouterr().out.split("Longest sequence that fits")[1]
    *rows, last = printed.strip().splitlines()[4:]
    assert {int(row.split()[4].replace(",", "")) for row in rows if row[0] == " "} == {1024}
    assert last == "model.max_position_embeddings 1,024 is the limit"


def test_longer_sequences_have_more_context_degrees(tmp_path: Path) -> None:
    short, long = (
        what_if(training(8, f"data.sequence_length={length}", "train_batch_size=8"), cluster(8))
        for length in (4096, 65536)
    )
    assert {layout.settings.cp for layout in short.variants} == {1, 8}  # 8 is stated
    assert {layout.settings.cp for layout in long.variants} == {1, 2, 4, 8}
    best = tmp_path / "best.json"
    options = ["--set", "data.sequence_length=65536", "--world-size", "8", "--json"]
    again = [tmp_path / f"{number}.json" for number in range(2)]
    search = ["--device", "h100-80gb", "--what-if", "--write", str(best)]
    assert main(["plan", "--config", str(FILE), *options, str(again[0]), *search]) == 0
    assert main(["plan", "--config", str(best), *options, str(again[1])]) == 0
    found, written = (json.loads(file.read_text()) for file in again)
    first = next(each for each in found["what_if"]["layouts"] if each["verdict"] == "fits")
    degrees = {key: first[key] for key in ("pp", "dp", "cp", "tp", "replicate")}
    assert written["degrees"] == {**degrees, "ep": None}


def test_fewer_steps_of_longer_sequences_are_no_mistake() -> None:
    """With as many tokens, a step of the longest sequences would be the only one."""
    warmup = ("scheduler.type=cosine", "scheduler.params.warmup_num_steps=9")
    own = training(8, "training.tokens=100M", "parallel.context=8", *warmup)
    longest = longest_sequences(own, cluster(8))
    assert longest[0].tokens > 10**6


IN_FP32 = ("bf16.enabled=false", "data_types.grad_accum_dtype=fp32")
FEW_KEYS = ("model.num_key_value_heads=2", "parallel.context=8")


def test_a_mask_that_grows_with_the_square_of_the_length_is_named_and_avoided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In fp32, attention to gathered keys needs a mask. "auto" gathered the keys, because this
    sends less. Then the longest sequence had a seventh of the tokens.
    """
    lengths, masks = {}, {}
    for method in ("auto", "all_gather"):
        changes = (*FEW_KEYS, *IN_FP32, f"parallel.context_method={method}")
        found = longest_sequences(training(8, *changes), cluster(8))
        lengths[method] = max(each.tokens for each in found if each.settings.cp == 8)
        options = ("--world-size", "8", "--device", "h100-80gb", "--set", *changes)
        main(["plan", "--config", str(FILE), *options])
        masks[method] = re.findall("attention mask: .*", capsys.readouterr().out)
    assert lengths["auto"] > 7 * lengths["all_gather"]
    reason = "torch's FlashAttention for GPUs needs 16-bit numbers"
    assert masks == {"auto": [], "all_gather": [f"attention mask: 128.00 GiB, because {reason}"]}
