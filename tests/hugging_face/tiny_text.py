"""Tiny models with a tiny tokenizer, and a tiny checkpoint."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.run_state import DataIdentity
from megaspeed.config.model import ModelConfig
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer
from megaspeed.hugging_face.text_model import TextModel
from tests.checkpoint.written import seal, write_checkpoint
from tests.model.stock_models import stock_of

LICENSE = Path(__file__).parents[2] / "LICENSE"


def write_tokenizer(file: Path, vocab_size: int = 301) -> Path:
    """Write a byte-level BPE trained on the license. Its last ids are pairs of letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(LICENSE)], trainer)
    tokenizer.save(str(file))
    return file


def tiny_tokenizer(folder: Path) -> TextTokenizer:
    """Return a tokenizer of 301 entries, in which 0 ends a text."""
    return load_tokenizer(str(write_tokenizer(folder / "tokenizer.json")))


def tiny_model(
    config: ModelConfig, folder: Path, opening: tuple[int, ...] = (0,)
) -> tuple[TextModel, PreTrainedModel]:
    """Return a model with random weights and the tiny tokenizer, and its stock model alone."""
    stock = stock_of(config)
    positions = config.max_position_embeddings
    return TextModel(folder, stock, tiny_tokenizer(folder), opening, (0,), positions), stock


def checkpoint_of_text(root: Path, trained_with: str | None = None) -> Path:
    """Write a checkpoint of a GPT-2 of 301 ids with its tokenizer, in the run folder ``root``."""
    fingerprint = trained_with or tiny_tokenizer(root).fingerprint
    data = DataIdentity(corpus="c0ffee", tokenizer=fingerprint, sequence_length=16, seed=5)
    checkpoint = write_checkpoint(CheckpointFolder(root / "checkpoints"), 100, data=data)
    write_tokenizer(checkpoint / "tokenizer.json")
    seal(checkpoint)
    return checkpoint
