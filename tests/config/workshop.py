"""A folder with valid files, and configurations that name them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megaspeed.config.document import merge
from tests.config.hugging_face_files import LLAMA

Values = dict[str, Any]


class Workshop:
    """A folder with valid files, and the configurations that are written into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text.txt").write_text("A text of some words, to be read. " * 50)
        (folder / "held_out.txt").write_text("Another one. " * 50)
        (folder / "ids.bin").write_bytes(bytes(4096))
        self.tokenizer = train_tokenizer(folder / "tokenizer")
        self.model = folder / "hf"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(LLAMA))
        self.number = 0
        self.good: Values = {
            "model": {"preset": "llama-nano"},
            "parallel": {"pipeline": 2, "tensor": 1, "sequence_parallel": False},
            "data": {
                "train": [str(folder / "text.txt")],
                "validation": [str(folder / "held_out.txt")],
                "sequence_length": 32,
            },
            "training": {"steps": 100, "run_dir": str(folder / "run")},
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        }

    def new_folder(self) -> Path:
        self.number += 1
        folder = self.folder / f"{self.number}"
        folder.mkdir()
        return folder

    def write(self, values: Values | bytes) -> Path:
        """Write a configuration with these values, or with this text."""
        file = self.new_folder() / "config.json"
        file.write_bytes(values if isinstance(values, bytes) else json.dumps(values).encode())
        return file

    def with_data(self, **keys: Any) -> Values:
        return merge(self.good, {"data": keys})

    def with_model(self, path: Path) -> Values:
        """Return values that take the model from a Hugging Face folder."""
        return merge(self.good, {"model": {"preset": None, "from_hf": str(path)}})


def train_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE of 300 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["some words to train it"], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
