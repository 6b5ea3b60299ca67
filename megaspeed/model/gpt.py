"""The GPT as plain torch: a flat list of layers, of which one rank may build any contiguous part.

    layer index   0           1 .. N        N + 1
    layer         embedding   blocks 0..N-1 head
    name          embedding   blocks.<i>    head

A GPT built over the whole range is the model; built over a part it is one pipeline stage of it, and
its parameters keep their full names. Nothing here knows of ranks or collectives.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaspeed.config.model import ModelConfig
from megaspeed.model.documents import attention_mask, positions_in
from megaspeed.model.layers import Block, Embedding, Head
from megaspeed.model.parameters import layer_count

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's type of each precision."""


class GPT(nn.Module):
    """The layers ``layers`` of a GPT.

    Args:
        config: the whole model's shape.
        layers: contiguous indices into the flat list of layers; all of them where left out.
        seed: the run's seed, of which dropout masks are a function.
        recompute_blocks: keep only each block's input for the backward pass and run the block's
            forward again there (Chen et al. 2016), instead of keeping its activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range | None = None,
        seed: int = 0,
        recompute_blocks: bool = False,
    ) -> None:
        super().__init__()
        layers = range(layer_count(config)) if layers is None else layers
        last = layer_count(config) - 1
        self.recompute_blocks = recompute_blocks
        self.window = config.sliding_window
        self.embedding = Embedding(config, seed=seed) if 0 in layers else None
        self.blocks = nn.ModuleDict(
            {
                str(index - 1): Block(config, name=f"blocks.{index - 1}", seed=seed)
                for index in layers
                if 0 < index < last
            }
        )
        self.head = Head(config) if last in layers else None
        if config.tie_word_embeddings and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(
        self, x: Tensor, samples: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Runs this part of the model.

        Args:
            x: tokens (B, S) where the part begins with the embedding, else hidden states (B, S, D).
            samples: (B,) int64, the sample indices, of which dropout masks are a function; None if
                nothing is dropped.
            documents: (B, S), the number of each token's document, equal ones being neighbours:
                attention and positions begin anew with each (see ``documents.py``). Where left out,
                a row is one document.

        Returns:
            Logits (B, S, V) where the part ends with the head, else hidden states (B, S, D).
        """
        positions = None if documents is None else positions_in(documents)
        if self.embedding is not None:
            x = self.embedding(x, samples, positions)
        mask = None if documents is None else attention_mask(documents, x.dtype, self.window)
        for block in self.blocks.values():
            if self.recompute_blocks and self.training:
                x = checkpoint(
                    block,
                    x,
                    samples,
                    positions,
                    mask,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x = block(x, samples, positions, mask)
        return x if self.head is None else self.head(x)

    def layer_modules(self) -> list[nn.Module]:
        """This part's layers, in the order in which the forward pass runs them."""
        layers = (self.embedding, *self.blocks.values(), self.head)
        return [layer for layer in layers if layer is not None]
