"""A model as stock transformers loads and runs it: fp32, on the CPU, without our code."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megaspeed.hugging_face.errors import HuggingFaceError


class Stock:
    """A causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Of every position of one prompt: (S,) -> (S, V)."""
        logits: Tensor = self._model(ids[None], use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def continued(self, ids: Tensor, tokens: int) -> Tensor:
        """The prompt (S,) and so many tokens after it, each the one of the largest logit."""
        text, unread, cache = ids, ids, None
        for _ in range(tokens):
            answer = self._model(unread[None], past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            unread = answer.logits[0, -1].argmax()[None]
            text = torch.cat((text, unread))
        return text


def load_stock(folder: Path, *, strict: bool) -> Stock:
    """The model in a folder, through AutoModelForCausalLM.

    Args:
        folder: with config.json and weights.
        strict: whether a tensor that the model does not have is an error.

    Raises:
        HuggingFaceError: it cannot be loaded, or not every tensor of it is there.
    """
    with _silence():
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
    return Stock(model)


@contextmanager
def _silence() -> Iterator[None]:
    """Without transformers' bars and warnings; what matters of them is in the error."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
