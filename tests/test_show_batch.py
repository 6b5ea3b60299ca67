"""``megaspeed show-batch`` shows what the loaders read: the ids, their place and their text."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megaspeed.cli import main
from megaspeed.cli.show_batch import samples_table, show_samples
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.data.corpus import prepare_corpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.data.tokenizer import load_tokenizer
from tests.data.numbered_corpus import numbered_mixture

TEXT = Path(__file__).parents[1] / "LICENSE"
CONFIG: dict[str, Any] = {
    "model": {"preset": "gpt2-nano", "vocab_size": 300},
    "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
    "training": {"steps": 3},
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "run.json"
    file.write_text(json.dumps(CONFIG))
    return file


def shown(config: Path, *options: str) -> dict[str, Any]:
    figures = config.with_name("shown.json")
    assert main(["show-batch", "--config", str(config), "--json", str(figures), *options]) == 0
    read: dict[str, Any] = json.loads(figures.read_text())
    return read


def test_a_step_shows_what_the_ranks_train_on_in_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = shown(config, "--step", "3")["samples"]
    assert "step 3: samples 16 ... 23" in capsys.readouterr().out
    run = load_run(config, (), World(2, "test"))
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    read: dict[int, list[int]] = {}
    for dp_rank in range(2):
        loader = TrainingLoader(corpus, LoaderShape(2, 2, dp_rank, dp_size=2))
        for micro_batch in range(2):
            batch = loader.micro_batch(16, micro_batch)
            columns = (batch.samples, batch.tokens, batch.targets)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            read |= {sample: [*ids, targets[-1]] for sample, ids, targets in rows}
    assert {sample["sample"]: sample["ids"] for sample in samples} == read
    tokenizer = load_tokenizer(str(corpus.tokenizer)).tokenizer
    text = TEXT.read_text()
    for sample in samples:
        assert tokenizer.encode(sample["text"]).ids == sample["ids"]
        assert sample["text"].removesuffix("<|endoftext|>") in text
        assert sample["source"] == str(TEXT)


def test_any_samples_can_be_shown(config: Path) -> None:
    of_step = shown(config, "--step", "2")
    some = shown(config, "--samples", "10:12")
    assert some["samples"] == of_step["samples"][2:4]
    assert some["corpus"] == of_step["corpus"]


def test_a_batch_that_follows_from_the_number_of_processes_needs_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "train_batch_size"}))
    assert main(["show-batch", "--config", str(config), "--step", "2"]) == 2
    assert "add --world-size, or name samples with --samples" in capsys.readouterr().err
    figures = shown(config, "--step", "2", "--world-size", "3")
    assert [sample["sample"] for sample in figures["samples"]] == [6, 7, 8, 9, 10, 11]


def test_the_samples_of_a_step_follow_a_batch_schedule(config: Path) -> None:
    """Steps 1 and 2 have 4 samples, and the steps after them 8."""
    keys = ("--set", "train_batch_size=null", "train_batch_size_schedule=0:4,2:8")
    for step, samples in ((1, range(4)), (3, range(8, 16)), (4, range(16, 24))):
        figures = shown(config, "--step", str(step), *keys)
        assert [sample["sample"] for sample in figures["samples"]] == list(samples)


@pytest.mark.parametrize("samples", ["5", "5:5", "-1:3", "a:b", "1:2:3"])
def test_samples_that_are_not_a_range_are_refused(
    config: Path, samples: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["show-batch", "--config", str(config), f"--samples={samples}"])
    assert repr(samples) in capsys.readouterr().err


def test_a_mixture_shows_the_component_and_the_file_and_cuts_what_is_long(tmp_path: Path) -> None:
    corpus = numbered_mixture(tmp_path, 20)
    samples = list(show_samples(corpus, range(30)))
    for sample in samples:
        path = Path(sample.file)
        first_id = {"a": 0, "b": 10_000, "c": 20_000, "d": 30_000}[path.stem]
        first = first_id + sample.first_token
        assert sample.ids == list(range(first, first + 21))
        assert path.stem in sample.source
        assert sample.text is None
    assert {sample.component for sample in samples} == {0, 1, 2}
    assert samples[29].epoch == samples[29].draw // {0: 11, 1: 5, 2: 7}[samples[29].component]
    drawn = io.StringIO()
    Console(width=120, file=drawn).print(samples_table(samples))
    assert "... (21" in drawn.getvalue() and "no tokenizer is known" in drawn.getvalue()
