"""Bad configurations, options and files: each is a valid one with one change, drawn from a seed.

`Workshop(folder, seed).groups()` writes them, and gives the options of `megaspeed check` for each.
"""

import copy
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megaspeed.config.document import merge
from megaspeed.config.foreign_keys import REFUSED
from megaspeed.config.validation import all_key_paths

Values = dict[str, Any]

_RAW = {"<NaN>": "NaN", "<Infinity>": "-Infinity", "<1e999>": "1e999", "<huge>": "1" + "0" * 400}
"""Numbers that Python does not write as JSON: marker -> JSON text."""

_COUNT = (0, -3, 2.5, "7", True, [], {}, *_RAW)
_NATURAL = (-1, 1.5, "1", True, [], *_RAW)
_POSITIVE = (0, -1e-3, "1e-3", True, [], {}, *_RAW)
_FRACTION = (-0.1, 1, 1.5, "0.1", True, [], *_RAW)
_BOOLEAN: Any = (1, 0, "true", "yes", [], {}, 0.0)
_CHOICE: Any = ("nonsense", "", 3, True, [], {})
_PATH: Any = (3, True, {}, "", "a\0b", "n" * 300, "a/" * 3000)
_SOURCES: Any = ("one.txt", 3, {}, [], [3], [""], ["a\0b"], [{}], [{"path": 3}], ["/no/such/file"])
_RATES: Any = ([0.9], [0.9, 1.0], [0.9, "x"], 0.9, {}, [0.9, 0.95, 0.99], ["<NaN>", 0.9])

_BAD_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "model.vocab_size",
            "model.hidden_size",
            "model.num_hidden_layers",
            "model.num_attention_heads",
            "model.num_key_value_heads",
            "model.head_dim",
            "model.intermediate_size",
            "model.max_position_embeddings",
            "model.sliding_window",
            "parallel.data",
            "parallel.pipeline",
            "parallel.tensor",
            "data.sequence_length",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        ),
        (*_COUNT, 10**10),
    ),
    **dict.fromkeys(
        (
            "training.steps",
            "training.log_interval",
            "training.eval_batches",
            "training.keep_last",
            "training.max_skipped_steps",
            "scheduler.params.warmup_num_steps",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        ("training.seed", "training.eval_interval", "training.save_interval", "data.seed"),
        _NATURAL,
    ),
    **dict.fromkeys(
        ("optimizer.params.lr", "optimizer.params.eps", "model.rms_norm_eps", "model.rope_theta"),
        _POSITIVE,
    ),
    **dict.fromkeys(("model.attention_dropout", "model.residual_dropout"), _FRACTION),
    **dict.fromkeys(
        ("parallel.sequence_parallel", "training.async_save", "bf16.enabled", "model.qkv_bias"),
        _BOOLEAN,
    ),
    **dict.fromkeys(
        ("model.architecture", "model.mlp", "parallel.schedule", "optimizer.type"), _CHOICE
    ),
    **dict.fromkeys(
        ("model", "parallel", "data", "training", "optimizer", "scheduler", "zero_optimization"),
        (3, "x", [], True, 1.5),
    ),
    "zero_optimization.stage": (4, -1, "1", True, 1.5, []),
    "zero_optimization.reduce_bucket_size": (-1, 2.5, "5e8", True, [], *_RAW),
    "gradient_clipping": (-0.5, "x", True, [], *_RAW),
    "optimizer.params.betas": _RATES,
    "training.run_dir": _PATH,
    "data.tokenizer": (*_PATH, "/no/such/tokenizer"),
    "data.train": _SOURCES,
    "data.validation": _SOURCES,
}
"""Key -> invalid values."""

