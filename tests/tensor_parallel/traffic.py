"""The messages of a rank, as torch passes them to the process group."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Message:
    """One collective: torch's name of it, and the elements of its largest tensor."""

    collective: str
    elements: int


class Traffic(TorchDispatchMode):
    """Records every collective of the forward and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.messages.append(Message(function._opname, max(sizes)))
        return function(*args, **(kwargs or {}))
