"""ZeRO-3: in which order a pass enters and leaves the modules of a pipeline stage.

DeepSpeed gathers a module's own parameters when a pass enters it and lets go of them when the pass
leaves it. Forward runs down the tree of modules, backward runs up it:

    forward     model [embedding [tokens positions dropout] blocks.0 [...] ... head [norm output]]
    backward    the same brackets from the right

A module whose inputs need no gradient (the token embedding, and what encloses it) is not left in
the backward pass; DeepSpeed lets go of these at its end. With recomputation the backward of a block
runs the block's forward within it, from the first operation that needs what forward did not keep
up to the last one whose inputs backward needs (torch's "early stop").
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megaspeed.analysis.costs.local_parameters import local_parameters
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, layer_count
from megaspeed.pipeline.stages import layers_of_stages

Pass = Literal["forward", "backward"]
Kind = Literal["enter", "leave", "end"]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A pass enters or leaves a module, or comes to its end and lets go of the module.

    Attributes:
        kind: enter: gather; leave: let go; end: let go as a backward pass does at its end.
        module: full name.
        parameters: the module's own, by the name under which each is held once.
    """

    kind: Kind
    module: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Module:
    name: str
    parameters: tuple[str, ...] = ()
    children: tuple["_Module", ...] = ()
    inputs_need_gradients: bool = True
    recomputed_up_to: str | None = field(default=None)
    """A block that is recomputed: the module in whose forward the recomputation ends."""

    def visit(self, kind: Kind) -> Visit:
        return Visit(kind=kind, module=self.name, parameters=self.parameters)


def visits_of_passes(run: Run, pipeline_stage: int) -> dict[Pass, list[Visit]]:
    """Of one micro-batch's passes, recomputation included."""
    model = _model(run, pipeline_stage)
    ends = [module.visit("end") for module in _never_left(model)]
    return {"forward": list(_forward(model)), "backward": [*_backward(model), *ends]}


def _forward(module: _Module) -> Iterator[Visit]:
    yield module.visit("enter")
    for child in module.children:
        yield from _forward(child)
    yield module.visit("leave")


def _backward(module: _Module) -> Iterator[Visit]:
    if module.recomputed_up_to is None:
        yield from _plain_backward(module)
        return
    for visit in _plain_backward(module):
        yield visit
        if visit.kind == "enter" and visit.module == module.recomputed_up_to:
            yield from _recomputation(module)


def _plain_backward(module: _Module) -> Iterator[Visit]:
    yield module.visit("enter")
    for child in reversed(module.children):
        yield from _backward(child)
    if module.inputs_need_gradients:
        yield module.visit("leave")


def _recomputation(block: _Module) -> Iterator[Visit]:
    """The block's forward, which ends within the module in whose backward it was asked for."""
    for visit in _forward(block):
        yield visit
        if visit.module == block.recomputed_up_to:
            return


def _never_left(module: _Module) -> Iterator[_Module]:
    if not module.inputs_need_gradients:
        yield module
    for child in module.children:
        yield from _never_left(child)


def _model(run: Run, pipeline_stage: int) -> _Module:
    config = run.config.model
    owned = _parameters_of_modules(run, pipeline_stage)
    layers = layers_of_stages(run)[pipeline_stage]
    last = layer_count(config) - 1

    def leaf(name: str, *, inputs_need_gradients: bool = True) -> _Module:
        return _Module(
            name=name,
            parameters=owned.get(name, ()),
            inputs_need_gradients=inputs_need_gradients,
        )

    def embedding() -> _Module:
        tables = ["embedding.tokens"]
        if config.architecture == "gpt2":
            tables.append("embedding.positions")
        return _Module(
            name="embedding",
            children=(
                *(leaf(table, inputs_need_gradients=False) for table in tables),
                leaf("embedding.dropout"),
            ),
            inputs_need_gradients=False,
        )

    def block(name: str) -> _Module:
        attention = [f"{name}.attention.qkv", f"{name}.attention.output"]
        if config.attention_dropout > 0:  # where nothing is dropped it is not called
            attention.insert(1, f"{name}.attention.dropout")
        up = "up" if config.architecture == "gpt2" else "gate_up"
        mlp = [f"{name}.mlp.{up}", f"{name}.mlp.down"]
        recomputes = run.config.parallel.activation_checkpointing == "full"
        return _Module(
            name=name,
            children=(
                leaf(f"{name}.attention_norm"),
                _Module(name=f"{name}.attention", children=tuple(map(leaf, attention))),
                leaf(f"{name}.attention_dropout"),
                leaf(f"{name}.mlp_norm"),
                _Module(name=f"{name}.mlp", children=tuple(map(leaf, mlp))),
                leaf(f"{name}.mlp_dropout"),
            ),
            # What the last matrix multiplies is needed last: a dropout keeps nothing.
            recomputed_up_to=f"{name}.mlp.down" if recomputes else None,
        )

    def layer(index: int) -> _Module:
        if index == 0:
            return embedding()
        if index < last:
            return block(f"blocks.{index - 1}")
        return _Module(name="head", children=(leaf("head.norm"), leaf("head.output")))

    return _Module(
        name="",
        children=tuple(map(layer, layers)),
        inputs_need_gradients=0 not in layers,
    )


def _parameters_of_modules(run: Run, pipeline_stage: int) -> dict[str, tuple[str, ...]]:
    owned: dict[str, tuple[str, ...]] = {}
    names = [parameter.name for parameter in local_parameters(run, pipeline_stage)]
    for name in names:
        module = name.rpartition(".")[0]
        owned[module] = (*owned.get(module, ()), name)
    if EMBEDDING_WEIGHT in names and HEAD_WEIGHT not in names:  # tied within the stage
        owned[HEAD_WEIGHT.rpartition(".")[0]] = (EMBEDDING_WEIGHT,)
    return owned
