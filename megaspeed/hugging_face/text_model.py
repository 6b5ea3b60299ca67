"""A model with its tokenizer, and continuations of prompts by transformers' `generate`.

    checkpoint --export_model--> temporary folder --+
    Hugging Face folder ----------------------------+--AutoModelForCausalLM--> TextModel

The ids before a document are the same as in training, because otherwise the model predicts the text
worse:

    trained here    e t o   b e e n o t ...    packing puts an end-of-text (e) between documents
    elsewhere       b t o   b e                whatever the tokenizer's template puts before a text,
                                               for example Llama's begin-of-text (b)
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from megaspeed.checkpoint.inspection import checkpoint_named
from megaspeed.checkpoint.reading import load_model
from megaspeed.checkpoint.run_state import NOT_STATED, RunState
from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer, quiet_transformers
from megaspeed.files.lock import Locked, lock
from megaspeed.hugging_face.exporting import Precision, export_model
from megaspeed.hugging_face.tokenizer import has_tokenizer
from megaspeed.hugging_face.verifying import load_transformers_model
from megaspeed.hugging_face.weight_files import ComputationError, HuggingFaceError, has_weights

Report = Callable[[str], None]

_LOWEST_TEMPERATURE = 1e-6
"""Below it the likeliest token is taken, because logits divided by it could overflow in fp32."""

_TEMPORARY_PREFIX, _LOCK = "megaspeed-export-", ".lock"
_UNLOCKED_SECONDS = 60


@dataclass(frozen=True)
class TextModel:
    """A model, and what converts text to its ids and back.

    Attributes:
        source: the checkpoint or the Hugging Face folder with the weights.
        model: a causal language model of transformers, in evaluation mode.
        tokenizer: every id of it is below the model's vocabulary size.
        opening: the ids before each document.
        ends: ids. Each of them ends a document.
        positions: the largest number of ids that the model can see at once.
    """

    source: Path
    model: Any
    tokenizer: TextTokenizer
    opening: tuple[int, ...]
    ends: tuple[int, ...]
    positions: int

    def finite(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The logits, after they are checked. This is a logits processor for `generate`.

        Raises:
            ComputationError: one is NaN or infinite.
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
    device: str,
    precision: Precision,
    report: Report,
) -> TextModel:
    """Loads a model and its tokenizer.

    Args:
        place: a Hugging Face folder, a checkpoint, a folder of checkpoints, or the folder of a run.
            Of several checkpoints, the newest complete one is used.
        tokenizer: a folder or a tokenizer.json that replaces the model's own.
        opening: what precedes a document: "end-of-text", "tokenizer" (what its template puts before
            a text), "nothing", or "auto" (what preceded it in training).
        always_open: whether an end-of-text precedes it if ``opening`` gives nothing.
        device: where the model computes.
        precision: dtype of the weights and of the computation.
        report: receives a line for each thing that the user should know.

    Raises:
        CheckpointError: no checkpoint is complete.
        DataError: there is no tokenizer, or it has ids that the model does not have.
        HuggingFaceError: the model cannot be exported or loaded.
    """
    state, source = None, place
    if not has_weights(place):
        source = checkpoint_named(place, report)
        state = RunState.read(source)
    text_tokenizer = _load_tokenizer(source, tokenizer)
    if state is None:
        model = load_transformers_model(source, strict=False, dtype=getattr(torch, precision))
    else:
        _report_other_tokenizer(state, source, tokenizer, text_tokenizer, report)
        model = _load_checkpoint(source, state.model_section(), tokenizer, precision, report)
    if text_tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"every token id must be below the model's vocab_size: that of {source} is "
            f"{model.config.vocab_size}, but the tokenizer {tokenizer or source} has "
            f"{text_tokenizer.vocab_size} entries; name the one it was trained with in --tokenizer"
        )
    trained_here = state is not None and state.imported_from is None
    ids = opening_ids(opening, text_tokenizer, trained_here=trained_here)
    if always_open and not ids:
        ids = (text_tokenizer.end_of_text,)
    report(f"a document begins with {_described(ids, text_tokenizer)}; --opening changes this")
    # If the user named another tokenizer, the ids in the model's own file do not apply.
    ends = () if tokenizer is not None else _end_ids(model)
    # Without this, generate would use settings of the model's file that the user did not state.
    model.generation_config = GenerationConfig()
    all_ends = tuple({text_tokenizer.end_of_text, *ends})
    positions = _positions(source, model)
    return TextModel(source, model.to(device), text_tokenizer, ids, all_ends, positions)


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
    state: RunState, source: Path, named: Path | None, tokenizer: TextTokenizer, report: Report
) -> None:
    trained_with = NOT_STATED if state.data is None else state.data.tokenizer
    if trained_with not in (NOT_STATED, tokenizer.fingerprint):
        report(
            f"note: {source} was trained with the tokenizer of fingerprint {trained_with}, but "
            f"that of {named or source} is {tokenizer.fingerprint}"
        )


def _positions(source: Path, model: Any) -> int:
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        raise HuggingFaceError(
            f"a model's config.json must state max_position_embeddings, but that of {source} does "
            "not; add it"
        )
    return positions


def _end_ids(model: Any) -> Sequence[int]:
    """The ids that end a text according to the model's generation_config.json."""
    ids: int | list[int] | None = model.generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else ids or ()


