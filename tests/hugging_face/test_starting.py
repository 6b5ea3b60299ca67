"""A run starts from an imported model: its weights, no moments, step 0."""

import json
import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megaspeed.checkpoint.folders import read_tokenizer_files
from megaspeed.checkpoint.inspection import inspect
from megaspeed.checkpoint.reading import load_model
from megaspeed.checkpoint.run_state import Progress, RunState
from megaspeed.checkpoint.tensors import kinds_of
from megaspeed.cli import main
from megaspeed.config.resolve import Run
from megaspeed.hugging_face.importing import import_model
from megaspeed.job import pretrain
from megaspeed.model.parameters import parameters_of
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import generation_file
from tests.checkpoint.saved_runs import SavedRun, started
from tests.hugging_face.models import llama, saved, with_tokenizer
from tests.hugging_face.tiny_text import tiny_tokenizer
from tests.support.rank_pool import RankPool
from tests.support.tiny import MUON, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
ENDS = [0, 7, 9]
State = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untied Llama with a tokenizer and several tokens that end a text."""
    folder = with_tokenizer(saved(llama(), tmp_path_factory.mktemp("llama") / "hf"))
    GenerationConfig(eos_token_id=ENDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    """Return its checkpoint."""
    import_model(folder, folder.parent / "imported")
    return folder.parent / "imported"


def state_after_loading(
    launch: LaunchEnvironment, run: Run, cache: Path, checkpoint: Path
) -> tuple[Progress, State]:
    """Return the state after loading an import into an engine that already has moments."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, tiny_corpus(run, cache), context)
        rank.train_step()
        progress = rank.checkpointing.load(checkpoint)
        return progress, rank.stretch(0).state


@pytest.mark.parametrize(("stage", "optimizer"), [(1, {}), (3, {}), (1, MUON)])
def test_its_weights_are_loaded_and_its_moments_are_zeros(
    pool: RankPool, tmp_path: Path, imported: Path, stage: int, optimizer: dict[str, Any]
) -> None:
    model = RunState.read(imported).model_section().model_dump(mode="json", exclude_none=True)
    run = tiny_run(TEXT, model=model, optimizer=optimizer, zero_optimization={"stage": stage})
    ((progress, state),) = pool.run(1, state_after_loading, run, tmp_path, imported)
    assert progress == Progress()
    expected = load_model(imported).state_dict()
    assert state["weights"].keys() == expected.keys()
    assert all(torch.equal(state["weights"][name], expected[name]) for name in expected)
    for name, parameter in parameters_of(run.config.model).items():
        kinds = kinds_of(parameter, run.config.optimizer.type)
        assert {kind for kind in state if name in state[kind]} == set(kinds)
        assert not any(state[kind][name].any() for kind in kinds[1:])


def job(
    launch: LaunchEnvironment, cache: Path, commands: list[list[str]]
) -> list[tuple[int, str, str]]:
    """Run main jobs one after the other as the only rank. Return (exit code, stdout, stderr) of
    each.
    """
    os.environ["MEGASPEED_CACHE"] = str(cache)
    endings = []
    for command in commands:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = pretrain.main(command)
        endings.append((code, out.getvalue(), err.getvalue()))
    return endings


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> Path:
    """Return the configuration of a run of the model in the folder, with its tokenizer."""
    values = {
        "model": {"from_hf": str(folder)},
        "data": {
            "train": [str(TEXT)],
            "validation_fraction": 0.0,
            "tokenizer": str(folder),
            "sequence_length": 16,
        },
        "training": {"steps": 2, "run_dir": str(tmp_path / "run"), "save_interval": 1},
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path / "config.json"


def test_a_run_starts_from_it_and_its_checkpoints_are_exported_with_their_tokenizer(
    pool: RankPool, tmp_path: Path, config: Path, folder: Path, imported: Path
) -> None:
    """After an interruption, the run resumes from its own checkpoint, not from the import."""
    start = ["--config", str(config), "--resume", str(imported), "--set", "training.steps=1"]
    again = ["--config", str(config)]
    first, second = pool.run(1, job, tmp_path / "cache", [start, again])[0]
    assert first[0] == second[0] == 0, (first, second)
    assert f"starting from {imported}" in first[1].splitlines()
    assert "changed since" not in first[1]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert f"resuming from {checkpoints / 'step-00000001'}" in second[1].splitlines()
    newest = checkpoints / "step-00000002"
    assert inspect(newest).problems == () and RunState.read(newest).optimizer == "AdamW"
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs, ours = map(AutoTokenizer.from_pretrained, (folder, tmp_path / "out"))
    text = "To be trained, or not to be"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert stock.generation_config.eos_token_id == stock.config.eos_token_id == ENDS


def test_another_tokenizer_has_other_ends(tmp_path: Path, imported: Path) -> None:
    own = read_tokenizer_files(imported)
    assert generation_file(imported, own).keys() == {"generation_config.json"}
    other = {"tokenizer.json": tiny_tokenizer(tmp_path).to_json()}
    assert generation_file(imported, other) == generation_file(imported, {}) == {}


def test_another_model_is_refused_by_name(pool: RankPool, config: Path, imported: Path) -> None:
    change = ["--set", "model.rope_theta=500.0"]
    command = ["--config", str(config), "--resume", str(imported), *change]
    (((code, _, err),),) = pool.run(1, job, config.with_name("cache"), [command])
    assert code != 0
    assert f"(imported from {imported.parent / 'hf'}) does not match this run" in err
    assert "model.rope_theta was 10000.0 and is 500.0; set it back, or start a new run" in err
