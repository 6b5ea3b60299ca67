"""`evaluate` and greedy `generate` give what megaspeed's own decoder of version 0.1 gave.

The figures were recorded with that decoder, before the commands computed through transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main
from tests.hugging_face.tiny_text import checkpoint_of_text

RUNS = Path(__file__).parents[1] / "checkpoint" / "version_0_1"
SAME = 1e-5  # relative

# Of trained checkpoints: (run, options) -> nats per token.
LOSSES = {
    ("gpt2-zero1-fp32", ""): 5.361810545495321,
    ("gpt2-zero1-fp32", "--sequence-length 16 --stride 5"): 5.360981086332529,
    ("llama-zero3-fp32", ""): 5.3302345798609325,
    ("llama-zero3-fp32", "--sequence-length 16 --stride 5"): 5.329980240641969,
}
BITS_PER_BYTE = {"gpt2-zero1-fp32": 4.095762109421184, "llama-zero3-fp32": 4.07164196520565}

# Of a GPT-2 with random weights and 24 positions: prompt -> 40 greedy tokens.
GREEDY = {
    "You may": "200 107 200 200 49 21 107 200 21 200 107 200 107 49 200 107 107 107 107 26 49 49 "
    "21 144 21 144 26 21 288 21 21 144 200 246 26 49 21 21 144 21",
    "": "200 144 200 49 144 144 200 144 144 144 144 144 21 144 49 49 49 49 144 49 49 144 21 144 21 "
    "144 21 144 26 144 21 144 144 246 26 49 49 144 21 144",
    "the terms and conditions of this agreement " * 3: "144 21 144 21 49 49 21 144 200 21 144 200 "
    "26 144 49 49 144 49 144 21 49 26 49 26 144 49 246 26 26 144 21 26 144 144 144 26 49 49 26 49",
}


def figures(tmp_path: Path, *command: Any) -> Any:
    """What a command writes to --json."""
    file = tmp_path / "figures.json"
    assert main([*map(str, command), "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize(("run", "options"), LOSSES)
def test_evaluate(run: str, options: str, tmp_path: Path) -> None:
    texts = (RUNS / "validation.txt", RUNS / "train.txt")
    found = figures(tmp_path, "evaluate", "--checkpoint", RUNS / run, *texts, *options.split())
    assert (found["documents"], found["tokens"], found["bytes"]) == (2, 2317, 4376)
    assert found["loss"] == pytest.approx(LOSSES[run, options], rel=SAME)
    if not options:
        assert found["bits_per_byte"] == pytest.approx(BITS_PER_BYTE[run], rel=SAME)


def test_greedy_generate(tmp_path: Path) -> None:
    prompts = [word for prompt in GREEDY for word in ("--prompt", prompt)]
    greedy = ["--temperature", 0, "--max-tokens", 40]
    checkpoint = checkpoint_of_text(tmp_path)
    found = figures(tmp_path, "generate", "--checkpoint", checkpoint, *greedy, *prompts)
    assert {
        each["prompt"]: " ".join(map(str, each["ids"])) for each in found["continuations"]
    } == GREEDY
