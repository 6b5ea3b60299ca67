"""Where attention begins anew with every document: what a pipeline stage makes for all its blocks.

    positions   (B, S)         8 bytes each
    mask        (B, 1, S, S)   in the model's precision, the same for all heads

Every rank makes both from its own micro-batch (``model/attention.py``), complete on every tensor
rank, and keeps them until the backward of its first block is done.

If each row is one document and the sliding window is shorter than the row, all micro-batches and
steps share one mask (S, S).
"""

from dataclasses import dataclass, replace

from megaspeed.analysis.costs.memory import BYTES_OF
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.plan import shard_of, vocabulary_rows_per_rank

# Hidden states of one micro-batch: what travels within a layer and between layers.
#
# whole   (B, S, D)       in column- and row-parallel layers
# split   (B, S/tp, D)    between them and between pipeline stages, with sequence parallelism


def whole_tokens(run: Run) -> int:
    """B S: tokens of a micro-batch."""
    return run.batch.micro_batch_size * run.config.data.sequence_length


def split_tokens(run: Run) -> int:
    """Those that one rank has between layers; all of them without sequence parallelism."""
    ranks = run.grid.tp if run.config.parallel.sequence_parallel else 1
    return whole_tokens(run) // ranks


def whole_hidden_bytes(run: Run) -> int:
    """(B, S, D) in the model's precision."""
    return _hidden_bytes(run, whole_tokens(run))


def hidden_bytes(run: Run) -> int:
    """What one rank has of it between layers: all, or (B, S/tp, D)."""
    return _hidden_bytes(run, split_tokens(run))


def _hidden_bytes(run: Run, tokens: int) -> int:
    return tokens * run.config.model.hidden_size * BYTES_OF[run.precision]


# Activations of each kind of layer: what a micro-batch keeps for its backward, and working memory.
#
# With n = B S tokens of a micro-batch, m of them on this rank where the sequence is split (n / T
# with sequence parallelism, else n), T tensor ranks, Q = (H + 2 H_kv) K query, key and value
# features, a bytes an element, a block keeps (Korthikanti et al. 2022, "Reducing Activation
# Recomputation in Large Transformer Models", section 4.1 and equations 1 to 4, here with a fused
# attention kernel, which keeps no S x S matrix, and a dropout that keeps no mask)
#
#     GPT-2    a (4 m D + n (Q + H K + 2 F) / T)
#     Llama    a (4 m D + n (Q + (H + H_kv) K + H K + 4 F) / T)
#
# plus the statistics of norms and softmax. (H + H_kv) K are the queries and keys after the rotation
# or the norm of each head. 4 F are gate and up, silu(gate), and the product of silu(gate) and up.
# With H K = D, GPT-2's is the paper's 10 s b h + 24 s b h / t without its two masks. The input of a
# block is counted where it is made: as the output of the layer before it. With full recomputation a
# block keeps only its output, and its backward first makes the rest again (their section 5, "full
# recomputation": 2 s b h a layer).

_FP32, _INT64 = 4, 8

