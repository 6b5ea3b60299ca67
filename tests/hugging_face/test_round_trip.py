"""Import and export together change nothing: no bit of a weight, no config, no tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megaspeed.checkpoint.inspection import inspect
from megaspeed.checkpoint.reading import load_model
from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.hugging_face import read_model_section
from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from tests.hugging_face.models import (
    MODELS,
    gpt2,
    llama,
    same,
    saved,
    weights_in,
    with_tokenizer,
)
from tests.model.tiny_gpt import NEAR_TIE, smallest_gap

pytestmark = pytest.mark.slow

Make = Callable[[], PreTrainedModel]


def shape_of(folder: Path) -> ModelConfig:
    """Return the model that a folder's config.json describes."""
    return ModelConfig.model_validate(read_model_section(str(folder)))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_there_and_back_is_the_same_to_the_last_bit(make: Make, tmp_path: Path) -> None:
    stock = make()
    folder = saved(stock, tmp_path / "hf")
    reported: list[str] = []
    import_model(folder, tmp_path / "checkpoint", report=reported.append)
    assert reported[-1].startswith("verified: the logits of 96 tokens differ by at most ")
    assert inspect(tmp_path / "checkpoint").problems == ()
    export_model(tmp_path / "checkpoint", tmp_path / "back", report=reported.append)
    assert reported[-1].startswith("verified: ")
    assert same(weights_in(folder), weights_in(tmp_path / "back"))
    assert shape_of(folder) == shape_of(tmp_path / "back")


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_ours_and_the_exported_one_have_the_logits_of_the_first(make: Make, tmp_path: Path) -> None:
    """This is a plain comparison, without our verification."""
    stock = make()
    import_model(saved(stock, tmp_path / "hf"), tmp_path / "checkpoint", verify=False)
    export_model(tmp_path / "checkpoint", tmp_path / "back", verify=False)
    again, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(301, (2, 96), generator=torch.Generator().manual_seed(141))
    ours = load_model(tmp_path / "checkpoint")
    assert smallest_gap(ours, tokens) > NEAR_TIE
    with torch.no_grad():
        expected = stock(tokens).logits
        for logits in (
            ours(tokens),
            again(tokens).logits,
        ):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_goes_with_it_and_an_export_adds_what_batches_need(tmp_path: Path) -> None:
    folder = with_tokenizer(saved(gpt2(), tmp_path / "hf"))
    import_model(folder, tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "back")
    words, config = "tokenizer.json", "tokenizer_config.json"
    for name in (words, config):
        assert (tmp_path / "checkpoint" / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "back" / words).read_bytes() == (folder / words).read_bytes()
    before, after = (
        json.loads((each / config).read_text()) for each in (folder, tmp_path / "back")
    )
    batches = {"pad_token": "<|endoftext|>", "padding_side": "left", "model_max_length": 96}
    assert after == {**before, **batches}
    theirs, ours = map(AutoTokenizer.from_pretrained, (folder, tmp_path / "back"))
    text = "Ought it to be so? Öh, not to be."
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for names in (stock.config, stock.generation_config):
        assert names.eos_token_id == names.bos_token_id == theirs.eos_token_id == 0


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_becomes_fp32_masters_and_the_same_halves_again(
    tmp_path: Path, precision: str
) -> None:
    dtype = getattr(torch, precision)
    folder = saved(llama().to(dtype), tmp_path / "hf")
    import_model(folder, tmp_path / "checkpoint")
    masters = load_model(tmp_path / "checkpoint").state_dict()
    assert all(torch.equal(master, master.to(dtype).float()) for master in masters.values())
    export_model(tmp_path / "checkpoint", tmp_path / "back", precision=precision)  # type: ignore[arg-type]
    assert same(weights_in(folder), weights_in(tmp_path / "back"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype == dtype


def test_dropout_positions_and_epsilon_are_kept(tmp_path: Path) -> None:
    stock = gpt2(embd_pdrop=0.25, attn_pdrop=0.5, resid_pdrop=0.0, layer_norm_epsilon=1e-3)
    import_model(saved(stock, tmp_path / "hf"), tmp_path / "checkpoint")
    model = RunState.read(tmp_path / "checkpoint").model_section()
    assert (model.embedding_dropout, model.attention_dropout, model.residual_dropout) == (
        0.25,
        0.5,
        0.0,
    )
    assert (model.layer_norm_epsilon, model.max_position_embeddings) == (1e-3, 96)
