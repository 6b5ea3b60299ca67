"""Activations of each kind of layer: what a micro-batch keeps for its backward, and working memory.

n = B S is the tokens of a micro-batch. m is the tokens on this rank between layers: n / T with
sequence parallelism on T tensor ranks, else n. Hidden states are (B, S, D) inside column- and
row-parallel layers, and (B, m/B, D) between them and between pipeline stages.

Q = (H + 2 H_kv) K is the number of query, key and value features, and a the bytes of an element. A
block keeps

    GPT-2    a (4 m D + n (Q + H K + 2 F) / T)
    Llama    a (4 m D + n (Q + (H + H_kv) K + H K + 4 F) / T)

plus the statistics of norms and softmax. (H + H_kv) K are the queries and keys after the rotation
or the norm of each head. 4 F are gate and up, silu(gate), and the product of silu(gate) and up.
The input of a block counts as the output of the layer before it.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.1 and equations 1 to 4. Here, the attention kernel is fused and keeps no S x S matrix, and
dropout keeps no mask. With H K = D, the formula for GPT-2 is the paper's 10 s b h + 24 s b h / t
without its two masks.

With full recomputation, a block keeps only its output, and its backward first recomputes the rest
(section 5 of the paper, "full recomputation": 2 s b h a layer).

If attention stays within a document, every rank also computes, from its own micro-batch,

    positions   (B, S)         8 bytes each
    mask        (B, 1, S, S)   in the model's precision, the same for all heads

and keeps them until the backward of its first block is done (``model/attention.py``).
"""

from dataclasses import dataclass, replace

from megaspeed.analysis.costs.memory import BYTES_OF
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.plan import shard_of, vocabulary_rows_per_rank

_FP32, _INT64 = 4, 8

_HASHING = 2 * 4
"""Bytes an element while a dropout mask is computed: the int32 hash, and a shifted copy of it."""


def tokens_of(run: Run) -> int:
    """n: tokens of a micro-batch."""
    return run.batch.micro_batch_size * run.config.data.sequence_length


def full_hidden_bytes(run: Run) -> int:
    """Hidden states of all tokens, (B, S, D) in the model's precision."""
    return tokens_of(run) * run.config.model.hidden_size * BYTES_OF[run.precision]


def hidden_bytes(run: Run) -> int:
    """The part of the hidden states that one rank has between layers."""
    return full_hidden_bytes(run) // (run.grid.tp if run.config.parallel.sequence_parallel else 1)


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation bytes of one layer for one micro-batch on one rank."""

    kept: int  # kept from the layer's forward to its backward, including its output
    forward_working: int  # working memory at the forward's peak, in addition to ``kept``
    # Working memory at the backward's peak, in addition to ``kept``, without gradients of
    # parameters.
    backward_working: int
    # The part of ``kept`` that is freed when the loss has been differentiated: the softmax in the
    # head.
    kept_until_loss: int = 0
    # Working memory while the loss is differentiated, in addition to ``kept``.
    loss_backward_working: int = 0


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The symbols of the module's docstring, with their values for one run."""

    whole_tokens: int  # n, tokens of a micro-batch
    split_tokens: int  # m, tokens on one rank between layers
    element_bytes: int  # a, the bytes of an element in the model's precision
    # Whether RMSNorm is one kernel, as on a GPU. On a CPU it is several operations.
    fused_norm: bool
    # Whether collectives use NCCL, which copies nothing. gloo's reduce-scatter copies its input.
    on_gpu: bool

    @classmethod
    def of(cls, run: Run, device_type: str) -> "Shapes":
        """Computes the numbers from a run. ``device_type`` is "cpu" or "cuda"."""
        ranks = run.grid.tp if run.config.parallel.sequence_parallel else 1
        on_gpu = device_type == "cuda"
        return cls(
            whole_tokens=tokens_of(run),
            split_tokens=tokens_of(run) // ranks,
            element_bytes=BYTES_OF[run.precision],
            on_gpu=on_gpu,
            fused_norm=on_gpu or run.config.model.norm == "layer_norm",
        )


def embedding_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """The embedding: token ids and hidden states."""
    ids = shapes.whole_tokens * _INT64
    masks = shapes.whole_tokens * (_INT64 + 1) if run.grid.tp > 1 else 0
    full = full_hidden_bytes(run)
    hashing = 0
    if run.config.model.embedding_dropout > 0.0:
        hashing = shapes.whole_tokens * run.config.model.hidden_size * _HASHING
    return LayerMemory(
        kept=ids + masks + hidden_bytes(run),
        forward_working=max(_summed(run), hashing),
        backward_working=full + hashing,
    )


