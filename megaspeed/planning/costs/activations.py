"""Activations of each kind of layer: what a micro-batch keeps for its backward, and working memory.

n = B S / C is the tokens of a micro-batch on one of C context ranks. m is the tokens on this rank
between layers: n / T with sequence parallelism on T tensor ranks, else n. Hidden states are
(B, n/B, D) inside column- and row-parallel layers, and (B, m/B, D) between them and between
pipeline stages.

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

With selective recomputation (``model/recomputation.py``), a block keeps its output, the input of
its second norm, the outputs of its first three matrix products, and what the fused attention kernel
returns. If attention has dropout, it keeps nothing of the attention except the first of them:

    GPT-2    a (2 m D + n (Q + H K + F) / T)
    Llama    a (2 m D + n (Q + H K + 2 F) / T)

A compiled block keeps the same, but no silu(gate), so 3 F instead of 4 F, and on a CPU its norms
are fused, too. This is exact without sequence parallelism and attention dropout. With one of them,
a compiled block keeps at most this.

With full recomputation, a block keeps only its output, and its backward first recomputes the rest
(section 5 of the paper, "full recomputation": 2 s b h a layer). If it is offloaded, the output
waits in host memory (``zero/host_inputs.py``).

A mixture of experts (``model/experts.py``) has k rows of F features for each token, one for each of
the token's experts. Instead of 4 F elements a token, it keeps 5 k F. The fifth is silu(gate) * up
before it is multiplied by the score. A compiled block keeps 3 k F. With selective recomputation, a
block keeps 2 k F, and does not repeat its second norm. Rows of D features are gathered again in the
backward. For each token, a block also keeps

    3 k int64                     experts, rows, order of rows; also with full recomputation
    k int64, 2 k elements         tokens of rows; scores of the choice, in two orders
    E fp32                        scores; with norm_topk_prob, (k + 1) fp32 more

None of this depends on the loads of experts, because a rank computes k rows for each of its tokens.

If ranks share experts (``tensor_parallel/experts.py``), a rank computes r rows instead, and keeps
what it has received, with c columns of weights after the features:

    all_to_all    (r, D + c), 2 r int64         r: m k if the experts of all ranks are used equally;
                                                otherwise, times ``Run.load_factor``
    all_gather    (ep m, D + c), r int64,       r: ep m min(k, E / ep), for every choice
                  ep m k (int64, bool)

During a forward, a block also holds what it sends and what is returned. With full recomputation, it
also keeps the places of the r rows.

If attention stays within a document (``model/documents.py``), every rank also has, from its own
micro-batch,

    positions   (B, S)         4 bytes each
    angles      (B, S, 1, K)   cosines and sines of rotary positions, in the model's precision
    mask        (B, 1, S, S)   in the model's precision, the same for all heads; only if needed

and each chunk of layers keeps its own until the backward of its first block is done. With
all_gather, angles and rows of the mask are those of a rank's own tokens. Otherwise the angles are
(S, 1, K), and stay for the run. Without a mask, a block keeps as much as if each row
were one document. On a GPU, its backward sums the queries' gradients in fp32, with 128 rows of
padding for each document. This memory is not counted. It is less than the working memory of the
MLP's backward, unless documents have far fewer than 128 tokens on average.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from megaspeed.config.resolve import BYTES_OF, Run, RunKey
from megaspeed.config.run import Recomputation
from megaspeed.model.parameters import mlp_parts, parameter_named
from megaspeed.tensor_parallel.shards import (
    columns_of_weights,
    shard_of,
    tokens_of_a_chunk,
    vocabulary_rows_per_rank,
)

_FP32, _INT32, _INT64 = 4, 4, 8

_OF_A_TOKENS_LOSS = 2 * _INT64 + 8 * _FP32
"""Bytes for each token of a chunk of the loss: its target, maximum, sum, factors and others."""

_HASHING = 2 * 4
"""Bytes an element while a dropout mask is computed: the int32 hash, and a shifted copy of it."""


def tokens_of(run: Run) -> int:
    """n: tokens of a micro-batch on one rank of the context axis."""
    return run.batch.micro_batch_size * run.config.data.sequence_length // run.grid.cp


def own_tokens_of(run: Run) -> int:
    """m: tokens of a micro-batch that one rank has between layers, and chooses experts for."""
    return tokens_of(run) // (run.grid.tp if run.sequence_parallel else 1)


def used_load_factor(run: Run) -> float:
    """``Run.load_factor``, but at most its value if all tokens use the experts of one rank."""
    model, ep = run.config.model, run.grid.ep or 1
    assert model.num_experts is not None and model.num_experts_per_tok is not None
    return min(run.load_factor, ep, model.num_experts / model.num_experts_per_tok)


def computed_rows(run: Run) -> int:
    """r: rows that a rank computes in a block of experts, or has memory for with all_gather."""
    model, ep = run.config.model, run.grid.ep or 1
    assert model.num_experts is not None and model.num_experts_per_tok is not None
    if run.expert_exchange == "all_gather":
        own = min(model.num_experts_per_tok, model.num_experts // ep)
        return own_tokens_of(run) * ep * own
    return round(used_load_factor(run) * own_tokens_of(run) * model.num_experts_per_tok)


def full_hidden_bytes(run: Run) -> int:
    """Return the hidden states of all tokens, (B, S, D) in the model's precision."""
    return tokens_of(run) * run.config.model.hidden_size * BYTES_OF[run.precision]


