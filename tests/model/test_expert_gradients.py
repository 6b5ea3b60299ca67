"""Experts in fp64, in which imports and exports are compared: products and gradients.

torch has no grouped product in fp64, so ours multiplies one group after the other.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaspeed.model.experts import Experts
from megaspeed.model.grouped_products import grouped_product
from tests.model.tiny_gpt import initialized, llama

ROWS, INNER, OUTER = 20, 8, 16
OFFSETS = torch.tensor([3, 3, 12, 20], dtype=torch.int32)
"""Where the rows of each expert end. The second expert has no rows."""


def test_grouped_products_in_fp64_are_those_of_the_kernel() -> None:
    rows, others = torch.randn(ROWS, INNER), torch.randn(ROWS, OUTER)
    matrices = torch.randn(len(OFFSETS), INNER, OUTER)
    for a, b in ((rows, matrices), (rows.t(), others)):
        ours = grouped_product(a.double(), b.double(), OFFSETS)
        kernel = F.grouped_mm(a, b, offs=OFFSETS)
        assert ours.dtype == torch.float64 and ours.shape == kernel.shape
        torch.testing.assert_close(ours.float(), kernel)
    assert not grouped_product(rows.t().double(), others.double(), OFFSETS)[1].any()


@pytest.mark.parametrize(("normalizes", "recomputation"), [(False, "none"), (True, "selective")])
def test_gradients_are_those_of_finite_differences(normalizes: bool, recomputation: str) -> None:
    model = initialized(
        llama(
            architecture="qwen3_moe",
            hidden_size=4,
            num_attention_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=3,
            norm_topk_prob=normalizes,
            initializer_range=0.5,
        ),
        recomputation=recomputation,
    ).double()
    experts = model.blocks["0"].mlp
    assert isinstance(experts, Experts)
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    routing = experts.choose(experts.router(h), 2, is_trained=True)
    parameters = dict(experts.named_parameters())

    def output(h: Tensor, *weights: Tensor) -> Tensor:
        result: Tensor = experts(
            h, experts.router(h), routing, None
        )  # gradcheck changes ``weights``
        return result

    assert parameters.keys() == {"router.weight", "gate_up.weight", "down.weight"}
    assert torch.autograd.gradcheck(output, (h, *parameters.values()))
