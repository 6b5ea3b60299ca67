"""Each value has one type, and an error shows the path, what was given and what is wanted."""

import copy
import random
from typing import Any

import pytest

from megaspeed.config.document import Document
from megaspeed.config.errors import ConfigError, Problem, dotted
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document, parse_config
from tests.config.small import only_problem, problems, small


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'training.steps="16"',
            'given "16" (a string), wanted a whole number; write 16 without quotes',
        ),
        ("train_batch_size=true", "given true (a boolean), wanted a whole number"),
        ("train_batch_size=0", "given 0 (a whole number), wanted more than 0"),
        ("training.steps=1.5", "given 1.5 (a decimal number), wanted a whole number"),
        ("bf16.enabled=1", "given 1 (a whole number), wanted true or false"),
        (
            "bf16.enabled=True",
            'given "True" (a string), wanted true or false; write true without quotes',
        ),
        ("bf16=true", 'given true (a boolean), wanted an object; write {"enabled": true}'),
        (
            "optimizer=adamw",
            'given "adamw" (a string), wanted an object; write {"type": "adamw"}',
        ),
        ("model.rope_scaling=8", "given 8 (a whole number), wanted an object"),
        (
            "data.train=corpus.txt",
            'given "corpus.txt" (a string), wanted a list; write ["corpus.txt"]',
        ),
        ("data.train=[]", "given [] (a list), wanted a list of at least 1"),
        ("data.validation=[]", "given [] (a list), wanted a list of at least 1"),
        ("data.tokenizer=5", 'given 5 (a whole number), wanted a string; write "5" in quotes'),
        ("data.validation_fraction=1", "given 1 (a whole number), wanted less than 1"),
        ("data.seed=-1", "given -1 (a whole number), wanted at least 0"),
        ("parallel.data=all", 'given "all" (a string), wanted a whole number or "auto"'),
        ("parallel.data=0", 'given 0 (a whole number), wanted more than 0 or "auto"'),
        ("parallel.schedule=zb", 'given "zb" (a string), wanted "gpipe" or "1f1b"'),
        ("zero_optimization.stage=4", "given 4 (a whole number), wanted 0, 1, 2 or 3"),
        ("zero_optimization.stage=true", "given true (a boolean), wanted a whole number"),
        (
            "zero_optimization.sub_group_size=0.5",
            "given 0.5 (a decimal number), wanted a whole number",
        ),
        ("optimizer.params.lr=NaN", 'given "NaN" (a string), wanted a number'),
        ("optimizer.params.lr=1e999", "given Infinity (a decimal number), wanted a finite number"),
        (
            "optimizer.params.lr=1e39",
            "given 1e+39 (a decimal number), wanted a number of at most 1e+20",
        ),
        (
            "model.rope_theta=1e300",
            "given 1e+300 (a decimal number), wanted a number of at most 1e+20",
        ),
        (
            "training.hang_timeout_seconds=1e300",
            "given 1e+300 (a decimal number), wanted at most 10,000,000",
        ),
        (
            "training.hang_timeout_seconds=1e-300",
            "given 1e-300 (a decimal number), wanted at least 5",
        ),
        ("optimizer.params.betas=[0.9]", "given [0.9] (a list), wanted a list of 2"),
        ("optimizer.params.betas=[]", "given [] (a list), wanted a list of 2"),
        ("optimizer.params.betas=[1,2,3]", "given [1, 2, 3] (a list), wanted a list of at most 2"),
    ],
)
def test_a_wrong_value_shows_what_was_given_and_what_is_wanted(override: str, message: str) -> None:
    assert only_problem(override) == f"{override.partition('=')[0]}: {message}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'data.train=["a", 3]',
            "data.train[1]: given 3 (a whole number), wanted a string or an object; "
            'write "3" in quotes',
        ),
        (
            'data.train=[{"path": "a", "weight": 0}]',
            "data.train[0].weight: given 0 (a whole number), wanted more than 0",
        ),
        (
            'data.train=["a", {"weight": 2}]',
            'data.train[1]: given {"weight": 2} (an object), wanted a string or an object that '
            "states either path or dataset",
        ),
        (
            'data.validation=[{"path": "a", "streaming": true}]',
            'data.validation[0]: given {"path": "a", "streaming": true} (an object), wanted a '
            "string or an object without streaming, which only a dataset can have",
        ),
        (
            "optimizer.params.betas=[0.9, 1.0]",
            "optimizer.params.betas[1]: given 1.0 (a decimal number), wanted less than 1",
        ),
    ],
)
def test_a_wrong_entry_of_a_list_is_named_by_its_index(override: str, message: str) -> None:
    assert only_problem(override) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sequence_length=null", "data.sequence_length is missing and has no default"),
        ("training.steps=null", "training.steps is missing and has no default"),
        (
            "model.vocab_size=null",
            "model.vocab_size is missing: state it, or name a model.preset such as gpt2",
        ),
    ],
)
def test_a_missing_key_is_named(override: str, message: str) -> None:
    assert only_problem(override) == message