def block_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """One transformer block, recomputed or not."""
    output, mlp = hidden_bytes(run), _mlp_kept(run, shapes)
    attention = _norm_kept(run, shapes) + _attention_kept(run, shapes) + output
    if not shapes.fused_norm and shapes.element_bytes < _FP32:
        attention -= output  # a norm of several operations keeps its input in fp32 instead
    kept = attention + _norm_kept(run, shapes) + mlp + output
    forward = max(_summed(run), _gathered_sequence(run), _residual_hashing(run, shapes))
    backward = _block_backward_working(run, shapes)
    if run.config.parallel.activation_checkpointing == "none":
        return LayerMemory(kept=kept, forward_working=forward, backward_working=backward)
    # With recomputation, the first forward keeps no intermediates, and its peak is in the MLP. The
    # recomputed forward keeps everything except the output. Its peak is at the attention's output
    # or in the backward that follows.
    return LayerMemory(
        kept=output,
        forward_working=forward + mlp,
        backward_working=kept - output + max(forward - mlp, backward),
    )


def first_block_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """The first block of a pipeline stage, with the mask and the positions if there are any."""
    block = block_memory(run, shapes)
    if not run.config.data.reset_at_documents:
        return block
    pairs = shapes.whole_tokens * run.config.data.sequence_length
    made = pairs * shapes.element_bytes + shapes.whole_tokens * _INT64
    return replace(
        block,
        kept=block.kept + made,
        # Before the block runs: one byte for each pair of tokens, true if both are in one document.
        forward_working=max(block.forward_working, pairs - block.kept),
    )


def window_mask_bytes(run: Run, shapes: Shapes) -> int:
    """The mask (S, S) of the sliding window, which all blocks, micro-batches and steps share."""
    sequence, window = run.config.data.sequence_length, run.config.model.sliding_window
    if run.config.data.reset_at_documents or window is None or window >= sequence:
        return 0
    return sequence**2 * shapes.element_bytes


def head_memory(run: Run, shapes: Shapes) -> LayerMemory:
    """The final norm, logits (n, V/T) and the cross-entropy over them, whose softmax is fp32."""
    columns = vocabulary_rows_per_rank(run.config.model.vocab_size, run.grid.tp)
    logits = shapes.whole_tokens * columns * shapes.element_bytes
    softmax = shapes.whole_tokens * columns * _FP32
    # For each token: the row of its target, whether this rank has the row, whether it counts.
    targets = shapes.whole_tokens * (_INT64 + 2)
    return LayerMemory(
        kept=_norm_kept(run, shapes) + softmax + targets,
        forward_working=max(logits, _gathered_sequence(run)),
        backward_working=logits + _column_parallel_backward(run, shapes),
        kept_until_loss=softmax,
        loss_backward_working=logits,
    )


def _norm_kept(run: Run, shapes: Shapes) -> int:
    """What a norm keeps: output and statistics; on a CPU also the intermediates of RMSNorm."""
    state = hidden_bytes(run)
    if run.config.model.norm == "layer_norm":
        return state + 2 * shapes.split_tokens * shapes.element_bytes
    intermediates = 0 if shapes.fused_norm else _rms_norm_intermediates(shapes)
    width = run.config.model.hidden_size
    return state + shapes.split_tokens * (_FP32 + width * intermediates)


def _rms_norm_intermediates(shapes: Shapes) -> int:
    """Bytes an element that RMSNorm keeps on a CPU.

    They are x / rms. In 16-bit precision, also x in fp32 and the product of x / rms and the weight.
    """
    return 2 * _FP32 if shapes.element_bytes < _FP32 else _FP32


def _attention_kept(run: Run, shapes: Shapes) -> int:
    model = run.config.model
    features, _ = _local_shape(run, "attention.qkv")
    _, mixed = _local_shape(run, "attention.output")
    heads = mixed // model.head_dim
    key_value_heads = (features - mixed) // (2 * model.head_dim)
    is_rotary = model.positions == "rotary"
    # Queries and keys after the rotation or the norm.
    queries_and_keys = features - key_value_heads * model.head_dim
    changed = queries_and_keys if is_rotary or model.qk_norm else 0
    # Cosines and sines of each row, if its positions are its own.
    angles = model.head_dim if is_rotary and run.config.data.reset_at_documents else 0
    norms = 0
    if model.qk_norm:  # statistics of the norms of each head's query and key
        intermediates = 0 if shapes.on_gpu else _rms_norm_intermediates(shapes)
        each_head = _FP32 + model.head_dim * intermediates
        norms = shapes.whole_tokens * (heads + key_value_heads) * each_head
    if model.attention_dropout == 0.0:
        row_statistics = shapes.whole_tokens * heads * _FP32
        elements = shapes.whole_tokens * (features + changed + angles + mixed)
        return elements * shapes.element_bytes + row_statistics + norms
    # Without the fused kernel (model/attention.py): copies of queries and repeated keys and values,
    # the output, the fp32 softmax, and the weights after dropout.
    squares = _attention_weights(run, shapes) * (_FP32 + shapes.element_bytes)
    # A norm keeps its input, here a view of all features; on a CPU in 16 bits, in fp32 instead.
    keeps_view = model.qk_norm and (shapes.on_gpu or shapes.element_bytes == _FP32)
    elements = shapes.whole_tokens * (4 * mixed + angles + (features if keeps_view else 0))
    return elements * shapes.element_bytes + squares + norms


