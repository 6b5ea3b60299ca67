"""A rank's report about its own machine."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megaspeed.doctor import record
from megaspeed.doctor.record import Record, take_record
from megaspeed.topology.launch import read_launch_environment
from tests.support.tiny import GPT2

TEXT = Path(__file__).parents[2] / "LICENSE"


def own_record(folder: Path) -> Record:
    """Return the record of a run of one process."""
    config = folder / "run.json"
    data = {"train": [str(TEXT)], "validation_fraction": 0, "sequence_length": 16}
    training = {"steps": 4}
    keys = {"model": GPT2, "data": data, "training": training, "train_batch_size": 4}
    config.write_text(json.dumps(keys))
    own, _ = take_record(config, [], read_launch_environment({}), 60)
    return Record.of_json(json.loads(json.dumps(asdict(own))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")
@pytest.mark.parametrize(("visible", "named"), [(None, True), ("0", True), ("", False)])
def test_a_gpu_that_torch_cannot_use_is_a_problem_unless_the_cpu_is_meant(
    visible: str | None, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_FIRST_GPU", tmp_path)  # exists
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problems = own_record(tmp_path).problems
    assert list(problems) == ["device"] * named
    if named:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        assert f"is built for {build}" in problems["device"]