_HASHING = 2 * 4
"""Bytes an element while a dropout mask is computed: the int32 hash, and a shifted copy of it."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation bytes of one layer for one micro-batch on one rank.

    Attributes:
        kept: from the layer's forward to its backward, its output included.
        forward_working: beyond ``kept``, at the forward's highest moment.
        backward_working: beyond ``kept``, at the backward's highest moment; gradients of parameters
            are not in it.
        kept_until_loss: the part of ``kept`` that is gone once the loss is differentiated: the
            softmax, in the head.
        loss_backward_working: beyond ``kept``, while the loss is differentiated.
    """

    kept: int
    forward_working: int
    backward_working: int
    kept_until_loss: int = 0
    loss_backward_working: int = 0


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The numbers of the module's docstring for one run.

    Attributes:
        whole_tokens: n, tokens of a micro-batch.
        split_tokens: m, those on one rank where the sequence is split.
        element_bytes: a, of the model's precision.
        fused_norm: whether RMSNorm is one kernel, as on a GPU; on a CPU torch writes it out.
        on_gpu: NCCL's collectives copy nothing, gloo's reduce-scatter does.
    """

    whole_tokens: int
    split_tokens: int
    element_bytes: int
    fused_norm: bool
    on_gpu: bool

    @classmethod
    def of(cls, run: Run, device_type: str) -> "Shapes":
        """Of a run on a kind of device."""
        return cls(
            whole_tokens=whole_tokens(run),
            split_tokens=split_tokens(run),
            element_bytes=BYTES_OF[run.precision],
            on_gpu=device_type == "cuda",
            fused_norm=device_type == "cuda" or run.config.model.norm == "layer_norm",
        )


def embedding_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """Token ids, and the hidden states that they become."""
    ids = shapes.whole_tokens * _INT64
    masks = shapes.whole_tokens * (_INT64 + 1) if run.grid.tp > 1 else 0
    whole = whole_hidden_bytes(run)
    hashing = 0
    if run.config.model.embedding_dropout > 0.0:
        hashing = shapes.whole_tokens * run.config.model.hidden_size * _HASHING
    return LayerMemory(
        kept=ids + masks + hidden_bytes(run),
        forward_working=max(whole * (2 if run.grid.tp > 1 else 1), hashing),
        backward_working=whole + hashing,
    )


def block_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """One transformer block, recomputed or not."""
    output = hidden_bytes(run)
    kept = _block_kept(run, shapes)
    forward = _block_forward_working(run, shapes)
    backward = _block_backward_working(run, shapes)
    if run.config.parallel.activation_checkpointing == "none":
        return LayerMemory(kept=kept, forward_working=forward, backward_working=backward)
    # The forward under recomputation keeps nothing inside, so all of it is working memory. At its
    # highest only the MLP's part lives; the recomputed one keeps everything but the output, and is
    # highest at the attention's output or in the backward that follows.
    mlp = _mlp_kept(run, shapes)
    return LayerMemory(
        kept=output,
        forward_working=forward + mlp,
        backward_working=kept - output + max(forward - mlp, backward),
    )


def head_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """The final norm, logits (n, V/T) and the cross-entropy over them, whose softmax is fp32."""
    columns = vocabulary_rows_per_rank(run.config.model.vocab_size, run.grid.tp)
    logits = shapes.whole_tokens * columns * shapes.element_bytes
    softmax = shapes.whole_tokens * columns * _FP32
    gathered = _gathered_sequence(run, shapes)
    inner = _column_parallel_backward(run, shapes)
    targets = shapes.whole_tokens * (_INT64 + 2)  # positions, and whether here and counted
    return LayerMemory(
        kept=_norm_kept(run, shapes) + softmax + targets,
        forward_working=max(logits, gathered),
        backward_working=logits + inner,
        kept_until_loss=softmax,
        loss_backward_working=logits,
    )


def _block_kept(run: Run, shapes: Shapes) -> int:
    state = hidden_bytes(run)
    attention = _norm_kept(run, shapes) + _attention_kept(run, shapes) + state
    if not shapes.fused_norm and shapes.element_bytes < _FP32:
        attention -= state  # a norm that is written out keeps its input in fp32 instead
    return attention + _norm_kept(run, shapes) + _mlp_kept(run, shapes) + state


def _norm_kept(run: Run, shapes: Shapes) -> int:
    """The output, and a row's statistics; where RMSNorm is written out also its fp32 steps."""
    state = hidden_bytes(run)
    if run.config.model.norm == "layer_norm":
        return state + 2 * shapes.split_tokens * shapes.element_bytes
    statistics = shapes.split_tokens * _FP32
    if shapes.fused_norm:
        return state + statistics
    steps = _written_out_bytes(shapes)
    return state + statistics + shapes.split_tokens * run.config.model.hidden_size * steps


def _written_out_bytes(shapes: Shapes) -> int:
    """Bytes an element that RMSNorm keeps if torch writes it out, as on a CPU.

    They are x / rms and, in 16 bits, x in fp32 before it and the product after it.
    """
    return 2 * _FP32 if shapes.element_bytes < _FP32 else _FP32


def _attention_kept(run: Run, shapes: Shapes) -> int:
    model = run.config.model
    features, _ = _local_shape(run, "attention.qkv")
    _, mixed = _local_shape(run, "attention.output")
    heads = mixed // model.head_dim
    key_value_heads = (features - mixed) // (2 * model.head_dim)
    turned = features - key_value_heads * model.head_dim  # queries and keys
    is_rotary = model.positions == "rotary"
    changed = turned if is_rotary or model.qk_norm else 0
    # A row's own cosines and sines, where its positions are its own.
    angles = model.head_dim if is_rotary and run.config.data.reset_at_documents else 0
    elements = shapes.whole_tokens * (features + changed + angles + mixed)
    norms = 0
    if model.qk_norm:
        norms = _head_norms_kept(shapes, heads + key_value_heads, model.head_dim)
    if model.attention_dropout == 0.0:
        row_statistics = shapes.whole_tokens * heads * _FP32
        return elements * shapes.element_bytes + row_statistics + norms
    # Written out (model/attention.py): copies of queries and repeated keys and values, the output,
    # the fp32 softmax, and what is left of it after dropout.
    square_bytes = _attention_weights(run, shapes) * (_FP32 + shapes.element_bytes)
    # A norm keeps its input, here a view of all features; if it is written out, in fp32 instead.
    keeps_view = shapes.on_gpu or shapes.element_bytes == _FP32
    others = angles + (features if model.qk_norm and keeps_view else 0)
    kept = shapes.whole_tokens * (4 * mixed + others) * shapes.element_bytes
    return kept + square_bytes + norms


def _head_norms_kept(shapes: Shapes, heads: int, head_dim: int) -> int:
    """Statistics of the norms of each head's query and key, and their intermediates on a CPU."""
    steps = 0 if shapes.on_gpu else _written_out_bytes(shapes)
    return shapes.whole_tokens * heads * (_FP32 + head_dim * steps)