def _attention_weights(run: Run, shapes: Shapes) -> int:
    """Elements of the attention matrices (B, H/T, S, S)."""
    heads = run.config.model.num_attention_heads // run.grid.tp
    return shapes.whole_tokens * run.config.data.sequence_length * heads


def _mlp_kept(run: Run, shapes: Shapes) -> int:
    """What an MLP keeps: the output of ``up``, silu(gate) if any, and the input of ``down``."""
    gated = run.config.model.mlp == "swiglu"
    before, _ = _local_shape(run, "mlp.gate_up" if gated else "mlp.up")
    _, after = _local_shape(run, "mlp.down")
    elements = before + after + (after if gated else 0)
    return shapes.whole_tokens * elements * shapes.element_bytes


def _local_shape(run: Run, module: str) -> tuple[int, int]:
    """Rows and columns of a block's matrix on one tensor rank."""
    weight = parameter_named(run.config.model, f"blocks.0.{module}.weight")
    rows, columns = shard_of(run.config.model, weight, rank=0, size=run.grid.tp).local_shape
    return rows, columns


def _summed(run: Run) -> int:
    """The output of a row-parallel layer before and after the sum over the tensor axis."""
    return full_hidden_bytes(run) * (2 if run.grid.tp > 1 else 1)


def _gathered_sequence(run: Run) -> int:
    """Sequence parallelism: a layer's gathered input, and its copy with the batch outermost.

    A collective needs the sequence dim first. With one sample, no copy is needed for this.
    """
    if not run.config.parallel.sequence_parallel or run.grid.tp == 1:
        return 0
    return (2 if run.batch.micro_batch_size > 1 else 1) * full_hidden_bytes(run)


def _column_parallel_backward(run: Run, shapes: Shapes) -> int:
    """The gradient of a column-parallel layer's input, before and after the sum over the tensor
    axis. With sequence parallelism also the input, gathered once more.
    """
    full = full_hidden_bytes(run)
    if run.grid.tp == 1:
        return full
    if not run.config.parallel.sequence_parallel:
        return 2 * full
    gloo_copy = 0 if shapes.on_gpu else full  # of what it reduce-scatters
    return full + _gathered_sequence(run) + gloo_copy


def _residual_hashing(run: Run, shapes: Shapes) -> int:
    if run.config.model.residual_dropout == 0.0:
        return 0
    return shapes.split_tokens * run.config.model.hidden_size * _HASHING


def _block_backward_working(run: Run, shapes: Shapes) -> int:
    """The largest of: gradients inside the MLP while what it kept still exists; after that, the
    gradient of its input, the intermediates of a norm, or the mask of the attention weights.

    With dropout, its own gradient exists beside the one of the residual connection.
    """
    mlp_kept = _mlp_kept(run, shapes)
    _, width = _local_shape(run, "mlp.down")
    activation = shapes.whole_tokens * width * shapes.element_bytes  # (n, F/T)
    mlp = activation if run.config.model.mlp == "gelu" else 2 * activation
    if run.config.model.residual_dropout > 0.0:
        mlp = hidden_bytes(run) + max(mlp, _residual_hashing(run, shapes))
    up = mlp - mlp_kept + _column_parallel_backward(run, shapes)
    moments = [mlp + _gathered_sequence(run), up]
    if not shapes.fused_norm:
        norm = 4 * shapes.split_tokens * run.config.model.hidden_size * _FP32
        moments.append(norm - mlp_kept)
    if run.config.model.attention_dropout > 0.0:
        # The gradient replaces the weights after dropout; what the MLP kept is freed.
        hashing = _attention_weights(run, shapes) * _HASHING
        moments.append(hashing - mlp_kept - _norm_kept(run, shapes) - hidden_bytes(run))
    return max(moments)
