"""An export has files of the requested size and a tokenizer, and is complete or absent."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import (
    LARGEST_PIECE_BYTES,
    ROUTER_BIAS,
    Piece,
    expected_tensors,
    key,
)
from megaspeed.checkpoint.writing import write_checkpoint as write_pieces
from megaspeed.cli import main
from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.hugging_face import exporting
from megaspeed.hugging_face.exporting import Precision, StockModel, export_model
from megaspeed.hugging_face.importing import _rows_of, import_model
from megaspeed.hugging_face.model_card import model_card
from megaspeed.hugging_face.weights import HuggingFaceError, StoredTensor, TensorPart
from megaspeed.model.gpt import SwiGluMlp
from tests.checkpoint.written import CONFIG, run_state, write_checkpoint
from tests.hugging_face.models import (
    END_OF_TEXT,
    llama,
    mixtral,
    same,
    saved,
    weights_in,
    with_tokenizer,
)
from tests.support.command import lacking
from tests.support.forked import run_forked
from tests.support.tiny import MOE, tiny_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of an untied Llama without a tokenizer. Tests must not change it."""
    root = tmp_path_factory.mktemp("llama")
    import_model(saved(llama(), root / "hf"), root / "checkpoint")
    return root / "checkpoint"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return the folder of a run that has saved steps 100 and 200."""
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for step in (100, 200):
        write_checkpoint(folder, step)
    return tmp_path / "run"


def test_one_file_if_one_suffices(checkpoint: Path, tmp_path: Path) -> None:
    reported: list[str] = []
    export_model(checkpoint, tmp_path / "out", report=reported.append)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert reported[:2] == [
        f"{tmp_path / 'out'}: 34,784 parameters, float32, in 1 file, from {checkpoint}",
        "tokenizer: none; name one with --tokenizer",
    ]


@pytest.mark.parametrize("experts", [False, True], ids=["tied", "experts"])
def test_a_model_of_several_files_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: bool
) -> None:
    """Each expert is a tensor. A file never has all experts of a block."""
    stock = mixtral() if experts else llama(tie_word_embeddings=True)
    folder = saved(stock, tmp_path / "hf")
    import_model(folder, tmp_path / "checkpoint", verify=False)
    monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", 20_000)
    export_model(tmp_path / "checkpoint", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {name: file for name, file in index["weight_map"].items() if "layers.0.block" in name}
    assert len(set(files.values())) > 1 or not experts
    assert same(weights_in(tmp_path / "out"), weights_in(folder))


def test_files_are_no_larger_than_the_limit_but_for_one_tensor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(checkpoint, tmp_path / "whole")
    monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", 20_000)
    export_model(checkpoint, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 34_784
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]
    assert set(index["weight_map"].values()) == set(files)
    for name in files:
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / "x.safetensors").write_bytes((tmp_path / "out" / name).read_bytes())
        held = weights_in(tmp_path / "one")
        assert held.keys() == {key for key, file in index["weight_map"].items() if file == name}
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 20_000
    assert same(weights_in(tmp_path / "out"), weights_in(tmp_path / "whole"))


def test_a_precision_is_the_rounded_master_weights(checkpoint: Path, tmp_path: Path) -> None:
    export_model(checkpoint, tmp_path / "exact")
    export_model(checkpoint, tmp_path / "out", precision="bfloat16")
    exact = weights_in(tmp_path / "exact")
    rounded = {name: tensor.bfloat16() for name, tensor in exact.items()}
    assert same(weights_in(tmp_path / "out"), rounded)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert stock.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [(), ("--no-verify",)], ids=["verified", "not verified"])
@pytest.mark.parametrize(
    ("precision", "value", "numbers"),
    [
        ("float16", 1e5, ["65,504", " 100,000;", "--dtype float32"]),
        ("bfloat16", 3.4e38, ["3.38953e+38", " 3.4e+38;", "--dtype float32"]),
    ],
)
def test_a_weight_beyond_a_precision_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    precision: str,
    value: float,
    numbers: list[str],
    options: tuple[str, ...],
) -> None:
    """No prompt of the comparison has these tokens, so the comparison would not notice them."""
    stock = llama()
    stock.get_input_embeddings().weight.data[7, 3:5] = value
    import_model(saved(stock, tmp_path / "hf"), tmp_path / "checkpoint", verify=False)
    capsys.readouterr()
    command = ["export-hf", str(tmp_path / "checkpoint"), str(tmp_path / "out"), *options]
    assert main([*command, "--dtype", precision]) == 2
    name = f"model.embed_tokens.weight of {tmp_path / 'checkpoint'}"
    out, err = capsys.readouterr()
    assert out == "" and lacking(err, precision, name, "2 of the 9,632 values", *numbers) == []
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "checkpoint"}
    export_model(tmp_path / "checkpoint", tmp_path / "out", verify=False)
    assert same(weights_in(tmp_path / "out"), weights_in(tmp_path / "hf"))


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_has_diverged_is_refused_in_every_precision(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    precision: Precision,
) -> None:
    """transformers would load it, but it could not be imported again."""

    def rows_of(tensor: StoredTensor, rows: slice, part: TensorPart) -> Tensor:
        values = _rows_of(tensor, rows, part)
        return values + torch.tensor([value, *[0.0] * 31]) if "k_proj" in part.theirs else values

    monkeypatch.setattr("megaspeed.hugging_face.importing._rows_of", rows_of)
    diverged = tmp_path / "diverged"
    import_model(checkpoint.parent / "hf", diverged, verify=False)
    with pytest.raises(HuggingFaceError) as caught:
        export_model(diverged, tmp_path / "out", precision=precision, verify=False)
    name = f"model.layers.0.self_attn.k_proj.weight of {diverged}"
    assert lacking(caught.value, name, "16 of the 512 values", "use an earlier checkpoint") == []
    assert list(tmp_path.iterdir()) == [diverged]


def test_a_run_folder_gives_its_newest_checkpoint_with_the_true_vocabulary(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    newest, figures = run_folder / "checkpoints" / "step-00000200", tmp_path / "figures.json"
    losses = {100: 6.5, 180: 4.375, 220: 4.125}
    lines = [{"step": step, "validation_loss": loss} for step, loss in losses.items()]
    (run_folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert main(["export-hf", str(run_folder), str(out), "--json", str(figures)]) == 0
    reported = capsys.readouterr()
    assert (
        f" from {newest}\n" in reported.out and "verified: " in reported.out and reported.err == ""
    )
    assert json.loads(figures.read_text())["checkpoint"] == str(newest)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "license" not in card
    facts = dict(re.findall(r"^\| (.*?) +\| +(.*?) \|$", card, re.MULTILINE))
    assert facts["steps"] == "200" and facts["tokens"] == f"{256 * 200:,}"
    assert facts["training loss of the last step (nats a token)"] == "4.2500"
    assert facts["validation loss after step 180 (nats a token)"] == "4.3750"
    assert card.count("validation loss") == 1
    assert facts["torch"] == torch.__version__
    state = json.loads(card.partition("```json\n")[2].partition("\n```\n")[0])
    complete = json.loads((newest / "run_state.json").read_text())
    del complete["progress"]["recent"]  # the losses and norms of the last steps, on many lines
    assert state == complete
    newest.rename(tmp_path / "alone")  # a checkpoint without a run has no validation loss
    assert b"validation loss" not in model_card(tmp_path / "alone", "a", "b")
    (tmp_path / "alone").rename(newest)
    assert main(["export-hf", str(newest), str(out) + "2"]) == 0
    assert same(weights_in(out), weights_in(Path(str(out) + "2")))
    stock = AutoModelForCausalLM.from_pretrained(out)
    assert stock.config.vocab_size == CONFIG.model.vocab_size
    assert stock.get_output_embeddings().weight.shape[0] == CONFIG.model.vocab_size
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight


@pytest.mark.parametrize("place", ["", "tokenizer.json"])
def test_a_tokenizer_can_be_named(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "tokens").mkdir()
    named = with_tokenizer(tmp_path / "tokens") / place
    figures = tmp_path / "figures.json"
    command = ["export-hf", str(run_folder), str(tmp_path / "out"), "--tokenizer", str(named)]
    assert main([*command, "--json", str(figures)]) == 0
    agreement = json.loads(figures.read_text())["agreement"]
    assert agreement["difference"] <= agreement["tolerance"] < 1e-8
    assert "tokenizer: tokenizer.json, tokenizer_config.json" in capsys.readouterr().out
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokens")
    text = f"not to be{END_OF_TEXT}"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == 0


def test_a_file_that_is_not_a_tokenizer_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no"):
        export_model(checkpoint, tmp_path / "out", tokenizer=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_is_reported_in_a_sentence(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, reported in (
        (["export-hf", str(tmp_path / "nowhere"), str(tmp_path / "out")], "does not exist"),
        (["export-hf", str(checkpoint), str(tmp_path)], "exists already"),
        (["import-hf", str(tmp_path), str(tmp_path / "out")], "there is no config.json"),
        (["import-hf", str(checkpoint.parent / "hf"), str(tmp_path)], "exists already"),
    ):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert reported in err and "Traceback" not in err and out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_disagreement_is_a_failure(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SwiGluMlp, "forward", lambda mlp, x: mlp.down(mlp.gate_up(x)[..., :48]))
    for command in (
        ["import-hf", str(checkpoint.parent / "hf"), str(tmp_path / "out")],
        ["export-hf", str(checkpoint), str(tmp_path / "out")],
    ):
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert "transformers and megaspeed disagree: on a prompt of" in err and out == ""
    assert list(tmp_path.iterdir()) == []
    assert main([*command, "--no-verify"]) == 0


FULL_DISK = """
import resource, sys
from megaspeed.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("room", [2_000, 100_000], ids="{} bytes".format)
def test_a_disk_that_fills_up_is_reported_and_no_file_is_left(
    checkpoint: Path, tmp_path: Path, room: int
) -> None:
    """The system refuses to let any file grow further, as a full disk does."""
    (tmp_path / "full_disk.py").write_text(FULL_DISK)
    folder = tmp_path / "folder"
    folder.mkdir()
    command = ["export-hf", str(checkpoint), str(folder / "out"), "--no-verify"]
    done = run_forked([tmp_path / "full_disk.py", str(room), *command], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "model.safetensors cannot be written (" in done.stderr
    assert done.stderr.endswith("make room on its disk\n")
    assert list(folder.iterdir()) == []


LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "vocab_size": 4000,
}
ROOT = Path(__file__).parents[2]
MEASURED = """
import sys
from pathlib import Path
from transformers import LlamaConfig
from megaspeed.hugging_face import exporting
from megaspeed.hugging_face.importing import import_model
from tests.support.memory import added, peak

folder, checkpoint, out = map(Path, sys.argv[1:4])
LlamaConfig()  # loads modules, which stay
exporting.MAX_SHARD_BYTES = int(sys.argv[4])
lines = []
imported = added(lambda: import_model(folder, checkpoint, verify=False))
export = lambda: exporting.export_model(checkpoint, out, verify=False, report=lines.append)
print(imported, added(export), peak())
print(lines[0])
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
def test_memory_is_bounded_by_one_file_and_not_by_the_model(tmp_path: Path) -> None:
    """An import maps the file that it reads, which counts as memory, and holds one piece."""
    shard_bytes, slack = 16_000_000, 12_000_000
    stock = llama(**LARGE)
    model_bytes = 4 * sum(math.prod(parameter.shape) for parameter in stock.parameters())
    assert model_bytes > 3 * (shard_bytes + slack)
    folder = saved(stock, tmp_path / "hf", max_shard_size=shard_bytes)
    arguments = [str(folder), str(tmp_path / "checkpoint"), str(tmp_path / "out"), str(shard_bytes)]
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    numbers, line = done.stdout.splitlines()
    imported, exported, peak = map(int, numbers.split())
    predicted = re.fullmatch(
        r"writing \d+ files, one after the other, takes about ([\d.]+) MiB of memory", line
    )
    assert predicted is not None and abs(float(predicted[1]) * 2**20 - peak) < slack
    assert imported < shard_bytes + LARGEST_PIECE_BYTES + slack
    assert exported < shard_bytes + slack
    assert same(weights_in(folder), weights_in(tmp_path / "out"))


@pytest.mark.parametrize(
    "changes", [{"mlp": "gelu"}, {"qk_norm": True}, {"qkv_bias": True}], ids=str
)
def test_a_feature_that_the_family_lacks_is_refused_before_anything_is_written(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
) -> None:
    """The checkpoint is of a run with a feature that transformers' Llama does not have."""
    model = RunState.read(checkpoint).model_section().model_dump() | changes
    changed = SimpleNamespace(model_section=lambda: ModelConfig.model_validate(model))
    monkeypatch.setattr(exporting, "RunState", SimpleNamespace(read=lambda _: changed))
    monkeypatch.setattr(exporting, "new_model_folder", lambda *_: pytest.fail("it continued"))
    assert main(["export-hf", str(checkpoint), str(tmp_path / "out")]) == 2
    (name,) = changes
    assert f"1. model.{name} is {changes[name]}, but LlamaForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bias", [0.0, 0.25])
def test_a_router_bias_other_than_zero_cannot_be_exported(tmp_path: Path, bias: float) -> None:
    run = tiny_run(ROOT / "LICENSE", model={**MOE, "router_bias_rate": 0.01})
    tensors = expected_tensors(run.config.model, "AdamW")
    biased = key(ROUTER_BIAS, "blocks.2.mlp.router")
    assert biased in tensors
    pieces = [
        Piece(name, shape, (0,) * len(shape), torch.full(shape, bias if name == biased else 0.0))
        for name, shape in tensors.items()
    ]
    write_pieces(tmp_path, pieces, run_state(1, config=run.as_json()), {})
    if bias == 0.0:  # as before the first step
        assert StockModel(tmp_path, tokenizer=None, precision="float32").parts
        return
    with pytest.raises(HuggingFaceError, match="has a bias for the choice of experts"):
        StockModel(tmp_path, tokenizer=None, precision="float32")
