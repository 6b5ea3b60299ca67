"""gloo uses the interface that reaches rank 0, unless the user sets one or none is needed."""

import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import gloo_interface

TWO_NODES = LaunchEnvironment(
    rank=3, world_size=4, local_rank=1, local_world_size=2, source="RANK/WORLD_SIZE"
)
IPV4 = [
    (name, entry.address)
    for name, addresses in psutil.net_if_addrs().items()
    for entry in addresses
    if entry.family == socket.AF_INET and not entry.address.startswith("127.")
]


@pytest.mark.parametrize(("name", "address"), IPV4)
def test_it_is_the_interface_with_the_address_on_the_way(name: str, address: str) -> None:
    """The route to an address of this machine starts at that address."""
    assert gloo_interface(TWO_NODES, {"MASTER_ADDR": address}) == {"GLOO_SOCKET_IFNAME": name}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_a_loopback_address_leaves_the_interface_of_the_default_route(address: str) -> None:
    """Under Debian, a node resolves its own host name to 127.0.1.1. Rank 0's node does so, too."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    default = [line.split()[0] for line in routes if line.split()[1] == "00000000"]
    expected = {"GLOO_SOCKET_IFNAME": default[0]} if default else {}
    assert gloo_interface(TWO_NODES, {"MASTER_ADDR": address}) == expected


def test_the_users_choice_stays() -> None:
    environ = {"MASTER_ADDR": IPV4[0][1], "GLOO_SOCKET_IFNAME": "ib0"}
    assert gloo_interface(TWO_NODES, environ) == {}


def test_one_node_needs_no_choice() -> None:
    alone = replace(TWO_NODES, local_world_size=4)
    assert gloo_interface(alone, {"MASTER_ADDR": IPV4[0][1]}) == {}


def test_an_unknown_host_is_left_to_the_meeting_itself() -> None:
    assert gloo_interface(TWO_NODES, {"MASTER_ADDR": "nowhere.invalid"}) == {}