def _load_checkpoint(
    checkpoint: Path,
    config: ModelConfig,
    tokenizer: Path | None,
    precision: Precision,
    report: Report,
) -> Any:
    """The model as transformers loads its export; ours if transformers has no such model."""
    dtype: torch.dtype = getattr(torch, precision)
    try:
        hugging_face_config(config)
    except ConfigError as error:
        report(f"note: megaspeed computes this model, because it cannot be exported: {error}")
        return _OwnModel(checkpoint, config, dtype).eval()
    with _temporary_folder() as temporary:
        folder = temporary / "model"
        export_model(
            checkpoint,
            folder,
            tokenizer=tokenizer,
            precision=precision,
            verify=False,
            report=lambda line: report(line) if line.startswith("note: ") else None,
        )
        return load_transformers_model(folder, strict=True, dtype=dtype)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A new folder in $TMPDIR, removed after the block.

    A killed process leaves its folder behind. The system releases its lock in the folder, so the
    next call sees that nobody uses the folder, and removes it. Folders without a lock are kept.
    """
    for left in Path(gettempdir()).glob(f"{_TEMPORARY_PREFIX}*/{_LOCK}"):
        with suppress(Locked, OSError):
            # A process may have made its lock file just now, and not have locked it yet.
            if time.time() - left.parent.stat().st_mtime > _UNLOCKED_SECONDS:
                with lock(left):
                    shutil.rmtree(left.parent)
    with TemporaryDirectory(prefix=_TEMPORARY_PREFIX) as name, lock(Path(name) / _LOCK):
        yield Path(name)


class _OwnModel(PreTrainedModel, GenerationMixin):
    """Our model in a class of transformers, so that `generate` runs it, without a cache."""

    config_class = PreTrainedConfig

    def __init__(self, checkpoint: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        sizes = {"vocab_size", "max_position_embeddings"}
        super().__init__(PreTrainedConfig(**config.model_dump(include=sizes)))
        self.model = load_model(checkpoint, dtype=dtype)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        """Logits (B, S, V) of ids (B, S)."""
        return CausalLMOutputWithPast(logits=self.model(input_ids))


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


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only this many likeliest tokens are drawn (Fan et al. 2018); 0 for all.
        top_p: only the likeliest tokens that together have this probability are drawn (Holtzman et
            al. 2020); 1 for all.
        max_tokens: largest number of tokens of a continuation.
        seed: seed of all draws.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    max_tokens: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Continuation:
    """One sample.

    Attributes:
        prompt: the text that is continued.
        number: number of the sample among those of the prompt, from 1.
        text: the text that the model wrote, without the prompt.
        ids: its tokens, without the one that ends the document.
        ended: whether the model ended the document; if not, the limit of tokens did.
    """

    prompt: str
    number: int
    text: str
    ids: tuple[int, ...]
    ended: bool


def continue_prompt(model: TextModel, prompt: str, number: int, sampling: Sampling) -> Continuation:
    """One continuation of a prompt, a function of (seed, prompt, number) up to rounding.

    If the prompt is empty and no id precedes a document, it begins with an end-of-text.

    Raises:
        ComputationError: the model computes NaN or infinite logits.
    """
    (text,) = model.tokenizer.encode([prompt])
    before = [*model.opening, *text] or [model.tokenizer.end_of_text]
    digest = hashlib.sha256(f"sample/{sampling.seed}/{number}/{prompt}".encode()).digest()
    devices = [model.model.device] if model.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), quiet_transformers():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = _draw(model, before, sampling)
    ended = drawn[-1] in model.ends
    if ended:
        drawn.pop()
    return Continuation(prompt, number, _text_after(model, before, drawn), tuple(drawn), ended)


def _draw(model: TextModel, before: list[int], sampling: Sampling) -> list[int]:
    """The ids that follow ``before``, up to one that ends the document or the limit of tokens.

    One call computes them as long as all ids fit into the model's positions. After that, the model
    sees its last ``positions`` ids, which shift with each token, so each needs a call.
    """
    how: dict[str, Any] = {"do_sample": sampling.temperature >= _LOWEST_TEMPERATURE}
    if how["do_sample"]:
        how |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    ids = list(before)
    end = len(ids) + sampling.max_tokens
    while len(ids) < end and not (len(ids) > len(before) and ids[-1] in model.ends):
        seen = torch.tensor([ids[-model.positions :]], device=model.model.device)
        room = model.positions + 1 - seen.shape[1]  # the last token is drawn, but not seen
        config = GenerationConfig(
            max_new_tokens=min(end - len(ids), room),
            eos_token_id=list(model.ends),
            pad_token_id=model.ends[0],
            use_cache=not isinstance(model.model, _OwnModel),
            **how,
        )
        found = model.model.generate(
            seen,
            attention_mask=torch.ones_like(seen),
            generation_config=config,
            logits_processor=[model.finite],
        )
        ids += found[0, seen.shape[1] :].tolist()
    return ids[len(before) :]


def _text_after(model: TextModel, before: list[int], drawn: list[int]) -> str:
    """The text of ``drawn``, decoded after ``before``.

    Some tokenizers drop the first space of a text, and the ids of one character may be in both.
    """
    decode = model.tokenizer.tokenizer.decode
    prompt = decode(before, skip_special_tokens=True)
    both = decode(before + drawn, skip_special_tokens=True)
    return both.removeprefix(prompt) if both.startswith(prompt) else decode(drawn)
