"""The model and the tokenizer that a checkpoint is used with."""

import shutil
from pathlib import Path

import pytest
import torch

from megaspeed.checkpoint.run_state import NOT_STATED
from megaspeed.data.errors import DataError
from megaspeed.inference.opening import Opening
from megaspeed.inference.text_model import TextModel, load_text_model
from tests.checkpoint.written import CONFIG, seal
from tests.inference.tiny_text import checkpoint_of_text, write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_text(tmp_path_factory.mktemp("run"))


def load(place: Path, tokenizer: Path | None = None) -> tuple[TextModel, list[str]]:
    """The model, and what was told beside what opens a document."""
    told: list[str] = []
    model = load_text_model(
        place,
        tokenizer=None if tokenizer is None else str(tokenizer),
        opening=Opening.AUTO,
        always_open=True,
        device=torch.device("cpu"),
        dtype=torch.float32,
        tell=told.append,
    )
    assert told.pop() == "a document opens with <|endoftext|> (id 0); --opening can say otherwise"
    return model, told


def test_a_run_is_its_newest_checkpoint_with_the_tokenizer_it_carries(checkpoint: Path) -> None:
    model, told = load(checkpoint.parents[1])
    assert (model.checkpoint, model.config, told) == (checkpoint, CONFIG.model, [])
    assert (model.tokenizer.vocab_size, model.tokenizer.end_of_text) == (301, 0)
    assert model.opening == (0,)


def test_logits_of_rows_of_any_length_are_those_of_each_alone(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    rows = [[5, 6, 7, 8], [9], [10, 11]]
    together = model.logits(rows)
    assert together.shape == (3, 4, 301)
    for row, logits in zip(rows, together, strict=True):
        torch.testing.assert_close(model.logits([row])[0], logits[: len(row)])


def test_a_checkpoint_without_a_tokenizer_needs_one_named(checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (bare / "tokenizer.json").unlink()
    seal(bare)
    with pytest.raises(DataError, match=r"carries no tokenizer; name .* in --tokenizer"):
        load(bare)
    model, told = load(bare, write_tokenizer(tmp_path / "tokenizer.json"))
    assert (model.tokenizer.vocab_size, told) == (301, [])


def test_a_carried_tokenizer_that_cannot_be_read_is_no_setting_of_the_user(
    checkpoint: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (broken / "tokenizer.json").write_text("{}")
    seal(broken)
    with pytest.raises(DataError, match=r"^the tokenizer of the checkpoint must be .* save it"):
        load(broken)


def test_another_tokenizer_than_it_was_trained_with_is_said(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=280)
    model, (told,) = load(checkpoint, other)
    assert told.startswith(f"note: {checkpoint} was trained with the tokenizer of fingerprint ")
    assert told.endswith(f"and that of {other} is {model.tokenizer.fingerprint}")


def test_token_files_that_tell_no_tokenizer_are_of_any(tmp_path: Path) -> None:
    _, told = load(checkpoint_of_text(tmp_path / "run", trained_with=NOT_STATED))
    assert told == []


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    larger = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=302)
    with pytest.raises(DataError) as caught:
        load(checkpoint, larger)
    for text in (f"that of {checkpoint} is 301", f"{larger} has 302 entries", "in --tokenizer"):
        assert text in str(caught.value)
