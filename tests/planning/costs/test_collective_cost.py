"""The bytes that a rank sends in a collective, compared with numbers computed by hand."""

import pytest

from megaspeed.planning.costs.traffic import Collective, Messages, bytes_sent


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        ("reduce_scatter", 750),  # a rank sends three of four parts of 250 bytes
        ("all_gather", 750),  # its own 250 bytes, and two parts that it passes on
        ("all_reduce", 1500),  # a reduce_scatter, then an all_gather
        ("reduce", 750),  # three of four ranks pass 1000 bytes on
        ("broadcast", 750),
        ("send", 1000),
    ],
)
def test_a_message_of_1000_bytes_on_4_ranks(collective: Collective, sent: int) -> None:
    assert bytes_sent(collective, 1000, 4) == sent


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce", "send"])
def test_a_rank_alone_sends_nothing(collective: Collective) -> None:
    assert bytes_sent(collective, 1000, 1) == 0


def test_reducing_to_the_owners_and_gathering_is_an_all_reduce() -> None:
    """Therefore ZeRO-1 and 2 cost no more than data parallelism (Rajbhandari et al. 2020, section
    7.1).
    """
    size = 5 * 1024
    assert bytes_sent("all_reduce", size, 5) == 2 * 4 * 1024
    assert bytes_sent("reduce", size, 5) + bytes_sent("all_gather", size, 5) == 2 * 4 * 1024


def test_messages_are_added_up_before_bytes_are_rounded() -> None:
    messages = Messages()
    for _ in range(3):
        messages.add("dp", "all_gather", 4, ranks=3)  # 2/3 of 4 bytes
    assert messages.traffic() == {("dp", "all_gather"): 8}


def test_collectives_that_send_nothing_are_omitted() -> None:
    messages = Messages()
    messages.add("tp", "all_reduce", 400, ranks=1)
    messages.add("pp", "send", 0, ranks=2)
    messages.add("world", "all_reduce", 16, ranks=2)
    assert messages.traffic() == {("world", "all_reduce"): 16}
