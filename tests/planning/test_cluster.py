"""The machines that a user states."""

import pytest

from megaspeed.config.errors import ConfigError
from megaspeed.planning.cluster import read_cluster


def test_what_is_omitted_is_as_usual() -> None:
    read = read_cluster({"device": "h100-80gb", "nodes": 8, "nic_gbps": None})
    assert (read.device, read.nodes, read.gpus_per_node, read.gpus) == ("h100-80gb", 8, 8, 64)
    cluster = read_cluster({"device": "a100-80gb"}).cluster()
    assert cluster is not None and cluster.network_bandwidth == 25  # the vendor's
    cluster = read_cluster({"device": "a100-80gb", "nic_gbps": 100}).cluster()
    assert cluster is not None and cluster.network_bandwidth == 12.5  # 100 Gb/s in GB/s
    assert read_cluster({}).cluster() is None


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        read_cluster({"nodes": 0, "nics": 400, "gpus_per_node": "8"})
    assert len(error.value.problems) == 3
    text = str(error.value)
    assert "nics is an unknown key; the keys of a cluster are device, nodes" in text
    assert "nodes: given 0" in text and 'gpus_per_node: given "8"' in text
    with pytest.raises(ConfigError, match="no device called 'h100'; the nearest is h100-"):
        read_cluster({"device": "h100"})
