"""The table of mistakes, and laws about the changes that messages propose.

``mistakes.txt`` has the table. ``messages.txt`` has the complete messages, for a reviewer. After a
change of a message or of the table, run

    python -m tests.config.test_mistakes
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megaspeed.cli import main
from megaspeed.config import layout
from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import model_section
from megaspeed.config.loading import parse_config
from megaspeed.config.rules import divisors
from megaspeed.config.run import RunConfig
from tests.config.hugging_face_files import GPT2, LLAMA
from tests.config.small import problems, small, write

FOLDER = Path(__file__).parent
NAMES = {
    "LLAMA": "model.architecture=llama model.intermediate_size=384",
    "MIXTRAL": "model.architecture=mixtral model.intermediate_size=384 model.num_experts=8 "
    "model.num_experts_per_tok=2",
    "SCALING": 'model.rope_scaling={"rope_type":"llama3","factor":8.0,"low_freq_factor":4.0,'
    '"high_freq_factor":4.0,"original_max_position_embeddings":32}',
    "YARN": 'model.rope_scaling={"rope_type":"yarn","factor":4.0,'
    '"original_max_position_embeddings":16}',
    "MUON": "optimizer.type=Muon",
    "INT8": 'parallel.gradient_compression={"type":"int8"}',
    "POWERSGD": 'parallel.gradient_compression={"type":"powersgd"}',
    "CHUNKS": "parallel.virtual_stages=2 parallel.pipeline=2",
    "PER_MICRO_BATCH": "parallel.gradient_reduction=per_micro_batch",
    "WARMUP": "scheduler.params.warmup_num_steps",
    "DECAY": "scheduler.type=wsd scheduler.params.decay_num_steps",
    "STREAM": '"dataset":"us/words","streaming":true,"tokens":1e6',
    "COMMIT": '"revision":"0123456789abcdef0123456789abcdef01234567"',
    "PROFILE": "training.steps=12 training.profile.start_step=10",
}
"""The meaning of the names in the table."""
FILES: dict[str, dict[str, Any]] = {"gpt2.json": GPT2, "llama.json": LLAMA, "empty.json": {}}


class Row(NamedTuple):
    """A row of the table."""

    change: str
    key: str
    numbers: str

    def problems(self) -> list[str]:
        """Return the problems of the changed configuration, or of the changed config.json."""
        file, _, keys = self.change.partition(" ")
        if file in FILES:
            return model_section({**FILES[file], **json.loads(keys)})[1]
        return problems(*self.change.split())


def rows() -> list[Row]:
    text = (FOLDER / "mistakes.txt").read_text().partition("\n# ")[2]
    text = re.sub("|".join(NAMES), lambda match: NAMES[match[0]], text)
    cells = [line.split("|") for line in text.splitlines()[1:] if line and line[0] != "#"]
    return [Row(*(cell.strip() for cell in [*row, "", ""][:3])) for row in cells]


WRONG = [row for row in rows() if row.key or row.numbers]
RIGHT = [row.change for row in rows() if not row.key and not row.numbers]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.change)
def test_a_mistake_is_one_message_with_its_key_and_its_numbers(row: Row) -> None:
    (message,) = row.problems()
    assert message.startswith(row.key or re.split("[= ]", row.change)[0])
    for word in row.numbers.split():
        assert re.search(rf"(?<![\w.]){re.escape(word.rstrip(','))}(?!\w|\.\d)", message), message


@pytest.mark.parametrize("change", RIGHT)
def test_without_a_mistake_there_is_no_message(change: str) -> None:
    assert Row(change, "", "").problems() == []
    file, _, keys = change.partition(" ")
    if file in FILES:
        assert model_section({**FILES[file], **json.loads(keys)}) == model_section(FILES[file])


def test_a_mistake_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a text")  # a check need not search for text
    file = write(tmp_path / "a.json", small(data={"train": [str(tmp_path / "a.txt")]}))
    command = ["check", "--device", "cpu", "--config", str(file)]
    for row in (row for row in WRONG if row.change.split()[0] not in FILES):
        words = [word for word in row.change.split() if not word.startswith("world=")]
        world = re.findall(r"world=(\d+)", row.change)
        options = [
            *(["--world-size", *world] if world else []),
            *(["--set", *words] if words else []),
        ]
        assert main([*command, *options]) == 2, row
        assert row.problems()[0].partition("WORLD_SIZE")[0] in capsys.readouterr().err


def messages() -> str:
    """Return the message of every mistake."""
    return "".join(f"{row.change}\n    {row.problems()[0]}\n" for row in WRONG)


def test_a_reviewer_has_read_the_messages() -> None:
    again = "run: python -m tests.config.test_mistakes"
    assert (FOLDER / "messages.txt").read_text() == messages(), again


LLAMA_CONFIG = NAMES["LLAMA"].split()


def test_valid_tensor_degrees_are_those_that_pass() -> None:
    """12 heads share 4 key/value heads. The test tries every degree and compares it
    with the list.
    """
    shape = (*LLAMA_CONFIG, "model.num_key_value_heads=4")
    passing = [tp for tp in range(1, 13) if not problems(*shape, f"parallel.tensor={tp}")]
    assert passing == [1, 2, 4, 12]
    message = next(m for m in problems(*shape, "parallel.tensor=6") if "key_value" in m)
    assert message.endswith("valid parallel.tensor: 1, 2, 4, 12")


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("kind", ["cosine", "constant", "WarmupLR", "WarmupDecayLR"])
def test_the_warmup_that_the_message_names_is_valid(kind: str, steps: int) -> None:
    scheduler = (f"scheduler.type={kind}", "scheduler.params.warmup_num_steps=100")
    run = (*scheduler, f"training.steps={steps}")
    (message,) = problems(*run)
    assert problems(*run, message.partition(" --set ")[2]) == [], message


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_the_decay_that_the_message_names_is_valid(steps: int) -> None:
    params = ("scheduler.params.warmup_num_steps", "scheduler.params.decay_num_steps")
    run = ("scheduler.type=wsd", f"training.steps={steps}")
    (message,) = problems(*run, *(f"{key}=100" for key in params))
    numbers = message.partition(" for example to ")[2].split(" and ")
    mend = (f"{key}={number}" for key, number in zip(params, numbers, strict=True))
    assert problems(*run, *mend) == [], message


def mended(message: str, overrides: tuple[str, ...], world: int) -> Iterator[list[str]]:
    """Yield the problems that remain after each change that a message proposes."""
    mends = message.partition("; ")[2]
    for start in re.findall(r"start (?:at least )?([\d or]+) processes", mends):
        for number in start.split(" or "):
            yield problems(*overrides, world_size=int(number))
    if data := re.search(r'set parallel.data to (\d+) or "auto"', mends):
        for value in (data[1], "auto"):
            yield problems(*overrides, f"parallel.data={value}", world_size=world)
    if products := re.search(r"parallel.pipeline x parallel.tensor = ([\d, ]+)", mends):
        for product in map(int, products[1].split(", ")):
            degrees = [
                (f"parallel.pipeline={product // tp}", f"parallel.tensor={tp}")
                for tp in divisors(product)
            ]
            left = [problems(*overrides, *each, world_size=world) for each in degrees]
            yield min(left, key=len)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("data", ["auto", 1, 2, 3, 4])
@pytest.mark.parametrize("micro", [2, 3])
def test_every_change_that_a_message_proposes_is_valid(
    data: str | int, spare: bool, micro: int
) -> None:
    """48 samples are in micro-batches of 2 or 3, with 4 accumulation steps or as many as needed."""
    batch = (f"train_micro_batch_size_per_gpu={micro}", "train_batch_size=48")
    for world, (pp, tp), accumulation in itertools.product(
        (1, 2, 3, 5, 6, 7, 8, 12), ((1, 2), (2, 2), (3, 4)), (None, 4)
    ):
        degrees = (f"parallel.pipeline={pp}", f"parallel.tensor={tp}", f"parallel.data={data}")
        stated = (f"gradient_accumulation_steps={accumulation}",) * bool(accumulation)
        run = (*batch, *stated, *degrees, f"parallel.spare_ranks={str(spare).lower()}")
        found = problems(*run, world_size=world)
        # If the batch does not fit either, it is a problem of its own, which remains.
        batches = ["Nearest: " in message for message in found]
        for message in found:
            if "x parallel.tensor" in message:
                left = list(mended(message, run, world))
                assert left, message
                for each in left:
                    assert ["Nearest: " in one for one in each] == [True] * sum(batches), found


@pytest.mark.parametrize("spare", ["false", "true"])
def test_a_world_and_a_batch_that_do_not_fit_are_two_problems(spare: str) -> None:
    run = ("parallel.data=2", "parallel.tensor=4", f"parallel.spare_ranks={spare}")
    of_world, of_batch = problems(*run, "train_batch_size=31", world_size=7)
    assert "world size 7" in of_world and of_world.endswith("8 processes")
    assert of_batch.startswith("train_batch_size 31 is not") and "Nearest: 32" in of_batch
    assert problems(*run, "train_batch_size=31", world_size=8)[0].startswith("train_batch_size 31")
    assert problems(*run, "train_batch_size=32", world_size=8) == []


def test_only_a_key_that_is_wrong_itself_lets_a_rule_be_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an earlier version, a rule took a misspelt name for an absent key, and was
    always skipped.
    """

    def misspelt(config: RunConfig) -> Iterator[str]:
        yield f"{config.model.hidden_siz}"  # type: ignore[attr-defined]

    monkeypatch.setattr(layout, "RULES", [misspelt])
    with pytest.raises(AttributeError, match="hidden_siz"):
        problems()


def test_mistakes_of_both_kinds_are_in_one_report() -> None:
    """A rule is skipped if it reads a key that is itself wrong. All other rules report."""
    found = problems(
        gradient_cliping=1,  # 1 unknown key
        amp={"enabled": True},  # 2 refused
        train_batch_size="many",  # 3 type
        training={"steps": "auto"},  # 4 nothing computes it
        data={"sequence_length": 65},  # 5 more than 64 positions
        parallel={"tensor": 5},  # 6 of 12 heads, 7 of a width of 384
        fp16={"enabled": True},
        bf16={"enabled": True},  # 8 both
        model={"rope_theta": -1, "num_key_value_heads": 5},  # 9 type; 10 of 12 heads
    )
    assert len(found) == 10
    with pytest.raises(ConfigError) as caught:
        parse_config(small(train_batch_size=True, training={"steps": 0}))
    assert re.findall(r"^ *(\d+ problems|\d\.)", str(caught.value), re.M) == [
        "2 problems",
        "1.",
        "2.",
    ]


if __name__ == "__main__":
    (FOLDER / "messages.txt").write_text(messages(), encoding="utf-8")
