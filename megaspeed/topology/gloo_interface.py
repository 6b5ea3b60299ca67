"""The network interface over which gloo connects nodes: the one that reaches MASTER_ADDR.

gloo listens at the address that this machine's own host name resolves to. This may be a loopback
address (often 127.0.1.1 in /etc/hosts), or the name may not resolve. Then ranks on other nodes
connect to themselves, and no group can be created. The interface that reaches MASTER_ADDR does
connect the nodes. On rank 0's own node, MASTER_ADDR may itself resolve to a loopback address, for
the same reason. Then the interface of the default route is used. Set GLOO_SOCKET_IFNAME to use
another one, such as that of a faster network.
"""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from megaspeed.topology.launch import LaunchEnvironment

_VARIABLE = "GLOO_SOCKET_IFNAME"
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation, which no machine has: only the default route leads there."""


def gloo_interface(launch: LaunchEnvironment, environ: Mapping[str, str]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for this process, if its ranks are on several nodes.

    Empty if the variable is set, if all ranks are on this node, or if there is no such interface.
    """
    if _VARIABLE in environ or not _on_several_nodes(launch):
        return {}
    own = node_address(launch, environ)
    if own is None or is_loopback(own):
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return {_VARIABLE: name}
    return {}


def node_address(launch: LaunchEnvironment, environ: Mapping[str, str]) -> str | None:
    """The address at which other nodes reach this one; a loopback address if there is none.

    None if MASTER_ADDR cannot be resolved or reached.
    """
    for entry in psutil.net_if_addrs().get(environ.get(_VARIABLE, ""), ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return entry.address
    own = _address_towards(environ.get("MASTER_ADDR", "localhost"))
    if own is not None and is_loopback(own) and _on_several_nodes(launch):
        return next(filter(None, map(_address_towards, _FAR_AWAY)), own)
    return own


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches this address."""
    return ipaddress.ip_address(address).is_loopback


def _on_several_nodes(launch: LaunchEnvironment) -> bool:
    return launch.world_size > launch.local_world_size


def _address_towards(host: str) -> str | None:
    """This machine's address on the way to `host`. Sends nothing: UDP connects without a packet."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None