_RELATIONS: dict[str, tuple[str, ...]] = {
    "heads that tensor does not divide": ("parallel.tensor=3",),
    "a world that the degrees do not divide": ("parallel.pipeline=3",),
    "more stages than layers": ("parallel.pipeline=8",),
    "degrees beyond the world": ("parallel.data=2", "parallel.pipeline=2"),
    "a batch that does not multiply": ("train_batch_size=9",),
    "three batch keys that disagree": ("gradient_accumulation_steps=3",),
    "no batch at all": (
        "train_batch_size=null",
        "train_micro_batch_size_per_gpu=null",
        "gradient_accumulation_steps=null",
    ),
    "too many micro-batches": (
        "train_batch_size=1000000",
        "train_micro_batch_size_per_gpu=1",
        "gradient_accumulation_steps=null",
    ),
    "a sequence beyond the positions": ("data.sequence_length=65",),
    "a sequence that tensor does not divide": (
        "parallel={'tensor': 2, 'sequence_parallel': true}".replace("'", '"'),
        "data.sequence_length=31",
    ),
    "key heads that do not divide": ("model.num_key_value_heads=3",),
    "a width that heads do not divide": ("model.hidden_size=33", "model.head_dim=null"),
    "odd heads to rotate": ("model.head_dim=7",),
    "a feed-forward width that tensor does not divide": (
        "parallel.tensor=2",
        "parallel.pipeline=1",
        "model.intermediate_size=97",
    ),
    "an epsilon without its norm": ("model.layer_norm_epsilon=0.1",),
    "a preset of another family": ("model.preset=gpt2-nano",),
    "weights for one source of two": ('data.train=["python-stdlib", {"path": "x", "weight": 1}]',),
    "two precisions": ("fp16.enabled=true",),
    "fp16 on a CPU": ("fp16.enabled=true", "bf16.enabled=false"),
    "another scheduler's key": ("scheduler.params.cos_min_ratio=0.1",),
    "a first loss scale beyond all floats": ("fp16.initial_scale_power=100000000",),
    "text that is validated and trained on": ('data.validation=["*.txt"]', 'data.train=["*.txt"]'),
}

_TEXTS: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "blank": lambda text: b" \n\t\n",
    "a list": lambda text: f"[{text}]".encode(),
    "a number": lambda text: b"17",
    "two objects": lambda text: (text + text).encode(),
    "a comma at the end": lambda text: (text[:-1] + ",}").encode(),
    "a comment": lambda text: ("// mine\n" + text).encode(),
    "single quotes": lambda text: text.replace('"', "'").encode(),
    "Python's words": lambda text: text.replace("false", "False").encode(),
    "no quotes": lambda text: text.replace('"', "").encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "two byte order marks": lambda text: b"\xef\xbb\xbf\xef\xbb\xbf" + text.encode(),
    "Latin-1": lambda text: text.replace("AdamW", "Ädam").encode("latin-1"),
    "NUL bytes": lambda text: text.encode() + bytes(100),
    "gzip": lambda text: b"\x1f\x8b\x08\x00" + text.encode(),
    "nested 900 deep": lambda text: _nested(text, 900),
    "nested 5,000 deep": lambda text: _nested(text, 5_000),
    "nested 100,000 deep": lambda text: _nested(text, 100_000),
    "objects 900 deep": lambda text: (
        text[:-1] + ',"k":' + '{"k":' * 900 + "1" + "}" * 901
    ).encode(),
    "a lone surrogate": lambda text: text.replace("AdamW", "\\ud800").encode(),
    "a number of 5,000 digits": lambda text: text.replace("[0.9, 0.95]", "1" * 5_000).encode(),
    "20 MB": lambda text: text.encode() + b" " * 20_000_000,
    "20,000 unknown keys": lambda text: (
        text[:-1] + "".join(f',"k{i}":{i}' for i in range(20_000)) + "}"
    ).encode(),
    "a key of 100,000 letters": lambda text: (text[:-1] + f',"{"k" * 100_000}":1}}').encode(),
}

_SETS: dict[str, tuple[str, ...]] = {
    "no value": ("training.steps",),
    "no key": ("=3",),
    "nothing": ("",),
    "dots": ("...=3",),
    "an empty part": ("training..steps=3",),
    "a space": ("training. steps=3",),
    "5,000 levels": ("a." * 5_000 + "b=1",),
    "a value 5,000 levels deep": ("training.steps=" + "[" * 5_000,),
    "extends": ("extends=other.json",),
    "a key twice": ('data={"seed": 1, "seed": 2}',),
    "a number as text": ('training.steps="3"',),
    "NaN": ("optimizer.params.lr=NaN",),
    "5,000 digits": ("training.steps=" + "9" * 5_000,),
    "a level below a number": ("training.steps.x=1",),
    "an unknown key": ("training.stepz=1",),
    "an unknown section": ("trainings.steps=1",),
    "an index": ("data.train[0]=x",),
    "dashes": ("--training.steps=3",),
    "a null that is needed": ("training.steps=null",),
    "a section that is needed": ("model=null",),
    "an object for text": ('data.tokenizer={"a": 1}',),
}

