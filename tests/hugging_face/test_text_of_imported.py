"""An imported model sees text as in transformers, after what its tokenizer's template adds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megaspeed.cli import main
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from tests.hugging_face.models import llama, saved
from tests.hugging_face.tiny_text import LICENSE, write_tokenizer

TEXT = LICENSE.read_text()[2000:2600]
PROMPT = "You may"
END = 0
BEGIN = 300
"""The last id, which a template puts before a text."""


def imported(root: Path, template: str | None) -> Path:
    """The checkpoint of an imported Llama of 301 ids. Its export is in the same folder."""
    torch.manual_seed(3)
    folder = saved(llama(), root / "theirs")
    tokenizer = Tokenizer.from_file(str(write_tokenizer(root / "tokenizer.json", BEGIN)))
    tokenizer.add_special_tokens(["<s>"])
    assert tokenizer.token_to_id("<s>") == BEGIN
    if template is not None:
        named = [("<s>", BEGIN), ("<|endoftext|>", END)]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=named)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    import_model(folder, root / "ours", verify=False)
    export_model(root / "ours", root / "exported", verify=False)
    return root / "ours"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer puts a token before a text, as Llama's does."""
    return imported(tmp_path_factory.mktemp("begun"), "<s> $A")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer puts a token before a text and one after it."""
    return imported(tmp_path_factory.mktemp("closed"), "<s> $A <|endoftext|>")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer adds nothing, as GPT-2's."""
    return imported(tmp_path_factory.mktemp("bare"), None)


def figures(tmp_path: Path, *command: Any) -> Any:
    """What a command writes to --json."""
    file = tmp_path / "figures.json"
    assert main([*map(str, command), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def likeliest(checkpoint: Path, tmp_path: Path, *options: str) -> Any:
    """The ids of 16 greedy tokens, as `megaspeed generate` writes them."""
    greedy = ["--temperature", 0, "--max-tokens", 16, "--prompt", PROMPT, *options]
    (found,) = figures(tmp_path, "generate", "--checkpoint", checkpoint, *greedy)["continuations"]
    return found["ids"]


def by_transformers(checkpoint: Path, ids: list[int]) -> list[int]:
    """16 greedy tokens after ``ids``, from the exported model. None of them ends the text."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "exported").eval()
    whole = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0].tolist()
    assert len(whole) == len(ids) + 16 and END not in whole[len(ids) :]
    return whole[len(ids) :]


@torch.no_grad()
def loss_by_transformers(checkpoint: Path, ids: list[int]) -> float:
    """Loss of the exported model over disjoint windows. The first id is not predicted."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "exported").eval()
    row, length = torch.tensor(ids), model.config.max_position_embeddings
    nats = 0.0
    for start in range(0, len(ids) - 1, length):
        targets = row[start + 1 : start + length + 1]
        logits = model(row[None, start : start + len(targets)]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return nats / (len(ids) - 1)


def test_generate_takes_the_tokens_of_transformers_with_its_own_tokenizer(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = AutoTokenizer.from_pretrained(begun.parent / "exported")(PROMPT).input_ids
    assert prompt[0] == BEGIN
    expected = by_transformers(begun, prompt)
    assert likeliest(begun, tmp_path) == expected
    reported = "a document begins with <s> (id 300); --opening changes this\n"
    assert capsys.readouterr().err.endswith(reported)
    # The story: it was shown the text alone, and went on otherwise.
    assert by_transformers(begun, prompt[1:]) != expected
    assert likeliest(begun, tmp_path, "--opening", "nothing") == by_transformers(begun, prompt[1:])


def test_evaluate_computes_the_loss_of_transformers_with_its_own_tokenizer(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = AutoTokenizer.from_pretrained(begun.parent / "exported")(TEXT).input_ids
    assert ids[0] == BEGIN
    (text := tmp_path / "a.txt").write_text(TEXT)
    found = figures(tmp_path, "evaluate", text, "--checkpoint", begun)
    assert "a document begins with <s> (id 300)" in capsys.readouterr().err
    assert (found["opening"], found["tokens"]) == ([BEGIN], len(ids) - 1)
    assert found["loss"] == pytest.approx(loss_by_transformers(begun, ids), rel=1e-6)

    ended = figures(tmp_path, "evaluate", text, "--checkpoint", begun, "--opening", "end-of-text")
    expected = loss_by_transformers(begun, [END, *ids[1:]])
    assert ended["loss"] == pytest.approx(expected, rel=1e-6) != found["loss"]


def test_ids_that_a_template_puts_after_a_text_are_ignored(
    begun: Path, closed: Path, tmp_path: Path
) -> None:
    assert AutoTokenizer.from_pretrained(closed)("a").input_ids[-1] == END
    assert likeliest(closed, tmp_path) == likeliest(begun, tmp_path)
    (text := tmp_path / "a.txt").write_text(TEXT)
    one, other = (
        figures(tmp_path, "evaluate", text, "--checkpoint", checkpoint)
        for checkpoint in (begun, closed)
    )
    assert {**one, "checkpoint": ""} == {**other, "checkpoint": ""}


def test_without_a_template_nothing_opens_a_prompt_and_an_end_of_text_a_document(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = AutoTokenizer.from_pretrained(bare.parent / "exported")(PROMPT).input_ids
    found = likeliest(bare, tmp_path)
    assert capsys.readouterr().err == (
        "a document begins with nothing, but an empty prompt with <|endoftext|> (id 0); "
        "--opening changes this\n"
    )
    assert found == by_transformers(bare, ids)
    greedy = ["--temperature", 0, "--max-tokens", 16]
    found = figures(tmp_path, "generate", "--checkpoint", bare, *greedy)
    assert found["continuations"][0]["ids"] == by_transformers(bare, [END])
    (text := tmp_path / "a.txt").write_text(PROMPT)
    found = figures(tmp_path, "evaluate", text, "--checkpoint", bare)
    assert "a document begins with <|endoftext|> (id 0)" in capsys.readouterr().err
    assert found["loss"] == pytest.approx(loss_by_transformers(bare, [END, *ids]), rel=1e-6)
