"""A checkpoint's model with the tokenizer of its text: token ids in, logits out.

rows of ids        a b c d          a shorter row ends early; causal attention never looks back
of any length      e f . .          from what stands behind its end
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaspeed.checkpoint.run_state import NOT_STATED, RunState
from megaspeed.checkpoint.whole_model import checkpoint_named, load_whole_model, saved_tokenizer
from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer
from megaspeed.inference.errors import InferenceError
from megaspeed.inference.opening import Opening, opening_ids
from megaspeed.model.gpt import GPT

Tell = Callable[[str], None]

_LARGEST_LOGITS_BYTES = 1 << 30


@dataclass(frozen=True)
class TextModel:
    """A model that computes, and what turns text into its ids and back.

    Attributes:
        checkpoint: the folder that the weights are from.
        config: the model's shape.
        model: whole, in evaluation mode.
        tokenizer: every id of it is below the model's ``vocab_size``.
        opening: the ids that open a document.
    """

    checkpoint: Path
    config: ModelConfig
    model: GPT
    tokenizer: TextTokenizer
    opening: tuple[int, ...]

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, S, V) of B rows of ids, in fp32; S is the length of the longest.

        Of a shorter row those behind its end mean nothing.

        Raises:
            InferenceError: one that counts is not finite.
        """
        lengths = [len(row) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
        device = next(self.model.parameters()).device
        logits: Tensor = self.model(ids.to(device)).float()
        for row_logits, length in zip(logits, lengths, strict=True):
            if not row_logits[:length].isfinite().all():
                raise InferenceError(
                    f"the model of {self.checkpoint} gives logits that are not finite: its weights "
                    "are not, or they are too large for the precision; take an older checkpoint, "
                    "or float32"
                )
        return logits

    def rows_at_once(self, length: int) -> int:
        """Rows of so many ids whose logits, of every position, take 1 GiB at most; at least one."""
        return max(1, _LARGEST_LOGITS_BYTES // (4 * length * self.config.vocab_size))


def load_text_model(
    place: Path,
    *,
    tokenizer: str | None,
    opening: Opening,
    always_open: bool,
    device: torch.device,
    dtype: torch.dtype,
    tell: Tell,
) -> TextModel:
    """The newest whole checkpoint's model, and the tokenizer that it carries.

    Args:
        place: a checkpoint, a folder of checkpoints, or the folder of a run.
        tokenizer: the path of another tokenizer; None for the checkpoint's own.
        opening: what opens a document.
        always_open: whether an end-of-text opens it where nothing else does.
        device, dtype: where and in what the model computes.
        tell: is told what the user should know and need not mend.

    Raises:
        CheckpointError: no checkpoint is whole.
        DataError: there is no tokenizer, or it has ids that the model has not.
    """
    checkpoint = checkpoint_named(place, tell)
    state = RunState.read(checkpoint)
    config = state.model_section()
    text_tokenizer = _tokenizer_of(checkpoint, state, tokenizer, tell)
    if text_tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"every token id must be below the model's vocab_size: that of {checkpoint} is "
            f"{config.vocab_size}, and the tokenizer {tokenizer or checkpoint} has "
            f"{text_tokenizer.vocab_size} entries; name the one it was trained with in --tokenizer"
        )
    model = load_whole_model(checkpoint, device=device, dtype=dtype)
    ids = opening_ids(opening, text_tokenizer, imported=state.imported_from is not None)
    if always_open and not ids:
        ids = (text_tokenizer.end_of_text,)
    tell(f"a document opens with {_opening_told(ids, text_tokenizer)}; --opening can say otherwise")
    return TextModel(checkpoint, config, model, text_tokenizer, ids)


def _tokenizer_of(
    checkpoint: Path, state: RunState, given: str | None, tell: Tell
) -> TextTokenizer:
    source = saved_tokenizer(checkpoint) if given is None else given
    if source is None:
        raise DataError(
            f"text is made of a tokenizer's tokens, and {checkpoint} carries no tokenizer; name "
            "the one it was trained with in --tokenizer"
        )
    setting = "the tokenizer of the checkpoint" if given is None else "--tokenizer"
    tokenizer = load_tokenizer(str(source), setting)
    trained_with = NOT_STATED if state.data is None else state.data.tokenizer
    if trained_with not in (NOT_STATED, tokenizer.fingerprint):
        tell(
            f"note: {checkpoint} was trained with the tokenizer of fingerprint {trained_with}, "
            f"and that of {source} is {tokenizer.fingerprint}"
        )
    return tokenizer


def _opening_told(ids: Sequence[int], tokenizer: TextTokenizer) -> str:
    """What opens a document; where nothing does, also what one without text begins with."""
    if ids:
        return _spelled(ids, tokenizer)
    return f"nothing, and one without a prompt with {_spelled([tokenizer.end_of_text], tokenizer)}"


def _spelled(ids: Sequence[int], tokenizer: TextTokenizer) -> str:
    """Tokens with their ids."""
    return ", ".join(f"{tokenizer.tokenizer.id_to_token(each)} (id {each})" for each in ids)
