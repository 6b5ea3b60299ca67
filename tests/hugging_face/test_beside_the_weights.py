"""Imports and exports of every kind of tokenizer, and of the settings for generation."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megaspeed.checkpoint.inspection import inspect
from megaspeed.cli import main
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import NoEndOfText, load_tokenizer
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.weights import HuggingFaceError
from tests.hugging_face.models import change_config, gpt2, llama, phi3, saved, with_tokenizer
from tests.support.command import lacking

OTHERWISE = "name another with --tokenizer, or omit it with --no-tokenizer"
SAMPLING = {
    "bos_token_id": 0,
    "eos_token_id": [0, 7, 9],
    "pad_token_id": 7,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a GPT-2 without a tokenizer."""
    return saved(gpt2(), tmp_path / "hf")


def there_and_back(folder: Path, **named: Path) -> tuple[Path, list[str]]:
    """Import and export a model. Return the export, and all reported lines.

    Args:
        folder: the folder of the model.
        named: a tokenizer that the user names for "the_import" or "the_export".
    """
    reported: list[str] = []
    checkpoint, out = folder.with_name("checkpoint"), folder.with_name("out")
    options: dict[str, Any] = {"verify": False, "report": reported.append}
    import_model(folder, checkpoint, tokenizer=named.get("the_import"), **options)
    assert inspect(checkpoint).problems == ()
    export_model(checkpoint, out, tokenizer=named.get("the_export"), **options)
    return out, reported


def stated(folder: Path, name: str) -> dict[str, Any]:
    """Return the keys of a JSON file."""
    keys: dict[str, Any] = json.loads((folder / name).read_text())
    return keys


# --- tokenizers -----------------------------------------------------------------------------------


