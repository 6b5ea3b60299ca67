"""Which machine is named if one cannot connect to another."""

from torch.distributed import HashStore

from megaspeed.doctor.checks import Messages, check_ports
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.launched import free_port


def test_a_machine_that_listens_at_a_loopback_address_is_named_and_not_the_firewall() -> None:
    """Rank 1 cannot reach rank 0, whose machine sent the address of its own name, 127.0.1.1."""
    store = HashStore()
    place = LaunchEnvironment(
        rank=1, world_size=2, local_rank=0, local_world_size=1, source="RANK/WORLD_SIZE"
    )
    messages = Messages(place, store)
    messages.broadcast("port/0", ["127.0.1.1", free_port()])
    messages.broadcast("all connected", None)
    assert check_ports(messages, "127.0.0.1", [0, 1], 5) == {}
    blamed, text = messages.receive("connected/1", 5)
    assert blamed == 0
    assert "MASTER_ADDR resolves to a loopback address there (127.0.1.1)" in text
    assert "firewall" not in text
