"""A model as stock transformers loads and runs it: on the CPU, without our code."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megaspeed.data.tokenizer import quiet_transformers
from megaspeed.hugging_face.errors import HuggingFaceError


class TransformersModel:
    """A causal language model of transformers, in fp32 at first."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def to_double(self) -> None:
        """From now on it computes in fp64.

        Parameters alone: rotary frequencies stay what they are, fp32 as in every implementation.
        """
        for parameter in self._model.parameters():  # one at a time; a tied one is there once
            parameter.data = parameter.data.double()

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Of every position of one prompt: (S,) -> (S, V)."""
        with _StayDouble():
            logits: Tensor = self._model(ids[None], use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def continued(self, ids: Tensor, tokens: int) -> Tensor:
        """The prompt (S,) and so many tokens after it, each the one of the largest logit."""
        text, unread, cache = ids, ids, None
        for _ in range(tokens):
            with _StayDouble():
                answer = self._model(unread[None], past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            unread = answer.logits[0, -1].argmax()[None]
            text = torch.cat((text, unread))
        return text


class _StayDouble(TorchFunctionMode):
    """A tensor in fp64 stays so where it is asked to become fp32.

    transformers 5.23 rounds to fp32 within LlamaRMSNorm (modeling_llama.py, `forward`), whatever
    the model is in; with it, fp64 would be no more exact than fp32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(map(_doubled, args))
            kwargs = {name: _doubled(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load_transformers_model(folder: Path, *, strict: bool) -> TransformersModel:
    """The model in a folder, through AutoModelForCausalLM.

    Args:
        folder: with config.json and weights.
        strict: whether a tensor that the model does not have is an error.

    Raises:
        HuggingFaceError: it cannot be loaded, or not every tensor of it is there.
    """
    with quiet_transformers():
        try:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises many kinds
            raise HuggingFaceError(f"transformers cannot load {folder}: {error}") from error
    problems = {
        "lacks": loading["missing_keys"],
        "has with another shape": loading["mismatched_keys"],
        "has beside the model's": loading["unexpected_keys"] if strict else (),
    }
    found = [
        f"{what} {', '.join(sorted(map(str, keys)))}" for what, keys in problems.items() if keys
    ]
    if found:
        raise HuggingFaceError(f"transformers finds that {folder} {'; '.join(found)}")
    return TransformersModel(model)