def test_a_tokenizer_whose_end_of_text_is_not_known_goes_with_its_model(folder: Path) -> None:
    with_tokenizer(folder)
    tokenizer = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<over>")
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(NoEndOfText, match="has none of"):
        load_tokenizer(str(folder))
    out, reported = there_and_back(folder)
    remarks = [
        line for line in reported if line.startswith("tokenizer: tokenizer.json, tokenizer_co")
    ]
    assert len(remarks) == 2
    for remark in remarks:
        assert "; no text can be prepared with it as it is: a document must end with" in remark
        assert "name its eos_token in" in remark
    assert (out / "tokenizer.json").read_text() == tokenizer
    theirs, ours = map(AutoTokenizer.from_pretrained, (folder, out))
    assert ours("not to be")["input_ids"] == theirs("not to be")["input_ids"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\xff"], ids=["cut", "list", "bytes"])
def test_a_damaged_tokenizer_config_is_reported_everywhere(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    with_tokenizer(folder)
    # The first of the two files that names the end of text is used.
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(folder))
    assert str(caught.value).startswith(f"{folder / name} ")
    assert str(caught.value).endswith(
        "copy it again from the source of the tokenizer, or remove it"
    )
    out = folder.with_name("out")
    assert main(["import-hf", str(folder), str(out)]) == 2
    assert capsys.readouterr() == ("", f"{caught.value}; or {OTHERWISE}\n")
    assert not out.exists()


def test_a_tokenizer_without_entries_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    out = folder.with_name("out")
    assert main(["import-hf", str(folder), str(out)]) == 2
    assert lacking(capsys.readouterr().err, f"{folder} has none", OTHERWISE) == []
    assert not out.exists()


def test_an_import_works_with_another_tokenizer_or_without(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer beside the model has more tokens than the model has rows."""
    named = folder.with_name("tokens")
    named.mkdir()
    with_tokenizer(named)
    loaded = AutoTokenizer.from_pretrained(named)
    loaded.add_tokens([f"<extra {number}>" for number in range(100)])
    loaded.save_pretrained(folder)
    command = ["import-hf", str(folder), str(folder.with_name("checkpoint")), "--no-verify"]
    assert main(command) == 2
    assert OTHERWISE in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(named)]) == 0
    assert "\ntokenizer: tokenizer.json, tokenizer_config.json\n" in capsys.readouterr().out
    carried = load_tokenizer(str(folder.with_name("checkpoint")))
    assert carried.fingerprint == load_tokenizer(str(named)).fingerprint
    command[2] = str(folder.with_name("without"))
    assert main([*command, "--no-tokenizer"]) == 0
    assert "\ntokenizer: none\n" in capsys.readouterr().out
    assert not (folder.with_name("without") / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("own", "generation", "pad", "limit"),
    [
        ({}, {}, "<|endoftext|>", 96),
        ({"model_max_length": 64}, {"pad_token_id": 7}, "'", 64),
        ({"pad_token": "!", "model_max_length": 10**30, "padding_side": "right"}, {}, "!", 96),
        ({"pad_token": "!"}, {"pad_token_id": 7}, "!", 96),
        ({"pad_token": None}, {"pad_token_id": -1}, "<|endoftext|>", 96),
        ({"pad_token": "[PAD]", "model_max_length": "long"}, {}, "<|endoftext|>", 96),
    ],
    ids=["none", "of the model", "its own", "both", "no token", "no entry"],
)
def test_the_token_for_padding_is_one_of_the_vocabulary(
    folder: Path, own: dict[str, Any], generation: dict[str, Any], pad: str, limit: int
) -> None:
    with_tokenizer(folder)
    config = {**stated(folder, "tokenizer_config.json"), "model_max_length": None, **own}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    out, _ = there_and_back(folder)
    ours = AutoTokenizer.from_pretrained(out)
    entries = load_tokenizer(str(folder)).vocab_size
    assert (ours.pad_token, ours.model_max_length, len(ours)) == (pad, limit, entries)
    assert ours.padding_side == own.get("padding_side", "left")
    added = {"pad_token_id": ours.pad_token_id} | generation
    assert stated(out, "generation_config.json")["pad_token_id"] == added["pad_token_id"]
    assert stated(out, "config.json").get("pad_token_id") == generation.get("pad_token_id")
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


# --- how a text is continued ----------------------------------------------------------------------


def test_how_a_model_samples_and_ends_comes_back(folder: Path) -> None:
    with_tokenizer(folder)
    GenerationConfig(**SAMPLING).save_pretrained(folder)
    change_config(folder, eos_token_id=[0, 7, 9])
    before = stated(folder, "generation_config.json")
    out, _ = there_and_back(folder)
    assert stated(out, "generation_config.json") == before
    config = stated(out, "config.json")
    assert (config["eos_token_id"], config["pad_token_id"]) == ([0, 7, 9], 7)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.eos_token_id == [0, 7, 9]
    assert {key: getattr(loaded.generation_config, key) for key in SAMPLING} == SAMPLING


def test_ids_that_only_config_json_states_come_back(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, bos_token_id=3, eos_token_id=[3, 4])
    out, _ = there_and_back(folder)
    for name in ("config.json", "generation_config.json"):
        assert (stated(out, name)["bos_token_id"], stated(out, name)["eos_token_id"]) == (3, [3, 4])


@pytest.mark.parametrize("at", ["the_import", "the_export"])
def test_the_ids_of_a_named_tokenizer_count(folder: Path, at: str) -> None:
    GenerationConfig(**{**SAMPLING, "eos_token_id": [5, 6]}).save_pretrained(folder)
    named = folder.with_name("tokens")
    named.mkdir()
    out, _ = there_and_back(folder, **{at: with_tokenizer(named)})
    keys = stated(out, "generation_config.json")
    assert (keys["eos_token_id"], keys["temperature"]) == (0, 0.6)
    assert stated(out, "config.json")["eos_token_id"] == 0


def test_a_damaged_generation_config_is_reported(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(
        HuggingFaceError, match=r"generation_config\.json is not JSON: .*fetch it a"
    ):
        there_and_back(folder)


def test_settings_that_transformers_refuses_are_refused_at_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = saved(llama(), tmp_path / "hf"), tmp_path / "out"
    (folder / "generation_config.json").write_text('{"max_new_tokens": 0}')
    assert main(["import-hf", str(folder), str(out)]) == 2
    reported = capsys.readouterr().err
    assert lacking(reported, f"transformers cannot load {folder}", "max_new_tokens") == []
    assert not out.exists()


def test_sampling_settings_of_published_models_are_accepted(folder: Path) -> None:
    """transformers warns of them, but loads and saves them."""
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    out, _ = there_and_back(folder)
    assert stated(out, "generation_config.json")["temperature"] == 0.6


def test_a_vocabulary_without_the_familys_padding_is_exported(tmp_path: Path) -> None:
    """Phi-3's config class has an id for padding that a small vocabulary does not have."""
    folder = saved(phi3(), tmp_path / "hf")
    out, _ = there_and_back(folder)
    assert AutoModelForCausalLM.from_pretrained(out).config.pad_token_id is None