def hidden_bytes(run: Run) -> int:
    """Return the part of the hidden states that one rank has between layers."""
    return full_hidden_bytes(run) // (run.grid.tp if run.sequence_parallel else 1)


def mlp_parts_of(run: Run) -> list[int]:
    """The tokens of a row in each part of the MLP of a block with offloaded inputs."""
    rows, model = run.batch.micro_batch_size, run.config.model
    tokens = own_tokens_of(run) // rows
    if model.num_experts is not None:  # not divided, because a part would have few rows an expert
        return [tokens]
    return mlp_parts(rows, tokens, model.hidden_size)


class _Experts(NamedTuple):
    """Bytes of tensors of a mixture of experts, for m own tokens of a rank and r computed rows.

    The last five are 0 if a rank has all experts. With all_gather, R = ep m. Otherwise R = r.
    """

    rows: int  # (r, D)
    width: int  # (r, F)
    found: int  # what is gathered from (r, D) to sum the rows of each token
    choice: int  # ``Routing`` and ``Received``, which a fully recomputed block keeps, too
    unsaved: int  # the part of the choice that no operation saves: it is held during the forward
    scores: int  # the scores, and what is computed from scores and choice; received tokens
    received: int = 0  # (R, D + c)
    summed: int = 0  # (R, D) with all_gather, else 0
    results: int = 0  # (R, D), what is sent back
    returned: int = 0  # what other ranks send back
    summing: int = 0  # working memory of the sum of what is returned


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation bytes of one layer for one micro-batch on one rank."""

    kept: int  # kept from the layer's forward to its backward, including its output
    forward_working: int  # working memory at the forward's peak, in addition to ``kept``
    # Working memory at the backward's peak, in addition to ``kept``, without gradients of
    # parameters.
    backward_working: int


def activations_of(run: Run, device_type: str) -> "Activations":
    """Return the activations of a run's layers on "cuda" or "cpu"."""
    config, parallel = run.config, run.config.parallel
    values = (
        *(config.model, run.grid.tp, run.grid.cp, run.sequence_parallel, run.context_method),
        *(run.grid.ep, run.expert_exchange, run.load_factor),
        *(run.batch.micro_batch_size, config.data.sequence_length, config.data.reset_at_documents),
        *(run.precision, run.accumulation_dtype, config.training.compiles_on(device_type)),
        *(parallel.activation_checkpointing, parallel.recomputed_blocks),
    )
    return _activations_of(RunKey(values, run), device_type)


@lru_cache(maxsize=1024)
def _activations_of(key: RunKey, device_type: str) -> "Activations":
    return Activations(key.run, device_type)


