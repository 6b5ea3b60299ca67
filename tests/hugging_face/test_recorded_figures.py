"""``evaluate`` and greedy ``generate`` give the figures that earlier versions gave.

The model is a GPT-2 with random weights and 24 positions.
"""

import math
from pathlib import Path

import pytest

from tests.hugging_face.tiny_text import LICENSE, checkpoint_of_text
from tests.support.command import figures

SAME = 1e-5  # relative

LOSS = 24.57690967926428  # nats per token of two parts of the license, 796 tokens

# Prompt -> 16 greedy tokens.
GREEDY = {
    "You may": "200 107 200 200 49 21 107 200 21 200 107 200 107 49 200 107",
    "": "200 144 200 49 144 144 200 144 144 144 144 144 21 144 49 49",
}


def test_evaluate(tmp_path: Path) -> None:
    texts = []
    for number, part in enumerate((slice(0, 700), slice(2000, 2600))):
        texts.append(tmp_path / f"{number}.txt")
        texts[-1].write_text(LICENSE.read_text()[part])
    checkpoint = checkpoint_of_text(tmp_path)
    found = figures(tmp_path, "evaluate", "--checkpoint", checkpoint, *texts)
    assert (found["documents"], found["tokens"], found["bytes"]) == (2, 796, 1300)
    assert found["loss"] == pytest.approx(LOSS, rel=SAME)
    bits = found["loss"] / math.log(2) * 796 / 1300
    assert found["bits_per_byte"] == pytest.approx(bits, rel=SAME)


def test_greedy_generate(tmp_path: Path) -> None:
    prompts = [word for prompt in GREEDY for word in ("--prompt", prompt)]
    greedy = ["--temperature", 0, "--max-tokens", 16]
    checkpoint = checkpoint_of_text(tmp_path)
    found = figures(tmp_path, "generate", "--checkpoint", checkpoint, *greedy, *prompts)
    assert {
        each["prompt"]: " ".join(map(str, each["ids"])) for each in found["continuations"]
    } == GREEDY
