"""A model with its tokenizer, computed by transformers, and what precedes a document.

    checkpoint --StockModel.load--> transformers' model, in memory --+
    Hugging Face folder --AutoModelForCausalLM-----------------------+--> TextModel

The ids before a document are the same as in training, because otherwise the model predicts the text
worse:

    trained here    e t o   b e e n o t ...    packing puts an end-of-text (e) between documents
    elsewhere       b t o   b e                whatever the tokenizer's template puts before a text,
                                               for example Llama's begin-of-text (b)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from megaspeed.checkpoint.inspection import checkpoint_named
from megaspeed.checkpoint.reading import load_model
from megaspeed.checkpoint.run_state import NOT_STATED, RunState
from megaspeed.config.errors import ConfigError
from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer
from megaspeed.hugging_face.exporting import Precision, StockModel
from megaspeed.hugging_face.tokenizer import has_tokenizer
from megaspeed.hugging_face.verifying import load_transformers_model
from megaspeed.hugging_face.weight_files import ComputationError, HuggingFaceError, has_weights

Report = Callable[[str], None]


@dataclass(frozen=True)
class TextModel:
    """A model, and what converts text to its ids and back."""

    source: Path  # the checkpoint or the Hugging Face folder with the weights
    model: Any  # a causal language model of transformers, in evaluation mode
    tokenizer: TextTokenizer  # every id of it is below the model's vocabulary size
    opening: tuple[int, ...]  # the ids before each document
    ends: tuple[int, ...]  # each of these ids ends a document
    positions: int  # the largest number of ids that the model can see at once

    def finite(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the logits after they are checked. This is a logits processor for ``generate``.

        Raises ComputationError if one is NaN or infinite.
        """
        if not logits.isfinite().all():
            raise ComputationError(
                f"logits must be finite, but the model of {self.source} computes others: its "
                "weights are not finite, or they are too large for the precision; use an earlier "
                "checkpoint, or float32"
            )
        return logits


def load_text_model(
    place: Path,
    *,
    tokenizer: Path | None,
    opening: str,
    always_open: bool,
    device: str | None,
    precision: Precision,
    report: Report,
) -> TextModel:
    """Load a model and its tokenizer.

    Args:
        place: a Hugging Face folder, a checkpoint, a folder of checkpoints, or the folder of a run.
            Of several checkpoints, the newest complete one is used.
        tokenizer: a folder or a tokenizer.json that replaces the model's own.
        opening: what precedes a document: "end-of-text", "tokenizer" (what its template puts before
            a text), "nothing", or "auto" (what preceded it in training).
        always_open: whether an end-of-text precedes it if ``opening`` gives nothing.
        device: where the model computes; if None, on a GPU if there is one.
        precision: dtype of the weights and of the computation.
        report: receives a line for each thing that the user should know.

    Raises:
        CheckpointError: no checkpoint is complete.
        DataError: there is no tokenizer, or it has ids that the model does not have.
        HuggingFaceError: the model cannot be exported or loaded.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise DataError("--device cuda needs a GPU that torch can use, but there is none; use cpu")
    is_checkpoint = not has_weights(place)
    source = checkpoint_named(place, report) if is_checkpoint else place
    words = _load_tokenizer(source, tokenizer)
    if is_checkpoint:
        state = RunState.read(source)
        trained_here = state.imported_from is None
        _report_other_tokenizer(state, source, tokenizer, words, report)
        model = _load_checkpoint(source, state.model_section(), tokenizer, precision, report)
    else:
        trained_here = False
        model = load_transformers_model(source, strict=False, dtype=getattr(torch, precision))
    positions = _checked_positions(source, model, tokenizer, words)
    ids = opening_ids(opening, words, trained_here=trained_here)
    if always_open and not ids:
        ids = (words.end_of_text,)
    report(f"a document begins with {_described(ids, words)}; --opening changes this")
    # If the user named another tokenizer, the ids in the model's own file do not apply.
    ends = {words.end_of_text, *(() if tokenizer is not None else _end_ids(model))}
    # Without this, generate would use settings of the model's file that the user did not state.
    model.generation_config = GenerationConfig()
    return TextModel(source, model.to(device), words, ids, tuple(ends), positions)


def _load_tokenizer(source: Path, named: Path | None) -> TextTokenizer:
    if named is not None:
        return load_tokenizer(str(named), "--tokenizer")
    if not has_tokenizer(source):
        raise DataError(
            f"text must be converted to tokens, but {source} has no tokenizer; name the one it was "
            "trained with in --tokenizer"
        )
    return load_tokenizer(str(source), "the tokenizer of the model")


def _report_other_tokenizer(
    state: RunState, source: Path, named: Path | None, words: TextTokenizer, report: Report
) -> None:
    trained_with = NOT_STATED if state.data is None else state.data.tokenizer
    if trained_with not in (NOT_STATED, words.fingerprint):
        report(
            f"note: {source} was trained with the tokenizer of fingerprint {trained_with}, but "
            f"that of {named or source} is {words.fingerprint}"
        )


def _checked_positions(source: Path, model: Any, named: Path | None, words: TextTokenizer) -> int:
    """The number of positions of a model, after its sizes are checked."""
    if words.vocab_size > model.config.vocab_size:
        raise DataError(
            f"every token id must be below the model's vocab_size: that of {source} is "
            f"{model.config.vocab_size}, but the tokenizer {named or source} has "
            f"{words.vocab_size} entries; name the one it was trained with in --tokenizer"
        )
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        raise HuggingFaceError(
            f"a model's config.json must state max_position_embeddings, but that of {source} does "
            "not; add it"
        )
    return positions


def _end_ids(model: Any) -> Sequence[int]:
    """The ids that end a text according to the model's own files."""
    ids: int | list[int] | None = model.generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else ids or ()


