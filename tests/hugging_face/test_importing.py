"""Every kind of weight file is imported, and errors name what is wrong in it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megaspeed.checkpoint.inspection import inspect
from megaspeed.checkpoint.reading import load_model
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.cli import main
from megaspeed.config.errors import ConfigError
from megaspeed.data.errors import DataError
from megaspeed.hugging_face import verifying
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.weights import HuggingFaceError
from tests.hugging_face.models import (
    change_config,
    gpt2,
    gpt_neox,
    llama,
    phi3,
    same,
    saved,
    weights_in,
    with_tokenizer,
)
from tests.support.command import lacking
from tests.support.memory import added

Weights = dict[str, Tensor]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a GPT-2 in one file. Tests must not change it."""
    return saved(gpt2(), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def right(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return its weights under our names."""
    checkpoint = tmp_path_factory.mktemp("right") / "checkpoint"
    import_model(folder, checkpoint)
    return load_model(checkpoint).state_dict()


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with its config.json and no weights yet."""
    made = tmp_path / "copy"
    made.mkdir()
    (made / "config.json").write_bytes((folder / "config.json").read_bytes())
    return made


def written(weights: Weights, folder: Path, name: str = WEIGHTS) -> Path:
    """Write the weights to one file of a folder. Return the folder."""
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name)
    return folder


def imported(folder: Path, **options: Any) -> Weights:
    """Return the weights of a folder's model after its import."""
    out = folder.parent / "out"
    import_model(folder, out, **options)
    return load_model(out).state_dict()


def test_own_code_by_the_name_of_transformers_class_is_not_needed(tmp_path: Path) -> None:
    """Phi-3's published files name the code that came with them before transformers
    had the class.
    """
    folder = saved(phi3(), tmp_path / "hf")
    code = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    change_config(folder, auto_map=code)
    agreement = import_model(folder, tmp_path / "out")
    assert agreement is not None and agreement.difference < agreement.tolerance


def test_quantized_weights_are_refused_by_their_config(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    out = copy.parent / "out"
    assert main(["import-hf", str(copy), str(out)]) == 2
    keys = '{"quant_method": "gptq", "bits": 4}'
    assert lacking(capsys.readouterr().err, f"quantization_config of {copy}", keys) == []
    assert not out.exists()


# --- kinds of files -------------------------------------------------------------------------------


def test_the_checkpoint_states_its_origin_and_has_no_moments(folder: Path, tmp_path: Path) -> None:
    import_model(folder, tmp_path / "out")
    state = RunState.read(tmp_path / "out")
    assert state.imported_from == str(folder) and state.optimizer is None
    assert (state.data, state.layout, state.training_seed) == (None, None, None)
    assert state.progress.step == 0
    found = inspect(tmp_path / "out")
    assert found.problems == () and found.state is not None
    elements = sum(
        torch.Size(shape).numel() for shape in expected_shapes(found.state.model_section()).values()
    )
    assert found.size_bytes > 4 * elements


def test_a_checkpoint_of_an_import_is_shown_and_verified(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(folder, tmp_path / "out")
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("out  complete (")
    figures = tmp_path / "figures.json"
    assert main(["checkpoint", "show", str(tmp_path / "out"), "--json", str(figures)]) == 0
    reported = capsys.readouterr().out
    assert f"38,176 parameters, imported from {folder}\n" in reported
    assert json.loads(figures.read_text())["run_state"]["imported_from"] == str(folder)


def test_files_with_an_index(copy: Path, folder: Path, right: Weights) -> None:
    weights = weights_in(folder)
    names = {key: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, key in enumerate(weights)}
    for name in set(names.values()):
        written({key: weights[key] for key in weights if names[key] == name}, copy, name)
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert same(imported(copy), right)


def test_names_without_prefix_buffers_and_a_tied_head(
    copy: Path, folder: Path, right: Weights
) -> None:
    """The first GPT-2 files had all of these."""
    weights = weights_in(folder)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    for block in range(2):
        bare[f"h.{block}.attn.bias"] = torch.ones(96, 96).tril()[None, None]
        bare[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    assert same(imported(written(bare, copy)), right)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_gpt_neox_has_two_names(tied: bool, tmp_path: Path) -> None:
    """transformers also reads the name that other families have."""
    stock = gpt_neox(tie_word_embeddings=tied)
    right = imported(saved(stock, tmp_path / "right" / "neox"))
    for name in ("embed_out.weight", "lm_head.weight"):
        folder = saved(stock, tmp_path / name / "neox")
        weights = weights_in(folder)
        head = weights.pop("embed_out.weight", weights["gpt_neox.embed_in.weight"].clone())
        assert same(imported(written({**weights, name: head}, folder)), right)


def test_rotary_buffers_of_older_llamas(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "llama")
    buffer = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    written(weights_in(folder) | buffer, folder)
    assert imported(folder)


def test_large_tensors_are_written_in_many_pieces(
    folder: Path, right: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaspeed.hugging_face.importing.LARGEST_PIECE_BYTES", 1000)
    import_model(folder, tmp_path / "out")
    assert inspect(tmp_path / "out").problems == ()
    assert same(load_model(tmp_path / "out").state_dict(), right)


def test_float64_is_rounded(copy: Path, folder: Path, right: Weights) -> None:
    weights = weights_in(folder)
    name = "transformer.h.0.mlp.c_fc.weight"
    double = {**weights, name: weights[name].double() * (1 + 1e-12)}
    assert same(imported(written(double, copy)), right)


# --- what is refused ------------------------------------------------------------------------------


def refusal(folder: Path, kind: type[Exception] = HuggingFaceError, *, verify: bool = True) -> str:
    """Return the error of an import. Assert that the import leaves no file."""
    out = folder.parent / "refused"
    with pytest.raises(kind) as caught:
        import_model(folder, out, verify=verify)
    assert not out.exists() and not list(folder.parent.glob("*.writing"))
    return str(caught.value)


def test_missing_unexpected_and_misshapen_tensors_are_all_reported(
    copy: Path, folder: Path
) -> None:
    weights = weights_in(folder)
    del weights["transformer.h.1.ln_2.bias"]
    weights["transformer.h.2.ln_1.weight"] = torch.zeros(32)
    weights["transformer.wpe.weight"] = torch.zeros(95, 32)
    weights["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(128, 32)
    weights["transformer.h.0.ln_1.bias"] = torch.zeros(32, dtype=torch.int8)
    reported = refusal(written(weights, copy)).splitlines()
    assert reported == [
        "the weights are not those of the model in config.json:",
        "  transformer.h.1.ln_2.bias is missing",
        "  h.2.ln_1.weight (32) is in model.safetensors, but not in the model",
        "  transformer.wpe.weight is 95 x 32 in model.safetensors, but 96 x 32 in the model",
        "  transformer.h.0.ln_1.bias in model.safetensors is not float64, float32, bfloat16 or "
        "float16",
        "  transformer.h.0.mlp.c_fc.weight is 128 x 32 in model.safetensors, but 32 x 128 in the "
        "model",
        "Download both again, from one revision.",
    ]


def test_a_separate_head_is_not_dropped(copy: Path, folder: Path) -> None:
    weights = weights_in(folder)
    head = weights["transformer.wte.weight"].clone()
    head[-1, -1] += 1
    reported = refusal(written({**weights, "lm_head.weight": head}, copy))
    assert (
        "lm_head.weight differs from the embedding, but tie_word_embeddings in config.json is true"
        in reported
    )


def test_a_tensor_under_both_of_its_names(copy: Path, folder: Path) -> None:
    weights = weights_in(folder)
    reported = refusal(written({**weights, "ln_f.bias": torch.zeros(32)}, copy))
    assert "  ln_f.bias is stored with and without transformer." in reported.splitlines()


def test_damaged_and_missing_files(copy: Path, folder: Path) -> None:
    torch.save(weights_in(folder), copy / "pytorch_model.bin")
    neither = "has neither model.safetensors nor model.safetensors.index.json"
    assert lacking(refusal(copy), neither, "save it again with save_pretrained") == []
    (copy / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    assert f"{copy / WEIGHTS} cannot be read (" in refusal(copy)
    (copy / WEIGHTS).unlink()
    index = copy / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"transformer.wte.weight": "../secret.safetensors"}}')
    assert "lists secret.safetensors, but" in refusal(copy)
    written({"x": torch.zeros(1)}, copy, "secret.safetensors")
    assert (
        "lists 1 tensors that are not in the files it names, for example transformer.wte.w"
        in refusal(copy)
    )
    index.write_text("{}")
    assert "has no weight_map of names and files: incomplete or damaged; fetch it again" in refusal(
        copy
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_is_reported_with_its_tensor(copy: Path, folder: Path, value: float) -> None:
    """It is noticed even without the comparison."""
    weights = weights_in(folder)
    weights["transformer.h.1.ln_2.bias"][3] = value
    reported = refusal(written(weights, copy), verify=False)
    assert reported.startswith(f"transformer.h.1.ln_2.bias in {copy / WEIGHTS} has NaN or infinite")


def test_impossible_paths(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that does not exist and a path below a file are refused before any work."""
    nowhere, file = tmp_path / "nowhere", tmp_path / "file"
    assert main(["import-hf", str(nowhere), str(tmp_path / "out")]) == 2
    assert f"{nowhere}: it does not exist; name a folder" in capsys.readouterr().err
    file.touch()
    assert main(["import-hf", str(folder), str(file / "out")]) == 2
    reported = capsys.readouterr().err
    assert lacking(reported, f"{file / 'out'} cannot be created", f"{file} is a file") == []


def test_a_model_that_ours_cannot_express(folder: Path, copy: Path) -> None:
    written(weights_in(folder), copy)
    change_config(copy, activation_function="relu", n_head=5)
    reported = refusal(copy, ConfigError)
    assert 'activation_function must be "gelu_new"' in reported
    change_config(copy, activation_function="gelu_new")
    reported = refusal(copy, ConfigError)
    assert "model.hidden_size 32 must be divisible by model.num_attention_heads 5" in reported


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [("n_layer", 10**9, "10,000"), ("n_embd", 10**9, "10,000,000"), ("vocab_size", 10**15, "100,")],
)
def test_a_size_that_no_model_has_takes_no_memory(
    folder: Path, copy: Path, key: str, value: int, most: str
) -> None:
    written(weights_in(folder), copy)
    change_config(copy, **{key: value})
    reported: list[str] = []
    assert added(lambda: reported.append(refusal(copy, ConfigError))) < 50_000_000
    assert f"given {value} (a whole number), wanted at most {most}" in reported[0]


@pytest.mark.parametrize("name", ["special_tokens_map.json", "model.bin", "notes"])
def test_a_pipe_among_the_files_of_a_model_is_not_opened(
    folder: Path, copy: Path, name: str
) -> None:
    written(weights_in(folder), copy)
    os.mkfifo(copy / name)
    reported = f"{copy / name} is a named pipe, but must be a file"
    assert reported in refusal(copy, HuggingFaceError)


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    folder = with_tokenizer(saved(gpt2(vocab_size=260), tmp_path / "gpt2"))
    reported = refusal(folder, DataError)
    assert lacking(reported, "is 260", f"{folder}, has 266 entries", "--no-tokenizer") == []


def test_an_existing_output(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        import_model(folder, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_or_memory_is_reported_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "available_memory_bytes", lambda: 1_000)
    with pytest.raises(HuggingFaceError, match=r"1,000 are available; omit the comparison"):
        import_model(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("megaspeed.hugging_face.verifying.free_bytes", lambda folder: 100)
    with pytest.raises(HuggingFaceError, match=r"needs 152,704 bytes, but its disk has 100"):
        import_model(folder, tmp_path / "out", verify=False)
    assert list(tmp_path.iterdir()) == []
