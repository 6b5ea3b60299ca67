"""The load of each expert (how many tokens use it in a step), and the bias that balances experts.

    training forwards -> counts of this rank, summed over micro-batches -> loads, over all ranks
    loads, if the step is taken -> bias of each expert, for the choice only

Sums of whole numbers are exact in any order, so the bias is the same at every layout. The counts
are summed together with the loss and the norm, in one collective and one read by the host.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaspeed.checkpoint.tensors import Piece, router_bias_key
from megaspeed.config.model import ModelConfig
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import GPT


class Balance:
    """The counts, the auxiliary loss and the bias of the experts of a rank's blocks.

    Args:
        model: this rank's layers. Their experts add to the counts of this object.
        config: the shape of the complete model.
        device: where the model is.
    """

    def __init__(self, model: GPT, config: ModelConfig, device: torch.device) -> None:
        assert config.num_experts is not None, "the model has experts"
        self._rate = config.router_bias_rate
        self._names = [f"blocks.{name}.mlp.router.weight" for name in model.blocks]
        count = len(self._names)
        self.bias = torch.zeros(count, config.num_experts, device=device)
        """(blocks of this rank, E) fp32."""
        self._counts = torch.zeros(count, config.num_experts, dtype=torch.int64, device=device)
        self._auxiliary = torch.zeros(count, device=device)
        # A stage may have no block.
        blocks = [int(name) for name in model.blocks]
        self._blocks = torch.tensor(blocks, dtype=torch.int64, device=device)
        # In fp64, which is exact for counts below 2^53.
        shape = (config.num_hidden_layers, config.num_experts + 1)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        for place, block in enumerate(model.blocks.values()):
            experts = block.mlp
            assert isinstance(experts, Experts)
            experts.counts, experts.auxiliary = self._counts[place], self._auxiliary[place]
            if self._rate > 0.0:
                experts.bias = self.bias[place]

    def pop_counts(self) -> Tensor:
        """Return what this rank has counted since the last call. Counting restarts at 0.

        The caller replaces the tensor in place by its sum over all ranks. ``end_step`` reads it.

        Returns:
            (blocks of the complete model x (E + 1),) fp64: for each block, how many tokens use each
            expert, then the auxiliary loss, summed over sequences. 0 for blocks of other ranks.
        """
        self._sums.zero_()
        own = torch.cat((self._counts, self._auxiliary.unsqueeze(1).double()), dim=1)
        self._sums.index_copy_(0, self._blocks, own)
        self._counts.zero_()
        self._auxiliary.zero_()
        return self._sums.view(-1)

    def named_biases(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (full name of the router's weight, bias (E,)) of each block of this rank."""
        yield from zip(self._names, self.bias, strict=True)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of a checkpoint, views of the bias; none if the rate of the bias is 0."""
        for name, bias in self.named_biases() if self._rate > 0.0 else ():
            yield Piece(router_bias_key(name), tuple(bias.shape), (0,), bias)

    def end_step(self, *, taken: bool) -> None:
        """Change the bias (Wang et al. 2024, algorithm 1). A skipped step does not change it.

        bias += rate x sign(mean load - load)
        """
        if taken and self._rate > 0.0:
            loads = self._sums[:, :-1].index_select(0, self._blocks)
            self.bias += self._rate * (loads.mean(dim=1, keepdim=True) - loads).sign().float()


def split_sums(sums: Sequence[float], experts: int) -> tuple[list[list[int]], float]:
    """Return the loads, by block and expert, and the auxiliary loss, summed over blocks."""
    rows = [sums[start : start + experts + 1] for start in range(0, len(sums), experts + 1)]
    return [[int(load) for load in row[:-1]] for row in rows], sum(row[-1] for row in rows)
