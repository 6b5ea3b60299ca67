"""The GPT in plain torch: a flat list of layers, of which a rank may build any chunks.

    layer index   0           1 .. N        N + 1
    layer         embedding   blocks 0..N-1 head
    name          embedding   blocks.<i>    head

    Embedding     tokens (B, S)    -> hidden (B, S, D)
    Block         hidden (B, S, D) -> hidden (B, S, D)
    Head          hidden (B, S, D) -> logits (B, S, V)

A GPT with all layers is the complete model. A GPT with some of them is one pipeline stage. It has
one or several chunks of consecutive layers, and runs one of them at a time. Parameters keep their
full names. Nothing here calls a collective. ``parallelize`` replaces modules, and sets how many
tensor ranks split the hidden states (``sequence_parts``). ``share_sequences`` sets which tokens of
a sequence this rank has (``part``).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Recomputation
from megaspeed.model.attention import (
    Attention,
    Inputs,
    RotaryAngles,
    attention_mask,
    keys_of_rows,
    mask_of_rows,
)
from megaspeed.model.documents import (
    Documents,
    attends_without_mask,
    places_in,
    segments_of_rows,
    take,
)
from megaspeed.model.dropout import SampleDropout
from megaspeed.model.experts import (
    ExpertLinear,
    Experts,
    Places,
    Received,
    Router,
    Routing,
)
from megaspeed.model.parameters import (
    Row,
    block_rows,
    embedding_rows,
    head_rows,
    layer_count,
    mlp_parts,
)
from megaspeed.model.recomputation import Compose, keeping, recomputing
from megaspeed.model.sequence_part import WHOLE


def make_modules(rows: Mapping[str, Row]) -> dict[str, nn.Module]:
    """Name within the layer -> module, with torch's default initial weights."""
    return {name: _make_module(row) for name, row in rows.items()}


def _make_module(row: Row) -> nn.Module:
    if row.columns is None:
        if row.kind == "layer_norm":
            return nn.LayerNorm(row.rows, eps=row.eps, bias=row.bias)
        return nn.RMSNorm(row.rows, eps=row.eps)
    if row.kind == "router":
        return Router(row.rows, row.columns, row.experts)
    if row.kind == "experts":
        return ExpertLinear(row.rows, row.columns, row.experts)
    if row.kind == "embedding":
        weight = torch.empty(row.rows, row.columns)
        if not weight.is_meta:  # torch imports its compiler to draw on the meta device
            nn.init.normal_(weight)
        return nn.Embedding.from_pretrained(weight, freeze=False)
    return nn.Linear(row.columns, row.rows, bias=row.bias)


class Embedding(nn.Module):
    """Token embedding, plus learned positions if the model has them."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        modules = make_modules(embedding_rows(config))
        self.tokens = modules["tokens"]
        self.positions = modules.get("positions")
        self.multiplier = config.embedding_multiplier
        self.dropout = SampleDropout(config.embedding_dropout, name="embedding.dropout", seed=seed)

    def forward(
        self, tokens: Tensor, samples: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """Map ``tokens`` (B, S) to (B, S, D). ``positions`` (B, S) or (S,) are 0 ... S - 1 if
        omitted.
        """
        x = self.tokens(tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.positions(positions)
        return self.dropout(x, samples)


class GeluMlp(nn.Module):
    """down(gelu(up(x))), (B, S, D) -> (B, S, D), with GPT-2's tanh approximation or without it."""

    def __init__(
        self, modules: Mapping[str, nn.Module], compose: Compose, approximate: str
    ) -> None:
        super().__init__()
        self.compose = compose
        self.gelu = partial(F.gelu, approximate=approximate)
        self.up = modules["mlp.up"]
        self.down = modules["mlp.down"]

    def forward(self, x: Tensor) -> Tensor:
        return self.compose(self.gelu, self.down, self.up(x))


class SwiGluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants improve transformer").

    gate and up are one matrix: first the F rows of gate, then those of up. (B, S, D) -> (B, S, D).
    """

    def __init__(self, modules: Mapping[str, nn.Module], compose: Compose) -> None:
        super().__init__()
        self.compose = compose
        self.gate_up = modules["mlp.gate_up"]
        self.down = modules["mlp.down"]

    def forward(self, x: Tensor) -> Tensor:
        return self.compose(_swiglu, self.down, self.gate_up(x))


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)  # each (B, S, F)
    return F.silu(gate) * up


Map = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Choice:
    """The choice of experts for a micro-batch, which a recomputation uses again."""

    routing: Routing | None = None
    received: Received | None = None  # None if nothing is exchanged


class Block(nn.Module):
    """A transformer block, (B, S, D) -> (B, S, D). Attention and MLP have a norm before or after.

        before      x = x + attention(norm(x)),  then  x + mlp(norm(x))
        parallel    x + attention(norm(x)) + mlp(norm(x))
        after       x = x + norm(attention(x)),  then  x + norm(mlp(x))

    ``compose`` determines whether cheap operations are recomputed (``recomputation.py``).
    """

    def __init__(
        self, config: ModelConfig, *, name: str, seed: int, compose: Compose = keeping
    ) -> None:
        super().__init__()
        self.compose = compose
        modules = make_modules(block_rows(config))
        self.attention_norm = modules["attention_norm"]
        self.attention = Attention(config, modules, name=name, seed=seed, compose=compose)
        self.attention_dropout = SampleDropout(
            config.residual_dropout, name=f"{name}.attention_dropout", seed=seed
        )
        self.mlp_norm = modules["mlp_norm"]
        self.mlp = self._make_mlp(config, modules)
        self.mlp_dropout = SampleDropout(
            config.residual_dropout, name=f"{name}.mlp_dropout", seed=seed
        )
        self.divides_mlp = False
        """Whether the MLP is computed for one part of the tokens at a time (``mlp_parts``)."""
        self.is_parallel = config.parallel_residual
        self.norms_before = config.norm_position == "before"
        self.multiplier = config.residual_multiplier

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        mlp_dropout = partial(self.mlp_dropout, samples=inputs.samples)
        y = self._after_attention(x, inputs)
        return y + self._branch(self.mlp_norm, self._mlp, mlp_dropout, x if self.is_parallel else y)

    def _make_mlp(self, config: ModelConfig, modules: Mapping[str, nn.Module]) -> nn.Module:
        if config.is_gated:
            return SwiGluMlp(modules, self.compose)
        return GeluMlp(modules, self.compose, "tanh" if config.mlp == "gelu" else "none")

    def _after_attention(self, x: Tensor, inputs: Inputs) -> Tensor:
        """The residual stream after the attention."""
        attention = partial(self.attention, inputs=inputs)
        dropout = partial(self.attention_dropout, samples=inputs.samples)
        return x + self._branch(self.attention_norm, attention, dropout, x)

    def _branch(self, norm: Map, layer: Map, dropout: Map, x: Tensor) -> Tensor:
        """What the attention or the MLP adds to the residual stream."""
        if self.norms_before:
            y = dropout(self.compose(norm, layer, x))
        else:
            y = self.compose(norm, dropout, layer(x))
        return self._scaled(y)

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.multiplier == 1.0 else y * self.multiplier

    def _mlp(self, x: Tensor) -> Tensor:
        parts = mlp_parts(*x.shape) if self.divides_mlp else []
        if len(parts) <= 1:
            y: Tensor = self.mlp(x)
            return y
        # The backward of a part computes it again, so only one of them has its intermediates. There
        # is no random state to restore, because dropout masks are functions of the sample.
        recomputed = partial(checkpoint, self.mlp, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([recomputed(part) for part in x.split(parts, dim=1)], dim=1)


class ExpertBlock(Block):
    """A block with a mixture of experts as its MLP.

        attend ----> choose -----------> add_experts
        compiled     data-dependent      compiled

    Between the two compiled parts, experts are chosen. A block that is recomputed takes the choice
    of its forward instead. If ranks share the experts, the second part becomes three:

        attend ----> choose -----> pack ----> exchange ---> compute ---> exchange ---> add_returned
        compiled                   compiled                 compiled                   compiled
    """

    COMPILED = ("attend", "add_experts", "pack", "compute", "add_returned")

    def _make_mlp(self, config: ModelConfig, modules: Mapping[str, nn.Module]) -> nn.Module:
        return Experts(config, modules, self.compose)

    def forward(self, x: Tensor, inputs: Inputs, choice: Choice | None = None) -> Tensor:
        """See ``Block``.

        Args:
            x: (B, S, D).
            inputs: of all blocks.
            choice: the forward sets it, and a recomputation uses it.
        """
        choice = choice or Choice()
        y, h, scores = self.attend(x, inputs)
        routing, exchange, wait = choice.routing, self._experts.exchange, None
        is_again = routing is not None
        if routing is None:
            is_trained = self.training and torch.is_grad_enabled()
            routing = self._experts.choose(scores, len(x), is_trained=is_trained)
            choice.routing = routing
            wait = None if exchange is None else exchange.begin(routing)
        if exchange is None:
            return self.add_experts(y, h, scores, routing, inputs)
        packed = self.pack(h, scores, routing, inputs)
        if wait is not None:
            choice.received = wait()  # the host waits, after it has launched ``pack``
        received, rows = choice.received, len(packed)
        assert received is not None
        arrived = exchange.send(packed, received)
        del packed  # its memory
        results = self.compute(arrived, received.places())
        if is_again and self.norms_before:
            # No backward needs the values of what follows, so nothing is sent back.
            returned = results.new_empty(rows, results.shape[1]).requires_grad_()
        else:
            returned = exchange.send_back(results, received)
        del arrived, results
        return self.add_returned(y, returned, routing, inputs)

    def attend(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the residual stream after the attention, the input of the experts (both
        (B, S, D)), and the scores (T, E).
        """
        y = self._after_attention(x, inputs)
        read = x if self.is_parallel else y
        h = self.mlp_norm(read) if self.norms_before else read
        return y, h, self._experts.router(h)

    def add_experts(
        self, y: Tensor, h: Tensor, scores: Tensor, routing: Routing, inputs: Inputs
    ) -> Tensor:
        return self._added(y, self._experts(h, scores, routing, inputs.gradient_scale), inputs)

    def pack(self, h: Tensor, scores: Tensor, routing: Routing, inputs: Inputs) -> Tensor:
        """Return what is sent to the other ranks."""
        experts = self._experts
        assert experts.exchange is not None
        weights = experts.weights(scores, routing, inputs.gradient_scale, h.dtype)
        return experts.exchange.pack(h.flatten(0, 1), weights, routing)

    def compute(self, received: Tensor, places: Places) -> Tensor:
        """Return the results of this rank's experts for what it has received."""
        return self._experts.compute_received(received, places)

    def add_returned(self, y: Tensor, returned: Tensor, routing: Routing, inputs: Inputs) -> Tensor:
        """Return the residual stream after the experts."""
        assert self._experts.exchange is not None
        z = self._experts.exchange.unpack(returned, routing)
        return self._added(y, z.view_as(y), inputs)

    def _added(self, y: Tensor, z: Tensor, inputs: Inputs) -> Tensor:
        if not self.norms_before:
            z = self.mlp_norm(z)
        return y + self._scaled(self.mlp_dropout(z, inputs.samples))

    @property
    def _experts(self) -> Experts:
        assert isinstance(self.mlp, Experts)
        return self.mlp


