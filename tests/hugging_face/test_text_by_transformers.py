"""Both commands compute for a checkpoint what stock transformers computes for its export.

A model that was trained here has an end-of-text before each document. An imported model has the
tokens that its tokenizer's template puts before a text. Tokens that a template puts after a text
are ignored.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from tests.hugging_face.models import llama, saved
from tests.hugging_face.tiny_text import LICENSE, checkpoint_of_text, write_tokenizer
from tests.support.command import figures

TEXT = LICENSE.read_text()[2000:2600]
PROMPT = "You may"
GREEDY = ("--temperature", 0, "--max-tokens", 16)
END = 0
BEGIN = 300
"""The last id, which a template puts before a text."""

TEMPLATES = {"begun": "<s> $A", "closed": "<s> $A <|endoftext|>", "bare": None}
"""Templates of imported tokenizers: Llama's, one that also adds an end, and GPT-2's."""


def imported(root: Path, template: str | None) -> Path:
    """Return the checkpoint of an imported Llama of 301 ids."""
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
    return root / "ours"


Models = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function from a model to (checkpoint, its export), which are created once."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            root = tmp_path_factory.mktemp("model")
            is_imported = name in TEMPLATES
            checkpoint = (
                imported(root, TEMPLATES[name]) if is_imported else checkpoint_of_text(root)
            )
            export_model(checkpoint, root / "exported", verify=False)
            made[name] = checkpoint, root / "exported"
        return made[name]

    return of


def likeliest(exported: Path, ids: list[int]) -> list[int]:
    """Return 16 greedy tokens of stock transformers after ``ids``. None of them ends the text."""
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    drawn = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0].tolist()
    assert len(drawn) == len(ids) + 16 and END not in drawn[len(ids) :]
    return drawn[len(ids) :]


@torch.no_grad()
def loss_of(exported: Path, ids: list[int]) -> float:
    """Return stock transformers' loss over disjoint windows. The first id is not predicted."""
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    row, length = torch.tensor(ids), model.config.max_position_embeddings
    nats = 0.0
    for start in range(0, len(ids) - 1, length):
        targets = row[start + 1 : start + length + 1]
        logits = model(row[None, start : start + len(targets)]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return nats / (len(ids) - 1)


# model -> the ids before a document
OPENINGS: dict[str, list[int]] = {
    "trained here": [END],
    "begun": [BEGIN],
    "closed": [BEGIN],
    "bare": [],
}


@pytest.mark.parametrize(("name", "before"), OPENINGS.items())
def test_generate(models: Models, tmp_path: Path, name: str, before: list[int]) -> None:
    checkpoint, exported = models(name)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(PROMPT, add_special_tokens=False).input_ids
    command = ["generate", "--checkpoint", checkpoint, *GREEDY]
    found = figures(tmp_path, *command, "--prompt", PROMPT)
    assert found["opening"] == before
    assert found["continuations"][0]["ids"] == likeliest(exported, [*before, *ids])
    assert found["continuations"][0]["text"] == tokenizer.decode(likeliest(exported, before + ids))
    begun = figures(tmp_path, *command)["continuations"][0]["ids"]
    assert begun == likeliest(exported, before or [END])


@pytest.mark.parametrize(("name", "before"), OPENINGS.items())
def test_evaluate(models: Models, tmp_path: Path, name: str, before: list[int]) -> None:
    checkpoint, exported = models(name)
    ids = AutoTokenizer.from_pretrained(exported)(TEXT, add_special_tokens=False).input_ids
    (text := tmp_path / "a.txt").write_text(TEXT)
    found = figures(tmp_path, "evaluate", text, "--checkpoint", checkpoint)
    assert (found["opening"], found["tokens"], found["bytes"]) == (before, len(ids), 600)
    loss = loss_of(exported, [*(before or [END]), *ids])
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(loss * len(ids) / math.log(2) / 600, rel=1e-6)


def test_the_template_of_transformers_and_the_opening_matter(models: Models) -> None:
    """In an earlier version, an imported model got the text alone, and continued it differently."""
    exported, closed = models("begun")[1], models("closed")[1]
    ids = AutoTokenizer.from_pretrained(exported)(PROMPT).input_ids
    assert ids[0] == BEGIN
    assert AutoTokenizer.from_pretrained(closed)(PROMPT).input_ids == [*ids, END]
    assert likeliest(exported, ids[1:]) != likeliest(exported, ids)


@pytest.mark.parametrize("name", ["trained here", "bare", "begun"])
def test_a_batch_of_prompts_is_continued_as_each_one_alone(models: Models, name: str) -> None:
    """A batch is padded on the left: on the right, the padding would be part of the text."""
    exported = models(name)[1]
    prompts = ["You may", "this License is", "a"]
    greedy = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    pipe = pipeline("text-generation", model=str(exported), device="cpu")
    alone = [pipe(prompt, **greedy)[0]["generated_text"] for prompt in prompts]
    assert [one["generated_text"] for (one,) in pipe(prompts, batch_size=2, **greedy)] == alone
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    drawn = model.generate(**batch, max_new_tokens=8, do_sample=False)
    written = tokenizer.batch_decode(drawn[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert written == alone
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert len(tokenizer) == model.config.vocab_size
    # otherwise fine-tuning would not train the row of the end-of-text
    assert getattr(model.get_input_embeddings(), "padding_idx", None) is None


def test_a_model_that_was_trained_here_begins_a_document(models: Models) -> None:
    model = AutoModelForCausalLM.from_pretrained(models("trained here")[1]).eval()
    assert model.generate(max_new_tokens=1, do_sample=False)[0, 0] == END