class Activations:
    """Activation bytes of the layers of one run, for one micro-batch on one rank.

    Args:
        device_type: "cuda" or "cpu". On a CPU, RMSNorm is several operations, which keep their
            intermediates, and gloo's reduce-scatter copies its input.
    """

    def __init__(self, run: Run, device_type: str) -> None:
        model, tp = run.config.model, run.grid.tp
        self._run, self._model, self._tp = run, model, tp
        self._on_gpu = device_type == "cuda"
        self._is_compiled = run.config.training.compiles_on(device_type)
        self._fused_rms_norm = self._on_gpu or self._is_compiled
        self._fused_norm = self._fused_rms_norm or model.norm == "layer_norm"
        self._splits_sequence = run.sequence_parallel
        self._n = tokens_of(run)
        self._m = own_tokens_of(run)
        self._a = BYTES_OF[run.precision]
        self._full, self._hidden = full_hidden_bytes(run), hidden_bytes(run)
        # Sequence parallelism: a layer's gathered input, and gloo's copy of the input of a
        # reduce-scatter.
        self._gathered = self._full if self._splits_sequence else 0
        self._gloo_copy = 0 if self._on_gpu else self._gathered
        # The output of a row-parallel layer. It is summed in place, or scattered.
        self._summed = self._full + self._gloo_copy
        self._residual_hashing = 0
        if model.residual_dropout > 0.0:
            self._residual_hashing = self._m * model.hidden_size * _HASHING
        self._has_documents = run.config.data.reset_at_documents
        self._context, self._method = run.grid.cp, run.context_method
        sequence, window = run.config.data.sequence_length, model.sliding_window
        # Rows x queries of the mask, whose shape is (rows, 1, queries, S). If keys are gathered,
        # the queries are the rank's own tokens, otherwise all tokens.
        gathers_keys = self._method == "all_gather"
        own = self._n if self._has_documents else sequence // self._context
        self._queries = own if gathers_keys else own * self._context
        is_partial = window is not None and window < sequence
        is_masked = (self._has_documents or gathers_keys or is_partial) and (
            model.why_mask(device_type, self._a) is not None
        )
        self.mask = self._queries * sequence * self._a if is_masked else 0
        """Bytes of the mask of attention, which all blocks share. If attention stays within a
        document, each micro-batch has its own."""
        self._exchanged: tuple[int, ...] = ()
        if self._method is not None:
            self._exchanged = model.exchanged_features(self._method, cp=self._context, tp=tp)
        # Elements of the attention matrices (B, H/T, S, S), of which context ranks share heads or
        # rows.
        heads = model.num_attention_heads // tp
        self._attention_weights = self._n * run.config.data.sequence_length * heads
        self._experts = self._expert_sizes()
        self._block = cache(self._computed_block)

    def embedding(self) -> LayerMemory:
        """Token ids and hidden states."""
        ids = self._n * _INT64
        masks = self._n * (_INT64 + 1) if self._tp > 1 else 0
        hashing = 0
        if self._model.embedding_dropout > 0.0:
            hashing = self._n * self._model.hidden_size * _HASHING
        return LayerMemory(
            kept=ids + masks + self._hidden,
            # The rows of this rank's tokens; then also the sum, of which a part is kept.
            forward_working=max(self._full + self._gathered, hashing),
            backward_working=self._full + hashing,
        )

    def block(self, index: int = 0) -> LayerMemory:
        """A transformer block, recomputed or not; ``index`` is its number in its pipeline stage."""
        return self._block(self._run.config.parallel.recomputation_of(index))

    def _computed_block(self, recomputation: Recomputation) -> LayerMemory:
        if recomputation == "selective":
            return self._selective_block()
        parts = len(mlp_parts_of(self._run)) if recomputation == "full_offloaded" else 1
        output, mlp = self._hidden, self._mlp_kept() // parts
        attention = self._norm_kept() + self._attention_kept() + self._between_kept()
        kept = attention + self._norm_kept() + mlp + output
        forward = max(self._summed, self._gathered, self._residual_hashing)
        if self._experts is not None:
            e = self._experts
            forward = max(forward, e.unsaved + self._end_of_experts(e) - output)
        if self._model.parallel_residual:  # the sum of input and attention
            forward += output
        backward = self._block_backward_working(parts)
        keys, gathering, attending = self._exchanging()
        later = mlp + self._norm_kept() + output  # what the attention's passes do not have
        gathered = attention + keys + gathering - (self._kernel_kept() if keys else 0)
        if recomputation == "none":
            return LayerMemory(
                kept=kept,
                forward_working=max(forward, gathered - kept),
                backward_working=max(backward, keys + max(gathering, attending) - later),
            )
        kept += keys
        if keys and self._model.positions == "rotary" and not self._model.qk_norm:
            # Rotated queries are copies, and values are gathered: nothing keeps the projection's.
            kept -= self._n * self._attention_features()[0] * self._a
        # With recomputation, the first forward keeps no intermediates, and its peak is in the MLP.
        # The recomputed forward keeps everything except the output. Its peak is at the attention's
        # output or in the backward that follows.
        # An offloaded input is on the device while it leaves, and while the one before it returns.
        # The input of the first block counts as kept by the layer before, not the last output.
        on_device = output if recomputation == "full" or not self._on_gpu else 0
        passing = 2 * (output - on_device)
        computed = forward - mlp
        choice = 0
        if self._experts is not None:  # the recomputed forward ends after the experts
            computed, choice = self._end_of_experts(self._experts), self._experts.choice
            kept += self._experts.unsaved
        again = kept - output - choice
        again += max(computed, backward, max(gathering, attending) - later)
        return LayerMemory(
            kept=on_device + choice,
            forward_working=passing + max(forward + mlp, gathered),
            backward_working=passing + again,
        )

    def _selective_block(self) -> LayerMemory:
        """A block that keeps little more than the outputs of its matrix products.

        Working memory is highest at one of the listed moments. What is computed again for the
        backward is a part of it.
        """
        model, hidden = self._model, self._hidden
        features, mixed = self._attention_features()
        _, width = self._local_shape("mlp.down")
        qkv, mix = self._n * features * self._a, self._n * mixed * self._a
        activation = self._n * width * self._a  # (n, F/T), the input of ``down``
        silu = activation if model.is_gated else 0
        up, experts = activation + silu, self._experts
        if experts is not None:
            up = self._mlp_kept(selective=True) + self._norm_kept()
        # On a CPU: the fp32 intermediates of RMSNorm, of the hidden states and of the keys.
        norm = 0 if self._fused_norm else 3 * self._m * model.hidden_size * _FP32
        head_norm = 0
        if model.qk_norm and not self._on_gpu:
            head_norm = 3 * self._n * (features - mixed) // 2 * _FP32
        core, again = 0, self._attention_kept()  # what the fused kernel returns; the rest
        if model.attention_dropout == 0.0:
            core = self._kernel_kept()
            again -= qkv + core
        elif self._head_norms_keep_qkv:
            again -= qkv
        sent = self._normalized_before_sending()
        again -= sent
        mlp = self._mlp_gradients()
        keys, gathering, attending = self._exchanging()
        forward = [
            keys + gathering - hidden - core - up,
            mix + head_norm - hidden - core - up,
            norm - hidden - up,
            self._gathered,
            self._residual_hashing,
        ]
        backward = [
            norm + self._norm_kept() - up,
            again + head_norm - up,
            keys + max(gathering, attending) - up,
        ]
        if experts is None:
            forward.append(activation + max(self._summed, silu))
            backward.append(mlp + activation + silu + self._gathered)
            backward.append(mlp - up + hidden + self._column_parallel_backward())
        else:
            beside = experts.unsaved - hidden
            forward.append(beside + 2 * experts.width)
            forward.append(beside + self._end_of_experts(experts, experts.width))
            backward += self._expert_gradients(experts, again=3 * experts.width)
            backward.append(hidden + self._column_parallel_backward() - up)
        if model.attention_dropout == 0.0:
            backward.append(again + mix + qkv - up)
        else:
            # Queries, keys and values, the fp32 softmax, and its dropout or the output twice.
            softmax, cast = (self._attention_weights * size for size in (_FP32, self._a))
            dropping = self._attention_weights * _HASHING + (cast if self._a < _FP32 else 0)
            forward.append(qkv + softmax + max(dropping, 2 * mix) - hidden - up)
            # The mask replaces the weights after dropout.
            backward.append(again + self._attention_weights * _HASHING - up)
            # The gradients of queries, keys and values replace the weights.
            backward.append(again + qkv - softmax - cast - up)
        # Output, input of the second norm; the inputs of norms after attention and MLP.
        after = 2 * hidden if model.norm_position == "after" else 0
        inputs = (1 if model.parallel_residual else 2) * hidden + after
        if experts is not None:  # the second norm is not computed again
            inputs = hidden + self._between_kept() + after // 2
        return LayerMemory(
            kept=inputs + sent + qkv + core + up,
            forward_working=max(forward),
            backward_working=max(backward),
        )

    def first_block(self, index: int = 0) -> LayerMemory:
        """The first block of a chunk, with the mask and the positions if there are any."""
        block = self.block(index)
        if not self._has_documents:
            return block
        tokens = self._n * self._context  # of complete sequences
        return replace(
            block,
            kept=block.kept + self.mask + tokens * _INT32 + self._angles(self._queries),
            # Before the block runs: one byte for each element of the mask, true if both tokens are
            # in one document.
            forward_working=max(block.forward_working, self.mask // self._a - block.kept),
        )

    def shared(self) -> int:
        """What blocks, micro-batches and steps share: rotary angles, the mask (S, S) of a window.

        If attention stays within a document, each micro-batch has its own angles and mask.
        """
        return 0 if self._has_documents else self._angles(self._queries) + self.mask

    def head(self) -> LayerMemory:
        """The final norm and the loss (``tensor_parallel/loss.py``).

        The loss keeps only the gradient of its input. The forward needs most memory while a chunk
        of logits is differentiated, or while the gradient of the hidden states is summed over the
        tensor axis.
        """
        columns = vocabulary_rows_per_rank(self._model.vocab_size, self._tp)
        tokens = tokens_of_a_chunk(self._n, columns)
        logits = tokens * columns * self._a
        weight = columns * self._model.hidden_size
        # The fp32 copy of the logits, or a product that is added to a gradient of another type, for
        # which a GPU needs no memory.
        is_in_place = self._a == _FP32 and not self._is_compiled
        copy = 0 if is_in_place else tokens * columns * _FP32
        is_added = self._run.accumulation_dtype == self._run.precision
        product = 0 if is_added or self._on_gpu else weight * self._a
        token_bytes = self._n * _FP32 + tokens * _OF_A_TOKENS_LOSS
        chunk = logits + max(copy, product) + token_bytes
        # The output of the norm, for all tokens, and its gradient, which is kept.
        rows = self._hidden
        if self._splits_sequence:
            rows = self._gathered + self._full
            chunk = max(chunk, self._hidden + self._gloo_copy)
        norm = 0 if self._fused_norm else 3 * self._m * self._model.hidden_size * _FP32
        return LayerMemory(
            kept=self._norm_kept(),
            forward_working=rows + chunk,
            backward_working=self._hidden + norm,
        )

    def _between_kept(self) -> int:
        """Return what is kept of the hidden states between attention and MLP.

        A norm of several operations keeps its input in fp32 instead.
        """
        converts = not self._fused_norm and self._a < _FP32
        is_after = self._model.norm_position == "after"
        kept = 0 if self._model.parallel_residual else 1
        if converts:
            kept -= 2 if is_after else kept
        return kept * self._hidden

    def _norm_kept(self) -> int:
        """Return what a norm keeps: output and statistics; on a CPU, RMSNorm's intermediates."""
        if self._model.norm == "layer_norm":
            return self._hidden + 2 * self._m * self._a
        intermediates = 0 if self._fused_norm else self._rms_norm_intermediates()
        return self._hidden + self._m * (_FP32 + self._model.hidden_size * intermediates)

    def _rms_norm_intermediates(self) -> int:
        """Return the bytes an element that RMSNorm keeps on a CPU.

        They are x / rms. In 16-bit precision, also x in fp32 and the product of x / rms and the
        weight.
        """
        return 2 * _FP32 if self._a < _FP32 else _FP32

    def _attention_kept(self) -> int:
        model, n = self._model, self._n
        features, mixed = self._attention_features()
        heads = mixed // model.head_dim
        key_value_heads = (features - mixed) // (2 * model.head_dim)
        is_rotary = model.positions == "rotary"
        # Queries and keys after the rotation or the norm.
        queries_and_keys = features - key_value_heads * model.head_dim
        changed = queries_and_keys if is_rotary or model.qk_norm else 0
        norms = self._head_norms_kept(heads + key_value_heads)
        norms += self._normalized_before_sending()
        if self._method == "all_gather":  # the rest is computed and gathered again
            kept = n * features * self._a
            return kept + (self._kernel_kept() if model.attention_dropout == 0.0 else 0)
        if model.attention_dropout == 0.0:
            return n * (features + changed) * self._a + self._kernel_kept() + norms
        # Without the fused kernel (model/attention.py): copies of queries, keys and values, the
        # output, the fp32 softmax, and the weights after dropout.
        squares = self._attention_weights * (_FP32 + self._a)
        elements = n * (mixed + features + (features if self._head_norms_keep_qkv else 0))
        return elements * self._a + squares + norms

    def _normalized_before_sending(self) -> int:
        """Return the projection to queries, keys and values if ulysses sends a normalised copy."""
        if self._method != "ulysses" or self._model.qk_norm != "all_heads":
            return 0
        return self._n * self._local_shape("attention.qkv")[0] * self._a

    def _head_norms_kept(self, heads: int) -> int:
        """Return the statistics of the norms of each query and key head, if the model has them."""
        if not self._model.qk_norm:
            return 0
        if self._model.qk_norm == "all_heads":  # several operations, unless compiled
            kept = 0 if self._is_compiled else heads * self._model.head_dim * _FP32
            return self._n * (kept + 8 * _FP32)
        intermediates = 0 if self._fused_rms_norm else self._rms_norm_intermediates()
        return self._n * heads * (_FP32 + self._model.head_dim * intermediates)

    def _attention_features(self) -> tuple[int, int]:
        """Features of a token's queries, keys and values in the attention, and of its output.

        With ulysses, a rank has 1 / C of them, for C times as many tokens. A key/value head is
        copied if there are fewer than C.
        """
        features, _ = self._local_shape("attention.qkv")
        _, mixed = self._local_shape("attention.output")
        if self._method == "ulysses":
            features, mixed = self._exchanged
        return features, mixed

    def _exchanging(self) -> tuple[int, int, int]:
        """Return three numbers of bytes beyond what the attention keeps, if ranks share sequences.

        They are those of gathered keys and values, and of what is computed from them; beside these,
        the working memory of the exchange; and that of the backward.

        With ulysses, queries, keys and values exist three times: as they are computed, sent and
        received. So do their gradients in the backward, when all that was kept is freed.

        With all_gather, a rank receives the keys and values of all tokens. It attends with two runs
        of queries to (1 + 1 / (2 C)) times as many, or to fewer if documents are short.
        """
        if self._method is None:
            return 0, 0, 0
        if self._method == "ulysses":
            exchanged, kept = self._n * self._exchanged[0] * self._a, self._attention_kept()
            own = self._n * self._local_shape("attention.qkv")[0] * self._a
            return 0, own + 2 * exchanged - kept, self._hidden + 3 * exchanged - kept
        (features,), n = self._exchanged, self._n
        received = self._context * n * features * self._a
        used = received + n * features * self._a // 2
        _, mixed = self._local_shape("attention.output")
        changed = self._model.positions == "rotary" or self._model.qk_norm is not False
        queries, own = n * mixed * self._a, n * features * self._a
        # Of the kernel's results; then, beside the gradient of what is used, that of what is
        # received, which gloo copies.
        gradients = max(used + 2 * queries, (1 if self._on_gpu else 2) * received - queries)
        keys = used + changed * queries
        keys += self._head_norms_kept((mixed + features // 2) // self._model.head_dim)
        if self._model.attention_dropout > 0.0:
            keys += self._attention_weights * (_FP32 + self._a) + queries + used
            gradients = max(gradients, self._attention_weights * _HASHING)
        return keys, received + own + changed * own // 2, gradients

    def _kernel_kept(self) -> int:
        """Return what the fused kernel keeps of its result: the output, and the statistics of the
        softmax. With ulysses, the output after the all-to-all is kept, too.
        """
        _, mixed = self._local_shape("attention.output")
        outputs = 2 if self._method == "ulysses" else 1
        statistics = self._n * mixed // self._model.head_dim * _FP32
        return outputs * self._n * mixed * self._a + statistics

    @property
    def _head_norms_keep_qkv(self) -> bool:
        """Whether the norms of each head keep their input, which is a view of all features.

        On a CPU in 16-bit precision, they keep the input in fp32 instead.
        """
        joint = self._model.qk_norm == "all_heads"
        return joint or (self._model.qk_norm is True and (self._fused_rms_norm or self._a == _FP32))

    def _expert_sizes(self) -> _Experts | None:
        model, n, a, method = self._model, self._m, self._a, self._run.expert_exchange
        if model.num_experts is None or model.num_experts_per_tok is None:
            return None
        count, active, width = model.num_experts, model.num_experts_per_tok, model.hidden_size * a
        choice, scores = 3 * n * active * _INT64 + count * (_INT32 + _INT64), n * count * _FP32
        if model.router_aux_loss_coef > 0.0:
            choice += self._run.batch.micro_batch_size * count * _INT64
            choice += n * _INT64 if self._tp > 1 else 0  # the sequence of each token
            scores += _FP32  # the factor of the loss
        if model.norm_topk_prob:
            scores += n * (active + 1) * _FP32
        rows = computed_rows(self._run)
        sizes = _Experts(
            rows=rows * width,
            width=rows * model.expert_width * a,
            found=rows * width,
            choice=choice,
            unsaved=(n * active + count) * _INT64,
            scores=scores + rows * (_INT64 + a),
        )
        if method is None:
            return sizes
        ep = self._run.grid.ep or 1
        row = width + a * columns_of_weights(active, a, method)
        own = count // ep * _INT32 + 2 * rows * _INT64  # of ``Places``
        sizes = sizes._replace(unsaved=count * (_INT32 + _INT64), results=rows * width)
        if method == "all_to_all":
            return sizes._replace(
                choice=choice + own,
                scores=scores + rows * (row + a),
                received=rows * row,
                returned=n * active * width,
                summing=n * width + (0 if self._is_compiled else n * active * width),
            )
        everyone = ep * n
        return sizes._replace(
            found=2 * everyone * active * width,  # also with zeros for rows of other ranks
            choice=choice + own + everyone * active * (_INT64 + 1),
            unsaved=sizes.unsaved + (2 * n * active + rows) * _INT64,
            scores=scores + everyone * row + rows * a,
            received=everyone * row,
            summed=everyone * width,
            results=everyone * width,
            returned=n * width,
        )

    def _end_of_experts(self, experts: _Experts, beside: int = 0) -> int:
        """Return the working memory at the end of a forward: in the product with ``down``, with
        ``beside`` more bytes, when the results are sent back, or when they are summed.
        """
        e = experts
        computing = beside + self._combining(e) + e.summed
        return max(computing, e.results + e.returned, e.returned + e.summing)

    def _combining(self, experts: _Experts) -> int:
        """Return the working memory of the product with ``down`` and of the sum over experts.

        The results of the product are gathered in the order of the tokens, and then summed. In a
        compiled block, one kernel does both.
        """
        return experts.rows + (0 if self._is_compiled else experts.found)

    def _expert_gradients(self, experts: _Experts, again: int = 0) -> list[int]:
        """Return the working memory of the experts' backward, in addition to what is kept.

        It is highest in the product with ``down``, in silu(gate) * up * factor, in the product with
        gate and up, or when the gradients of features and weights of received tokens are joined.

        Args:
            again: bytes of what the backward recomputes.
        """
        rows, width = experts.rows, experts.width
        added = self._hidden if self._model.residual_dropout > 0.0 else 0
        # The gradient of gate and up has replaced what was kept of them and of their product.
        replaced = 0 if again else 2 - self._kept_rows()
        moments = [
            again + experts.results + rows + width,
            again + 2 * width,
            replaced * width + self._combining(experts) + experts.summed,
            (replaced - 2) * width + 3 * experts.received,
            self._residual_hashing,
        ]
        return [added + moment for moment in moments]

    def _kept_rows(self, *, selective: bool = False) -> int:
        """Return how many tensors of the shape (T k, F) experts keep."""
        return 2 if selective else 3 if self._is_compiled else 5

    def _mlp_kept(self, *, selective: bool = False) -> int:
        """Return what an MLP keeps: output of ``up``, silu(gate) if any, and input of ``down``.
        Experts also keep the choice and the scores.
        """
        if self._experts is not None:
            width = self._kept_rows(selective=selective) * self._experts.width
            saved = self._experts.choice - self._experts.unsaved
            return saved + self._experts.scores + width
        gated = self._model.is_gated
        before, _ = self._local_shape("mlp.gate_up" if gated else "mlp.up")
        _, after = self._local_shape("mlp.down")
        keeps_silu = gated and not self._is_compiled
        return self._n * (before + after + (after if keeps_silu else 0)) * self._a

    def _angles(self, tokens: int) -> int:
        """Return the cosines and sines of ``tokens`` positions."""
        return tokens * self._model.rotary_dim * self._a

    def _local_shape(self, module: str) -> tuple[int, int]:
        """Return the rows and columns of a block's matrix on one tensor rank."""
        weight = parameter_named(self._model, f"blocks.0.{module}.weight")
        rows, columns = shard_of(self._model, weight, rank=0, size=self._tp).local_shape
        return rows, columns

    def _column_parallel_backward(self) -> int:
        """Return the working memory of the backward of a column-parallel layer.

        It is the gradient of the input, which is summed in place over the tensor axis. With
        sequence parallelism, the input is also gathered once more.
        """
        return self._full + self._gathered + self._gloo_copy

    def _mlp_gradients(self) -> int:
        """Return the working memory of an MLP's backward, in addition to what its forward kept."""
        _, width = self._local_shape("mlp.down")
        activation = self._n * width * self._a  # (n, F/T)
        mlp = 2 * activation if self._model.is_gated else activation
        if self._model.residual_dropout > 0.0:
            mlp = self._hidden + max(mlp, self._residual_hashing)
        return mlp

    def _block_backward_working(self, parts: int) -> int:
        """Return the working memory at the peak of a block's backward, at one of these moments:

        inside the MLP      its gradients, and everything that its forward kept
        after the MLP       the gradient of its input
        in a norm           the intermediates of RMSNorm on a CPU
        in the attention    the mask of its dropout

        With residual dropout, a second gradient exists beside that of the residual connection.
        """
        mlp_kept, mlp = self._mlp_kept() // parts, self._mlp_gradients() // parts
        if parts > 1:  # the gradients of the parts' inputs
            mlp += self._hidden
        column = self._column_parallel_backward() // parts
        moments = [mlp + self._gathered // parts, mlp - mlp_kept + column]
        if self._experts is not None:
            moments = [*self._expert_gradients(self._experts), column - mlp_kept]
        if not self._fused_norm:
            converted = self._hidden if self._a < _FP32 else 0
            intermediates = 3 * self._m * self._model.hidden_size * _FP32 + converted
            if parts > 1:  # the last part has freed what the norm returned
                intermediates -= self._hidden
            moments.append(intermediates - mlp_kept)
        if self._model.attention_dropout > 0.0:
            # The gradient replaces the weights after dropout, and the MLP's tensors are freed.
            hashing = self._attention_weights * _HASHING
            moments.append(hashing - mlp_kept - self._norm_kept() - self._hidden)
        return max(moments)