def test_an_unknown_scheduler_gets_the_list_of_them() -> None:
    wanted = (
        'wanted "cosine" or "linear" or "constant" or "WarmupLR" or "WarmupDecayLR" or '
        '"WarmupCosineLR"'
    )
    assert only_problem("scheduler.type=OneCycle") == (
        f'scheduler.type: given "OneCycle" (a string), {wanted}'
    )
    assert only_problem("scheduler.params={}") == f"scheduler.type is missing, {wanted}"


def test_bucket_sizes_may_be_written_5e8() -> None:
    config = parse_config(small(zero_optimization={"reduce_bucket_size": 5e8}))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000


def test_an_integer_is_accepted_as_a_number() -> None:
    assert parse_config(small(gradient_clipping=1)).gradient_clipping == 1.0


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(small())
    with pytest.raises(ValueError, match="frozen"):
        config.model.hidden_size = 5


def test_all_problems_are_reported_at_once_and_numbered() -> None:
    wrong = small(
        gradient_cliping=1,  # 1 unknown key
        amp={"enabled": True},  # 2 refused
        train_batch_size="many",  # 3 type
        training={"steps": "auto"},  # 4 nothing computes it
        data={"sequence_length": 65},  # 5 more than 64 positions
        parallel={"tensor": 5},  # 6 heads 12 % 5, 7 feed-forward 384 % 5
        fp16={"enabled": True},
        bf16={"enabled": True},  # 8 both
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(wrong)
    assert len(caught.value.problems) == 8
    lines = str(caught.value).splitlines()
    assert lines[0] == "8 problems in the configuration:"
    assert [line.split(".")[0].strip() for line in lines[1:]] == [str(n) for n in range(1, 9)]


def test_rules_are_silent_about_keys_that_are_already_wrong() -> None:
    found = problems(
        model={"num_attention_heads": 0},
        parallel={"tensor": 5, "sequence_parallel": True},
        world_size=5,
    )
    assert [message.split(" ")[0] for message in found] == [
        "model.num_attention_heads:",
        "data.sequence_length",
    ]


def test_dotted_paths_read_as_users_write_them() -> None:
    assert dotted(("optimizer", "params", "betas", 1)) == "optimizer.params.betas[1]"
    assert Problem((), "x").path == ()


_JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 1.5, 1e9, 1e308, "", "auto", "nvme", "7"),
    *([], [1], {}, {"type": "x"}, {"a": {}}),
)


def test_every_input_gets_only_our_own_messages() -> None:
    """500 configs, each with up to four values replaced by junk: a list of problems, no crash."""
    choose = random.Random(0)
    full = parse_config(
        small(scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}})
    ).to_json()
    reported = 0
    for _ in range(500):
        values = copy.deepcopy(full)
        for _ in range(choose.randint(1, 4)):
            here: Any = values
            while True:
                key = choose.choice(list(here) if isinstance(here, dict) else range(len(here)))
                if isinstance(here[key], dict | list) and here[key] and choose.random() < 0.7:
                    here = here[key]
                    continue
                here[key] = choose.choice(_JUNK)
                break
        found = check_document(Document(values), World(8, "WORLD_SIZE")).problems
        assert not any("pydantic" in message or "Input should" in message for message in found)
        reported += len(found)
    assert reported > 500


def test_a_misspelt_choice_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match='the nearest is "gpt3-175b"'):
        parse_config(small(model={"preset": "gpt3-175"}))
