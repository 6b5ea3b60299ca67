"""What is gathered and held together, by hand."""

from pathlib import Path

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.gathers import Gather, PartitionsOf, held_in_pass
from megaspeed.data_axis.parameters import LocalParameter
from megaspeed.topology.grid import Grid
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


def layer(name: str) -> Gather:
    parameter = LocalParameter(name=name, layer=name, shape=(5,), group="other")
    partitions = PartitionsOf(Grid(pp=1, dp=2, tp=1), element_bytes=4, on_device=True)
    return Gather.of([parameter], partitions)


A, B, C = layer("a"), layer("b"), layer("c")


def held(zero: ZeroConfig, order: list[Gather], following: list[Gather]) -> str:
    layers = held_in_pass(zero, order, following)
    return " ".join("".join(each.parameters[0].name for each in hold) or "-" for hold in layers)


def test_each_layer_and_the_next_one_are_held_and_after_the_pass_what_the_next_pass_needs() -> None:
    zero = ZeroConfig(stage=3, stage3_prefetch_bucket_size=1)
    assert held(zero, [A, B, C], []) == "ab bc c -"
    assert held(zero, [A, B, C], [C, B, A]) == "ab bc cb cb"
    # The next pass needs a and b. Only what is in memory already is held for it.
    assert held(zero, [A, B, C], [A, B]) == "ab bc ca a"
    bounded = zero.model_copy(update={"stage3_max_live_parameters": 9})
    assert held(bounded, [A, B, C], [C, B, A]) == "a b c c"


def test_each_parameter_is_padded_to_equal_parts_and_received_at_an_aligned_address() -> None:
    assert A.elements == 5 and A.sizes == [6]
    assert A.message_bytes == 6 * 4 and A.held_bytes == 128


def test_small_blocks_are_gathered_together_up_to_half_of_what_may_live() -> None:
    def blocks(prefetch: int, bound: int | None) -> list[int]:
        """The number of blocks of each gather of a forward."""
        zero = {
            "stage": 3,
            "stage3_prefetch_bucket_size": prefetch * block,
            "stage3_max_live_parameters": None if bound is None else bound * block,
        }
        run = tiny_run(TEXT, dp=2, model={"num_hidden_layers": 5}, zero_optimization=zero)
        _, *inner, _ = data_axis_of(run, 0, "cuda").passes["forward", 0]
        return [inner.count(each) for each in dict.fromkeys(inner)]

    block = 12_704
    assert blocks(2, None) == [1, 2, 2]
    assert blocks(2, 3) == [1, 1, 1, 1, 1]
    assert blocks(5, None) == [5]
