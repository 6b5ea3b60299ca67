"""The network interface over which gloo connects nodes: the one that reaches MASTER_ADDR.

gloo listens at the address that this machine's own host name resolves to. This may be a loopback
address (often 127.0.1.1 in /etc/hosts), or the name may not resolve. Then ranks on other nodes
connect to themselves, and no group can be created. The interface that reaches MASTER_ADDR does
connect the nodes. Set GLOO_SOCKET_IFNAME to use another one, such as that of a faster network. If
MASTER_ADDR is a loopback address (as localhost on rank 0's own node), it gives no information
about the other nodes, and gloo chooses.
"""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from megaspeed.topology.launch import LaunchEnvironment

_VARIABLE = "GLOO_SOCKET_IFNAME"


def gloo_interface(launch: LaunchEnvironment, environ: Mapping[str, str]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for this process, if its ranks are on several nodes.

    Empty if the variable is set, if all ranks are on this node, or if there is no such interface.
    """
    if _VARIABLE in environ or launch.local_world_size == launch.world_size:
        return {}
    own = address_towards(environ["MASTER_ADDR"])
    if own is None or ipaddress.ip_address(own).is_loopback:
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return {_VARIABLE: name}
    return {}


def address_towards(host: str) -> str | None:
    """This machine's address on the way to `host`. Sends nothing: UDP connects without a packet."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None