_FLAGS: dict[str, tuple[str, ...]] = {
    **{
        f"--world-size {size!r:.20}": ("--world-size", size)
        for size in ("0", "-1", "abc", "1.5", "", "10000000", "9" * 5_000, "1e3", "NaN")
    },
    "an unknown option": ("--no-such-option",),
    "an unknown device": ("--device", "tpu"),
    "no device": ("--device",),
    "a folder for figures": ("--json", "."),
    "a file of figures in no folder": ("--json", "no/such/figures.json"),
    "a path with too long a name": ("--json", "x" * 300),
    "too much": ("surplus",),
}

_TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: _rewrite(folder / "tokenizer.json", lambda text: text[: len(text) // 2]),
    "empty": lambda folder: (folder / "tokenizer.json").write_text(""),
    "a list": lambda folder: (folder / "tokenizer.json").write_text("[]"),
    "binary": lambda folder: (folder / "tokenizer.json").write_bytes(bytes(range(256))),
    "without a vocabulary": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "without an end of text": lambda folder: _rewrite(
        folder / "tokenizer.json", lambda text: text.replace("<|endoftext|>", "<|other|>")
    ),
    "a config that is cut": lambda folder: (folder / "tokenizer_config.json").write_text('{"a": '),
    "a config 900 deep": lambda folder: (folder / "tokenizer_config.json").write_bytes(
        _nested("{}", 900)
    ),
    "a config that is a list": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "an end that is not in it": lambda folder: (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<nowhere>"}'
    ),
}

_HF_KEYS: dict[str, Values] = {
    "an unknown type": {"model_type": "bert"},
    "a type that is a list": {"model_type": ["llama"]},
    "a billion layers": {"num_hidden_layers": 10**9},
    "a number of layers of 400 digits": {"num_hidden_layers": "<huge>"},
    "layers as text": {"num_hidden_layers": "4"},
    "no layers": {"num_hidden_layers": 0},
    "negative width": {"hidden_size": -32},
    "an enormous width": {"hidden_size": 10**9},
    "an enormous vocabulary": {"vocab_size": 10**12},
    "enormous heads": {"num_attention_heads": 10**9},
    "an enormous feed-forward width": {"intermediate_size": 10**18},
    "enormous positions": {"max_position_embeddings": 10**15},
    "NaN": {"rms_norm_eps": "<NaN>"},
    "infinity": {"rope_theta": "<1e999>"},
    "another activation": {"hidden_act": "relu"},
    "a draft head": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
    "with code": {"auto_map": {"AutoModel": "model.Model"}},
    "an unknown rope": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "a rope that is a list": {"rope_scaling": [1, 2]},
    "heads that do not divide": {"num_attention_heads": 3},
    "dropout as text": {"attention_dropout": "much"},
    "null": {"vocab_size": None},
    "a type of layers that is a number": {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "layer_types": 7,
    },
}


@dataclass(frozen=True)
class Bad:
    """One mistake: options of `megaspeed check`, and its name in a failure."""

    name: str
    options: tuple[str, ...]


class Workshop:
    """Writes valid files into a folder, and files with one mistake each."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self._random = random.Random(seed)
        self._number = 0
        (folder / "text.txt").write_text("A text of some words, to be read. " * 50)
        (folder / "held_out.txt").write_text("Another one. " * 50)
        _train_tokenizer(folder / "tokenizer")
        _write(folder / "hf" / "config.json", HUGGING_FACE)
        (folder / "ids.bin").write_bytes(bytes(4096))
        self.good = good_values(folder)

    def write(self, values: Values) -> Path:
        """A configuration of these values."""
        self._number += 1
        return _write(self.folder / f"{self._number}" / "config.json", values)

    def good_ones(self) -> dict[str, Path]:
        """The valid configurations that get a mistake."""
        named: dict[str, Values] = {
            "text": {},
            "a tokenizer": {"data": {"tokenizer": str(self.folder / "tokenizer")}},
            "a model of Hugging Face": self._with_model(self.folder / "hf"),
            "token ids": {"data": {"train": [str(self.folder / "ids.bin")], "validation": None}},
            "a file that extends": {},
        }
        files = {name: self.write(merge(self.good, change)) for name, change in named.items()}
        files["a file that extends"] = self.write({"extends": str(files["text"])})
        return files

    def groups(self) -> Iterator[tuple[str, Callable[[], Iterator[Bad]]]]:
        """The name of each kind of mistake, and a function that writes its files."""
        yield "values", self._values
        yield "keys", self._keys
        yield "relations", self._relations
        yield "text", self._texts
        yield "--set", self._sets
        yield "flags", self._flags
        yield "extends", self._extends
        yield "special files", self._special_files
        yield "tokenizers", self._tokenizers
        yield "models of Hugging Face", self._hugging_face

    def _bad(self, name: str, values: Values, *options: str) -> Bad:
        return Bad(name, ("--config", str(self.write(values)), *options))

    def _values(self, count: int = 90) -> Iterator[Bad]:
        pairs = [(key, value) for key, values in _BAD_VALUES.items() for value in values]
        for key, value in self._random.sample(pairs, count):
            yield self._bad(f"{key} = {value!r:.40}", _replaced(self.good, key, value))

    def _keys(self, count: int = 24) -> Iterator[Bad]:
        known = [key for key in _BAD_VALUES if "." in key or self._random.random() < 0.5]
        for key in self._random.sample(known, count):
            section, _, name = key.rpartition(".")
            wrong = self._misspelt(section, name)
            yield self._bad(f"{wrong} for {key}", _replaced(self.good, wrong, 3))
            other = self._random.choice(["model", "parallel", "bf16", "scheduler.params"])
            moved = f"{other}.{name}"
            if moved not in all_key_paths():
                yield self._bad(f"{moved} for {key}", _replaced(self.good, moved, 3))
        for section in ("model", "data", "training", "optimizer"):
            inner = json.dumps(self.good[section])
            name = self._random.choice(list(self.good[section]))
            twice = inner[:-1] + f', "{name}": {json.dumps(self.good[section][name])}}}'
            text = json.dumps({**self.good, section: "<twice>"}).replace('"<twice>"', twice)
            yield self._of_bytes(f"{section}.{name} twice", text.encode())
        for name in self._random.sample(sorted(REFUSED), 8):
            yield self._bad(f"{name} of DeepSpeed", _replaced(self.good, name, {"enabled": 7}))

    def _misspelt(self, section: str, name: str) -> str:
        while True:
            letters = list(name)
            at = self._random.randrange(len(letters) - 1)
            edit = self._random.randrange(4)
            if edit == 0:
                del letters[at]
            elif edit == 1:
                letters.insert(at, letters[at])
            elif edit == 2:
                letters[at], letters[at + 1] = letters[at + 1], letters[at]
            else:
                letters[at] = letters[at].upper()
            wrong = ".".join(filter(None, (section, "".join(letters))))
            if wrong not in all_key_paths() and wrong not in REFUSED:
                return wrong

    def _relations(self) -> Iterator[Bad]:
        for name, changes in _RELATIONS.items():
            yield self._bad(name, self.good, "--set", *changes)

    def _texts(self) -> Iterator[Bad]:
        text = json.dumps(self.good)
        for name, change in _TEXTS.items():
            yield self._of_bytes(name, change(text))
        for _ in range(8):
            end = self._random.randrange(1, len(text))
            yield self._of_bytes(f"cut after {end}", text[:end].encode())

    def _of_bytes(self, name: str, content: bytes) -> Bad:
        file = self.write({})
        file.write_bytes(content)
        return Bad(name, ("--config", str(file)))

    def _sets(self) -> Iterator[Bad]:
        for name, changes in _SETS.items():
            yield self._bad(f"--set {name}", self.good, "--set", *changes)

    def _flags(self) -> Iterator[Bad]:
        for name, options in _FLAGS.items():
            yield self._bad(name, self.good, *options)
        yield Bad("no configuration", ())
        yield Bad("an empty --config", ("--config", ""))

    def _extends(self) -> Iterator[Bad]:
        parents: Any = (3, ["a.json"], {}, True, "", "a\0b", "n" * 300, "no.json", ".", "\ud800")
        for parent in parents:
            yield self._bad(f"extends {parent!r:.20}", {**self.good, "extends": parent})
        circle = self.write({})
        _write(circle, {"extends": str(circle)})
        yield Bad("a circle", ("--config", str(circle)))
        cut = self.write({})
        cut.write_text('{"a": ')
        yield self._bad("a file that is cut", {"extends": str(cut)})

    def _special_files(self) -> Iterator[Bad]:
        for kind, path in _special_paths(self.folder / "special").items():
            yield Bad(f"{kind} as configuration", ("--config", str(path)))
            if kind != "a folder":
                yield self._bad(f"{kind} to extend", {"extends": str(path)})
                yield self._bad(f"{kind} as text", self._with_data(train=[str(path)]))
                yield self._bad(f"{kind} as tokenizer", self._with_data(tokenizer=str(path)))
                yield self._bad(f"{kind} as model", merge(self.good, self._with_model(path)))
            if kind not in ("a folder", "nothing"):
                values = _replaced(self.good, "training.run_dir", str(path / "run"))
                yield self._bad(f"{kind} above run_dir", values)
            if kind in ("a pipe", "a socket", "a device", "a loop"):
                values = merge(self.good, self._with_model(self._linked("config.json", path)))
                yield self._bad(f"{kind} as config.json of a model", values)
            if kind in ("a pipe", "a socket", "a device"):
                folder = self._linked("tokenizer_config.json", path)
                tokenizer = (self.folder / "tokenizer" / "tokenizer.json").read_bytes()
                (folder / "tokenizer.json").write_bytes(tokenizer)
                values = self._with_data(tokenizer=str(folder))
                yield self._bad(f"{kind} beside a tokenizer", values)
                ids = str(self._linked("ids.bin", path) / "ids.bin")
                yield self._bad(f"{kind} as ids", self._with_data(train=[ids], validation=None))

    def _linked(self, name: str, path: Path) -> Path:
        """A new folder in which `name` is a link to `path`."""
        folder = self.write({}).parent / "linked"
        folder.mkdir()
        (folder / name).symlink_to(path)
        return folder

    def _tokenizers(self) -> Iterator[Bad]:
        for name, change in _TOKENIZERS.items():
            folder = self.write({}).parent / "tokenizer"
            _train_tokenizer(folder)
            change(folder)
            yield self._bad(f"a tokenizer: {name}", self._with_data(tokenizer=str(folder)))
        values = _replaced(self.good, "model.vocab_size", 100)
        named = merge(values, {"data": {"tokenizer": str(self.folder / "tokenizer")}})
        yield self._bad("a tokenizer larger than the model", named)

    def _hugging_face(self) -> Iterator[Bad]:
        for name, keys in _HF_KEYS.items():
            folder = self.write({}).parent / "hf"
            _write(folder / "config.json", {**HUGGING_FACE, **keys})
            yield self._bad(f"a model: {name}", merge(self.good, self._with_model(folder)))
        for name in ("empty", "a list", "UTF-16", "nested 900 deep", "20 MB", "NUL bytes"):
            folder = self.write({}).parent / "hf"
            file = _write(folder / "config.json", HUGGING_FACE)
            file.write_bytes(_TEXTS[name](file.read_text()))
            yield self._bad(f"a model: {name}", merge(self.good, self._with_model(folder)))

    def _with_data(self, **keys: Any) -> Values:
        return merge(self.good, {"data": keys})

    def _with_model(self, path: Path) -> Values:
        """A change that takes the model from a Hugging Face folder."""
        stated = dict.fromkeys(self.good["model"])
        return {"model": {**stated, "from_hf": str(path)}}


HUGGING_FACE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}


def good_values(folder: Path) -> Values:
    """A valid configuration for two processes with many keys, as JSON values."""
    return {
        "model": {
            "architecture": "llama",
            "vocab_size": 320,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 96,
            "max_position_embeddings": 64,
        },
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
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }


def _write(file: Path, values: Values) -> Path:
    file.parent.mkdir(exist_ok=True)
    text = json.dumps(values)
    for marker, raw in _RAW.items():
        text = text.replace(f'"{marker}"', raw)
    file.write_text(text)
    return file


def _replaced(values: Values, key: str, value: Any) -> Values:
    changed = copy.deepcopy(values)
    *sections, name = key.split(".")
    here = changed
    for section in sections:
        if not isinstance(here.get(section), dict):
            here[section] = {}
        here = here[section]
    here[name] = value
    return changed


def _rewrite(file: Path, change: Callable[[str], str]) -> None:
    file.write_text(change(file.read_text()))


def _nested(text: str, levels: int) -> bytes:
    comma = "," if len(text) > 2 else ""
    return (text[:-1] + f'{comma}"k":' + "[" * levels + "]" * levels + "}").encode()


def _special_paths(folder: Path) -> dict[str, Path]:
    """Kind -> path of something that is not a file, or cannot exist."""
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        place = os.getcwd()
        os.chdir(folder)  # the address of a socket has at most 107 bytes
        listening.bind("socket")
        os.chdir(place)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "folder").mkdir()
    return {
        "a pipe": folder / "pipe",
        "a socket": folder / "socket",
        "a device": Path("/dev/zero"),
        "a loop": folder / "loop",
        "a link to nothing": folder / "dangling",
        "a folder": folder / "folder",
        "nothing": folder / "nothing",
        "a place below a file": folder.parent / "text.txt" / "below",
        "too long a name": folder / ("n" * 300),
        "a NUL": folder / "a\0b",
    }


def _train_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 320 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["some words to train it"], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
