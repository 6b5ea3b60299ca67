"""A rank's report about its own machine, and about its connection to the next rank."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megaspeed.doctor.examination import connect_to_next
from megaspeed.doctor.record import Record, take_record
from megaspeed.topology.launch import read_launch_environment
from tests.support.launched import free_port
from tests.support.tiny import GPT2

TEXT = Path(__file__).parents[2] / "LICENSE"
# Output of ``nvidia-smi --query-gpu=driver_version --format=csv,noheader`` for two GPUs.
NVIDIA_SMI = "#!/bin/sh\necho 535.104.05\necho 535.104.05\n"


def own_record(folder: Path) -> Record:
    """Return the record of a run of one process."""
    config = folder / "run.json"
    data = {"train": [str(TEXT)], "validation_fraction": 0, "sequence_length": 16}
    config.write_text(json.dumps({"model": GPT2, "data": data, "train_batch_size": 4}))
    record, _ = take_record(config, [], read_launch_environment({}), 60)
    return Record.of_json(json.loads(json.dumps(asdict(record))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")
@pytest.mark.parametrize(("visible", "named"), [(None, True), ("0", True), ("", False)])
def test_a_gpu_that_torch_cannot_use_is_a_problem_unless_the_cpu_is_meant(
    visible: str | None, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reported = own_record(tmp_path).unusable_gpu
    assert (reported is not None) == named
    if reported is not None:
        built = torch.version.cuda or "the CPU only"
        assert f"{built}, and the driver's version is 535.104.05." in reported


def test_a_record_states_this_boot_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    record = own_record(tmp_path)
    assert len(record.boot) == 36 and record.boot == own_record(tmp_path).boot


def test_a_machine_that_listens_at_a_loopback_address_is_named_and_not_the_firewall() -> None:
    """Rank 2 cannot reach rank 0. Rank 0's machine sent the address of its own name, 127.0.1.1."""
    first_ranks = [(0, "127.0.1.1", free_port()), (2, "127.0.0.1", free_port())]
    assert connect_to_next(1, first_ranks, 5) is None, "only the first rank of a machine connects"
    found = connect_to_next(2, first_ranks, 5)
    assert found is not None and found[0] == 0
    assert "MASTER_ADDR resolves to a loopback address there (127.0.1.1)" in found[1]
    assert "firewall" not in found[1]