def _load_checkpoint(
    checkpoint: Path,
    config: ModelConfig,
    tokenizer: Path | None,
    precision: Precision,
    report: Report,
) -> Any:
    """Return transformers' model of a checkpoint; ours if transformers has no such model."""
    try:
        return StockModel.of(checkpoint, tokenizer=tokenizer, precision=precision).load()
    except ConfigError as error:
        report(f"note: megaspeed computes this model, because it cannot be exported: {error}")
        return _OwnModel(checkpoint, config, getattr(torch, precision)).eval()


class _OwnModel(PreTrainedModel, GenerationMixin):
    """Our model in a class of transformers, so that ``generate`` runs it, without a cache."""

    config_class = PreTrainedConfig

    def __init__(self, checkpoint: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        sizes = {"vocab_size", "num_hidden_layers", "max_position_embeddings"}
        super().__init__(PreTrainedConfig(**config.model_dump(include=sizes)))
        self.model = load_model(checkpoint, dtype=dtype)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        """Compute logits (B, S, V) of ids (B, S)."""
        return CausalLMOutputWithPast(logits=self.model(input_ids))

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        """Pass all ids at each step, because there is no cache of earlier ones."""
        return {"input_ids": input_ids}


def opening_ids(opening: str, tokenizer: TextTokenizer, *, trained_here: bool) -> tuple[int, ...]:
    """The ids before a document; empty if there are none."""
    if opening == "auto":
        opening = "end-of-text" if trained_here else "tokenizer"
    if opening == "end-of-text":
        return (tokenizer.end_of_text,)
    return _ids_before_text(tokenizer) if opening == "tokenizer" else ()


def _ids_before_text(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """What the template puts before a text. What it puts after one is ignored.

    This can only be seen in an encoded text. Texts are tried until one has an id of its own.
    """
    for text in ("a", *tokenizer.tokenizer.get_vocab()):
        encoding = tokenizer.tokenizer.encode(text)
        added = encoding.special_tokens_mask  # 1 for each id that the template added
        if 0 in added:
            return tuple(encoding.ids[: added.index(0)])
    return ()


def _described(ids: Sequence[int], tokenizer: TextTokenizer) -> str:
    """Tokens with their ids; if there are none, what an empty prompt begins with."""
    if not ids:
        return f"nothing, but an empty prompt with {_described([tokenizer.end_of_text], tokenizer)}"
    return ", ".join(f"{tokenizer.tokenizer.id_to_token(each)} (id {each})" for each in ids)
