"""What tensor parallelism sends, one micro-batch after another.

h = (B, S, D) in the parameters' type. Column- and row-parallel layers come in pairs, one in the
attention and one in the MLP of each block (Shoeybi et al. 2019, section 3), whose conjugate
collectives f and g (``tensor_parallel.collectives``) send

                          forward                       backward
    block                 2 all-reduce h (g)            2 all-reduce h (f)
    embedding             1 all-reduce h (g)
    head                                                1 all-reduce h (f)
    loss                  all-reduce 3 numbers a token  (Shoeybi et al. 2019, section 3)

with sequence parallelism (Korthikanti et al. 2022, section 4.2.2)

    block                 2 all-gather, 2 reduce-       4 all-gather (2 of them gather inputs once
                          scatter h                     more, for dA), 2 reduce-scatter h
    embedding             1 all-reduce h                1 all-gather h
    head                  1 all-gather h                1 all-gather, 1 reduce-scatter h
    norms, biases                                       all-reduce of their gradients

and an all-reduce of the gradients of norms of each head, and of key/value heads that several ranks
hold.

Recomputation runs a block's forward again, up to the last tensor that its backward needs: what the
row-parallel layer of the MLP multiplies. Its g is left out.
"""

from megaspeed.analysis.costs.collective_cost import Collective, Messages
from megaspeed.analysis.costs.hidden_states import whole_hidden_bytes, whole_tokens
from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import block_rows, layer_count, parameters_of
from megaspeed.pipeline.stages import layers_of_stages
from megaspeed.tensor_parallel.plan import key_value_replicas


def add_tensor_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """Adds one step's messages of a rank of ``pipeline_stage``."""
    tp = run.grid.tp
    if tp == 1:
        return
    layers = layers_of_stages(run)[pipeline_stage]
    last = layer_count(run.config.model) - 1
    blocks = sum(0 < layer < last for layer in layers)
    sequence_parallel = run.config.parallel.sequence_parallel
    hidden = _sequence_collectives if sequence_parallel else _whole_collectives
    micro_batches = run.batch.gradient_accumulation_steps

    def add(collective: Collective, message_bytes: int) -> None:
        messages.add("tp", collective, micro_batches * message_bytes, ranks=tp)

    for collective, count in hidden(run, blocks, 0 in layers, last in layers).items():
        add(collective, count * whole_hidden_bytes(run))
    if last in layers:
        add("all_reduce", _loss_bytes(run))
    add("all_reduce", _partial_gradient_bytes(run, layers))
    add("all_reduce", blocks * _shared_head_gradient_bytes(run))


def _whole_collectives(
    run: Run, blocks: int, has_embedding: bool, has_head: bool
) -> dict[Collective, int]:
    """How many messages of h there are in one micro-batch."""
    recomputed = 1 if _recomputes(run) else 0
    return {"all_reduce": blocks * (4 + recomputed) + has_embedding + has_head}


def _sequence_collectives(
    run: Run, blocks: int, has_embedding: bool, has_head: bool
) -> dict[Collective, int]:
    """The same where activations between the pairs are split along the sequence."""
    recomputed = 1 if _recomputes(run) else 0
    return {
        "all_reduce": int(has_embedding),
        "all_gather": blocks * (6 + 2 * recomputed) + has_embedding + 2 * has_head,
        "reduce_scatter": blocks * (4 + recomputed) + has_head,
    }


def _recomputes(run: Run) -> bool:
    return run.config.parallel.activation_checkpointing == "full"


def _loss_bytes(run: Run) -> int:
    """Maximum in the logits' type; sum of exponentials and target's logit in fp32."""
    return whole_tokens(run) * (BYTES_OF[run.precision] + 2 * BYTES_OF["fp32"])


def _partial_gradient_bytes(run: Run, layers: range) -> int:
    """Replicated parameters of which each rank sees a part: of the heads, or of the tokens."""
    elements = sum(
        parameter.elements
        for parameter in parameters_of(run.config.model, layers).values()
        if parameter.split == "each head"
        or (
            parameter.split == "replicated"
            and parameter.row.kind != "embedding"
            and run.config.parallel.sequence_parallel
        )
    )
    return elements * BYTES_OF[run.precision]


def _shared_head_gradient_bytes(run: Run) -> int:
    """Of one block: each rank's part lies at its head's place among zeros (``shared_rows``)."""
    model, tp = run.config.model, run.grid.tp
    replicas = key_value_replicas(model, tp)
    if replicas == 1:
        return 0
    qkv = block_rows(model)["attention.qkv"]
    assert qkv.columns is not None
    rows = tp // replicas * 2 * model.head_dim  # a key and a value head of each part
    return rows * (qkv.columns + qkv.bias) * BYTES_OF[run.precision]