def _attention_weights(run: Run, shapes: Shapes) -> int:
    """Elements of the attention matrices (B, H/T, S, S)."""
    heads = run.config.model.num_attention_heads // run.grid.tp
    return shapes.whole_tokens * run.config.data.sequence_length * heads


def _mlp_kept(run: Run, shapes: Shapes) -> int:
    """The first matrix's output, silu(gate) if there is a gate, and the last matrix's input."""
    gated = run.config.model.mlp == "swiglu"
    before, _ = _local_shape(run, "mlp.gate_up" if gated else "mlp.up")
    _, after = _local_shape(run, "mlp.down")
    elements = before + after + (after if gated else 0)
    return shapes.whole_tokens * elements * shapes.element_bytes


def _wide(run: Run, shapes: Shapes) -> int:
    """One activation (n, F/T) inside the MLP."""
    _, width = _local_shape(run, "mlp.down")
    return shapes.whole_tokens * width * shapes.element_bytes


def _local_shape(run: Run, module: str) -> tuple[int, int]:
    """Rows and columns of a block's matrix on one tensor rank."""
    weight = parameter_named(run.config.model, f"blocks.0.{module}.weight")
    rows, columns = shard_of(run.config.model, weight, rank=0, size=run.grid.tp).local_shape
    return rows, columns


def _gathered_sequence(run: Run, shapes: Shapes) -> int:
    """Sequence parallelism gathers a layer's input, and lays the gathered ranks side by side."""
    if not run.config.parallel.sequence_parallel or run.grid.tp == 1:
        return 0
    return _layouts_of_a_sequence(run) * whole_hidden_bytes(run)


def _column_parallel_backward(run: Run, shapes: Shapes) -> int:
    """The gradient of a column-parallel layer's input before and after the sum over the tensor
    axis; with sequence parallelism also the input, gathered once more.
    """
    whole = whole_hidden_bytes(run)
    if run.grid.tp == 1:
        return whole
    if not run.config.parallel.sequence_parallel:
        return 2 * whole
    gloo_copy = 0 if shapes.on_gpu else whole  # of what it reduce-scatters
    return (1 + _layouts_of_a_sequence(run)) * whole + gloo_copy


def _layouts_of_a_sequence(run: Run) -> int:
    """A collective wants the sequence outermost, which one sample alone has already."""
    return 2 if run.batch.micro_batch_size > 1 else 1


def _block_forward_working(run: Run, shapes: Shapes) -> int:
    """The output of a row-parallel layer before and after the sum over the tensor axis, or while
    dropout computes its mask.
    """
    summed = whole_hidden_bytes(run) * (2 if run.grid.tp > 1 else 1)
    return max(summed, _gathered_sequence(run, shapes), _residual_hashing(run, shapes))


def _residual_hashing(run: Run, shapes: Shapes) -> int:
    if run.config.model.residual_dropout == 0.0:
        return 0
    return shapes.split_tokens * run.config.model.hidden_size * _HASHING


def _block_backward_working(run: Run, shapes: Shapes) -> int:
    """The most of: gradients inside the MLP while what it kept is still there; once that is gone,
    the gradient of its input, a norm's written-out steps, or the mask of the attention weights.

    With dropout, its own gradient is there in addition to the one that passes by the MLP.
    """
    wide, mlp_kept = _wide(run, shapes), _mlp_kept(run, shapes)
    mlp = wide if run.config.model.mlp == "gelu" else 2 * wide
    if run.config.model.residual_dropout > 0.0:
        mlp = hidden_bytes(run) + max(mlp, _residual_hashing(run, shapes))
    up = mlp - mlp_kept + _column_parallel_backward(run, shapes)
    moments = [mlp + _gathered_sequence(run, shapes), up]
    if not shapes.fused_norm:
        norm = 4 * shapes.split_tokens * run.config.model.hidden_size * _FP32
        moments.append(norm - mlp_kept)
    if run.config.model.attention_dropout > 0.0:
        # The gradient takes the place of the weights after dropout; what the MLP kept is gone.
        hashing = _attention_weights(run, shapes) * _HASHING
        moments.append(hashing - mlp_kept - _norm_kept(run, shapes) - hidden_bytes(run))
    return max(moments)


def first_block_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """The first block of a pipeline stage, with the mask and the positions if there are any."""
    block = block_memory(run, shapes)
    if not run.config.data.reset_at_documents:
        return block
    sequence = run.config.data.sequence_length
    pairs = shapes.whole_tokens * sequence
    made = pairs * shapes.element_bytes + shapes.whole_tokens * _INT64
    return replace(
        block,
        kept=block.kept + made,
        # Which pairs are of one document, a byte each, while nothing of the block is there yet.
        forward_working=max(block.forward_working, pairs - block.kept),
    )


def window_mask_bytes(run: Run, shapes: Shapes) -> int:
    """The mask of the sliding window that all blocks, micro-batches and steps share."""
    sequence, window = run.config.data.sequence_length, run.config.model.sliding_window
    if run.config.data.reset_at_documents or window is None or window >= sequence:
        return 0
    return sequence**2 * shapes.element_bytes
