"""Both commands compute for a checkpoint what stock transformers computes for its export."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaspeed.cli import main
from megaspeed.hugging_face.exporting import export_model
from tests.hugging_face.tiny_text import LICENSE, checkpoint_of_text

TEXT = LICENSE.read_text()[2000:2600]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a checkpoint, its export)."""
    root = tmp_path_factory.mktemp("run")
    checkpoint = checkpoint_of_text(root)
    export_model(checkpoint, root / "exported", verify=False)
    return checkpoint, root / "exported"


@torch.no_grad()
def test_evaluate_computes_the_loss_of_the_exported_model(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, exported = folders
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(TEXT).input_ids])
    length = model.config.n_positions
    nats = 0.0
    for start in range(0, len(ids) - 1, length):
        targets = ids[start + 1 : start + length + 1]
        logits = model(ids[None, start : start + len(targets)]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))

    text, figures = tmp_path / "a.txt", tmp_path / "figures.json"
    text.write_text(TEXT)
    options = ["--checkpoint", str(checkpoint), "--json", str(figures)]
    assert main(["evaluate", str(text), *options]) == 0
    reported = json.loads(figures.read_text())
    assert (reported["tokens"], reported["bytes"]) == (len(ids) - 1, 600)
    assert reported["loss"] == pytest.approx(nats / reported["tokens"], rel=1e-6)
    assert reported["bits_per_byte"] == pytest.approx(nats / math.log(2) / 600, rel=1e-6)


def test_generate_takes_the_tokens_that_the_exported_model_takes(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, exported = folders
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    # What was trained here saw an end-of-text before every document.
    prompt = tokenizer("<|endoftext|>You may", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]

    figures = tmp_path / "figures.json"
    options = ["--checkpoint", str(checkpoint), "--json", str(figures)]
    greedy = ["--temperature", "0", "--max-tokens", "16", "--prompt", "You may"]
    assert main(["generate", *greedy, *options]) == 0
    (found,) = json.loads(figures.read_text())["continuations"]
    assert [*prompt.input_ids[0].tolist(), *found["ids"]] == expected.tolist()
    assert "You may" + found["text"] == tokenizer.decode(expected[1:])
