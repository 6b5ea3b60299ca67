"""The cluster's JSON, and the options that replace its keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.errors import ConfigError
from megaspeed.planning.cluster import read_cluster


def written(folder: Path, **values: Any) -> Path:
    file = folder / "cluster.json"
    file.write_text(json.dumps(values))
    return file


def test_an_option_replaces_a_key_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, device="h100-80gb", nodes=4, nic_gbps=100)
    read = read_cluster(file, {"nodes": 8, "nic_gbps": None})
    assert (read.device, read.nodes, read.gpus_per_node, read.gpus) == ("h100-80gb", 8, 8, 64)
    cluster = read.cluster()
    assert cluster is not None and cluster.network_bandwidth == 12.5  # 100 Gb/s in GB/s


def test_the_vendors_network_is_assumed(tmp_path: Path) -> None:
    cluster = read_cluster(None, {"device": "a100-80gb"}).cluster()
    assert cluster is not None and cluster.network_bandwidth == 25
    assert read_cluster(None, {}).cluster() is None


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, nodes=0, nics=400, gpus_per_node="8")
    with pytest.raises(ConfigError) as error:
        read_cluster(file, {})
    assert len(error.value.problems) == 3
    text = str(error.value)
    assert str(file) in text
    assert "nics is an unknown key; the keys of a cluster are device, nodes" in text
    assert "nodes: given 0" in text and "write 8 without quotes" in text
    with pytest.raises(ConfigError, match="no device called 'h100'; the nearest is h100-"):
        read_cluster(written(tmp_path, device="h100"), {})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("storage_bandwidth", 0, "wanted at least 1e-06"),
        ("storage_bandwidth", 5e-324, "wanted at least 1e-06"),
        ("restart_seconds", -1, "wanted at least 0"),
        ("failures_per_gpu_hour", "often", "wanted a number"),
        ("failures", 1, "operations.failures is an unknown key"),
    ],
)
def test_impossible_operations_are_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster(written(tmp_path, operations={name: value}), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "object"), ('{"nodes": 1, "nodes": 2}', "duplicate key")],
)
def test_a_file_that_is_no_json_object_is_one_problem(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster(file, {})
    with pytest.raises(ConfigError, match="does not exist"):
        read_cluster(tmp_path / "other.json", {})