LossOfHidden = Callable[[Tensor, nn.Module], Tensor]
"""(output of the last norm (B, S, D), the projection) -> loss."""


class Head(nn.Module):
    """The last norm, and the projection to the vocabulary without a bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        modules = make_modules(head_rows(config))
        self.norm = modules["norm"]
        self.output = modules["output"]
        self.scaling = config.logits_scaling

    def forward(self, x: Tensor, loss: LossOfHidden | None = None) -> Tensor:
        """Map ``x`` (B, S, D) to logits (B, S, V), or to ``loss(norm(x), output)``."""
        x = self.norm(x)
        if self.scaling != 1.0:  # instead of the logits, so that the loss needs no factor
            x = x / self.scaling
        return self.output(x) if loss is None else loss(x, self.output)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtype of each precision."""


class GPT(nn.Module):
    """A GPT, or some layers of it.

    Args:
        config: the shape of the complete model.
        chunks: indices into the flat list of layers, consecutive in each chunk; if omitted, one
            chunk has all layers.
        seed: of the run; it determines dropout masks.
        recomputation: what the recomputed blocks compute again in backward instead of keeping it:
            nothing, cheap operations ("selective"; see ``recomputation.py``), or everything after
            the block's input ("full" and "full_offloaded"; Chen et al. 2016).
        recomputed_blocks: how many of these blocks are recomputed, the first ones; all if omitted.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        chunks: Sequence[range] | None = None,
        seed: int = 0,
        recomputation: Recomputation = "none",
        recomputed_blocks: int | None = None,
    ) -> None:
        super().__init__()
        last = layer_count(config) - 1
        self.model_config = config
        self.chunks = (range(last + 1),) if chunks is None else tuple(chunks)
        """The indices of the layers of each chunk."""
        layers = [index for chunk in self.chunks for index in chunk]
        self.angles = RotaryAngles(config) if config.positions == "rotary" else None
        self.sequence_parts = 1
        """How many ranks share the hidden states of this rank's tokens between layers.
        ``parallelize`` sets it with sequence parallelism."""
        self.part = WHOLE
        """This rank's tokens of each sequence; ``share_sequences`` sets it with a context axis."""
        self.embedding = Embedding(config, seed=seed) if 0 in layers else None
        names = [str(index - 1) for index in layers if 0 < index < last]
        recomputed = set(names[:recomputed_blocks] if recomputation != "none" else [])
        self.blocks = nn.ModuleDict()
        for name in names:
            selective = recomputation == "selective" and name in recomputed
            compose = recomputing if selective else keeping
            kind = Block if config.num_experts is None else ExpertBlock
            block = kind(config, name=f"blocks.{name}", seed=seed, compose=compose)
            block.divides_mlp = recomputation == "full_offloaded" and name in recomputed
            self.blocks[name] = block
        self.fully_recomputed = recomputed if recomputation.startswith("full") else set()
        self.inputs_in_host_memory: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes a context in which inputs of fully recomputed blocks are saved in host memory."""
        self.head = Head(config) if last in layers else None
        if config.tie_word_embeddings and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(
        self,
        x: Tensor,
        samples: Tensor | None = None,
        documents: Documents | None = None,
        loss: LossOfHidden | None = None,
        chunk: int = 0,
        gradient_scale: Tensor | None = None,
    ) -> Tensor:
        """Run the layers of a chunk.

        Args:
            x: tokens (B, S) if the first layer is the embedding, else hidden states (B, S, D). With
                a context axis, S are the tokens of this rank.
            samples: (B,) int64, the sample indices, which determine dropout masks; None if there is
                no dropout.
            documents: attention and positions stay within each of them; if omitted, each row is one
                document.
            loss: the head computes this instead of logits.
            chunk: index into ``chunks``.
            gradient_scale: scalar. The backward computes gradients of this number times the sum of
                the losses of all tokens. None if experts have no auxiliary loss, or if no backward
                follows.

        Returns:
            Logits (B, S, V) or the loss if the last layer is the head, else hidden states
            (B, S, D).
        """
        layers, last = self.chunks[chunk], layer_count(self.model_config) - 1
        sequence = x.shape[1] * (1 if 0 in layers else self.sequence_parts) * self.part.size
        if self.embedding is not None and 0 in layers:
            own, positions = self.part.ranges(sequence), None
            if documents is not None:
                positions = take(documents.positions, own)
            elif self.part.size > 1:
                positions = places_in(own, x.device)
            x = self.embedding(x, samples, positions)
        inputs = self._inputs(x, samples, documents, sequence)
        inputs = inputs._replace(gradient_scale=gradient_scale)
        for name in (str(index - 1) for index in layers if 0 < index < last):
            block = self.blocks[name]
            if name in self.fully_recomputed and self.training:  # an evaluation has no backward
                # A recomputed block with experts uses the choice of its forward.
                kept = (Choice(),) if isinstance(block, ExpertBlock) else ()
                recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
                with self.inputs_in_host_memory():
                    x = recomputed(block, x, inputs, *kept)
            else:
                x = block(x, inputs)
        return self.head(x, loss) if self.head is not None and last in layers else x

    def _inputs(
        self, x: Tensor, samples: Tensor | None, documents: Documents | None, sequence: int
    ) -> Inputs:
        """What the blocks get beside ``x``. Their attention has the queries of ``part.attention``.

        Args:
            x: only its number of rows, dtype and device matter.
            sequence: tokens of a complete sequence.
        """
        part, window = self.part.attention, self.model_config.sliding_window
        angles, mask, segments, keys, positions = None, None, None, None, None
        if documents is not None:
            positions = take(documents.positions, part.ranges(sequence))
        if self.angles is not None:
            angles = self.angles.of(positions, sequence, x.dtype, x.device, part)
        is_plain = documents is None and part == WHOLE and (window is None or window >= sequence)
        if not is_plain and attends_without_mask(self.model_config, x.device, x.dtype):
            segments = (
                segments_of_rows(len(x), sequence, part, x.device)
                if documents is None
                else documents.segments
            )
            keys = segments.keys
        elif not is_plain:
            if positions is None:
                mask = mask_of_rows(sequence, x.dtype, window, part, x.device)
            else:
                mask = attention_mask(positions, x.dtype, window, part)
            if part != WHOLE:
                keys = keys_of_rows(len(x), sequence, part, x.device)
        return Inputs(samples, angles, mask, segments, keys)

    def layer_modules(self) -> list[nn.Module]:
        """The layers of all chunks, in the order of the forward pass."""
        layers = (self.embedding, *self.blocks.values(), self.head)
        return [layer for layer in layers if layer is not None]
