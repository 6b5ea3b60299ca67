"""The model continues ``training.sample_prompts`` equally at every layout, and trains as without.

Weights are large, so the likeliest token is clear, whatever the rounding. A high temperature makes
many tokens about as likely.
"""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaspeed.checkpoint.run_state import Progress
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.errors import DataError
from megaspeed.data.loader import LoaderShape
from megaspeed.data.prompts import read_prompts
from megaspeed.model.dropout import random_key
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.supervision.process_end import StopSignal
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.drawing import Draw
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.metrics import SampleMetrics
from megaspeed.training.samples import write_samples
from megaspeed.training.trainer import Trainer
from megaspeed.training.worker import Worker
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, LLAMA, MOE, merge, short_documents, tiny_corpus, tiny_run
from tests.training.recorded import Record

TEXT = Path(__file__).parents[2] / "LICENSE"
PROMPTS = ["", "You", "the te", "1", "and/or", "Work", "(c)"]
TOKENS = 8
LARGE = {"num_hidden_layers": 4, "num_attention_heads": 8, "initializer_range": 0.7}


class Samples(Record):
    """A record that keeps the samples, and the weights at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[SampleMetrics] = []
        self.last_weights: dict[str, Tensor] = {}
        self.graphs = 0

    def sampled(self, metrics: SampleMetrics) -> None:
        self.samples.append(metrics)
        self.events.append(("samples", metrics.step))


def train(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> Samples:
    record = Samples()
    with (
        StopSignal() as stop,
        ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        worker = Worker(run, context)
        trainer = Trainer(worker, corpus, Checkpointing(worker, corpus), stop, record)
        trainer.train(Progress())
        record.last_weights = dict(worker.engine.gather_parameters())
        record.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return record


class Runs:
    """Runs of a few steps on short documents."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._text = short_documents(TEXT, folder)
        self._known: dict[str, list[Samples]] = {}

    def trained(self, prompts: list[str] | None = None, **changes: Any) -> list[Samples]:
        """Return the records of all ranks, with these prompts or all of them."""
        key = repr((prompts, changes))
        if key not in self._known:
            self._known[key] = self._train(prompts, changes)
        return self._known[key]

    def _train(self, prompts: list[str] | None, changes: dict[str, Any]) -> list[Samples]:
        training = {
            "steps": 4,
            "eval_interval": 2,
            "save_interval": 0,
            "sample_prompts": PROMPTS if prompts is None else prompts,
            "sample_tokens": TOKENS,
            "run_dir": tempfile.mkdtemp(dir=self._folder),
        }
        base: dict[str, Any] = {
            "model": {**GPT2, **LARGE},
            "data": {"validation_fraction": 0.1},
            "gradient_accumulation_steps": 2,
        }
        run = tiny_run(self._text, **merge(merge(base, {"training": training}), changes))
        corpus = tiny_corpus(run, self._folder / "cache")
        return self._pool.run(run.grid.world_size, train, run, corpus)


@pytest.fixture(scope="module")
def runs(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def serial(runs: Runs) -> dict[bool, list[SampleMetrics]]:
    """Return the samples of one process, by whether attention restarts at documents."""
    return {
        restarts: runs.trained(data={"reset_at_documents": restarts})[0].samples
        for restarts in (False, True)
    }


CHUNKS: dict[str, Any] = {
    "pp": 2,
    "dp": 2,
    "parallel": {"virtual_stages": 2},
    "zero_optimization": {"stage": 3},
}
CONTEXT: dict[str, Any] = {
    "pp": 2,
    "cp": 2,
    "tp": 2,
    "parallel": {"context_method": "all_gather", "sequence_parallel": True, "schedule": "gpipe"},
    "data": {"reset_at_documents": True},
    "zero_optimization": {"stage": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2-dp2-zero3-chunks": CHUNKS,
    "pp2-cp2-tp2-zero2-all_gather-documents": CONTEXT,
    "dp2-cp2-zero1-ulysses": {
        "dp": 2,
        "cp": 2,
        "parallel": {"context_method": "ulysses"},
        "zero_optimization": {"stage": 1},
    },
    "dp2-tp2-zero3-full": {
        "dp": 2,
        "tp": 2,
        "parallel": {"sequence_parallel": True, "activation_checkpointing": "full"},
        "data": {"reset_at_documents": True},
        "zero_optimization": {"stage": 3},
    },
    "pp2-dp2x2-zero3": {
        "pp": 2,
        "dp": 4,
        "parallel": {"replicate": 2},
        "zero_optimization": {"stage": 3},
    },
}


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_samples_are_those_of_one_process_on_all_ranks(
    changes: dict[str, Any], runs: Runs, serial: dict[bool, list[SampleMetrics]]
) -> None:
    expected = serial["data" in changes]
    assert [metrics.step for metrics in expected] == [2, 4], "as for validations"
    written = {text for metrics in expected for _, text in metrics.samples}
    assert [prompt for prompt, _ in expected[0].samples] == PROMPTS
    assert len(written) > 5, "they differ"
    for record in runs.trained(**changes):
        assert record.samples == expected


DRAWN: dict[str, Any] = {"sample_temperature": 30.0, "sample_top_k": 60}
EXPERTS: dict[str, Any] = {"model": {**MOE, "num_hidden_layers": 4, "initializer_range": 0.7}}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({}, CONTEXT),
        ({}, {**CHUNKS, "training": {"sample_top_k": None}}),
        (EXPERTS, {"dp": 2, "tp": 2, "parallel": {"expert": 4}, "zero_optimization": {"stage": 1}}),
    ],
    ids=["context", "chunks-all-tokens", "experts"],
)
def test_every_layout_draws_the_same_samples(
    model: dict[str, Any],
    layout: dict[str, Any],
    runs: Runs,
    serial: dict[bool, list[SampleMetrics]],
) -> None:
    drawn, free = merge({"training": DRAWN}, model), ("model", "data", "training")
    same = {name: layout[name] for name in free if name in layout}
    (expected,) = [record.samples for record in runs.trained(**merge(drawn, same))]
    assert [metrics.step for metrics in expected] == [2, 4]
    assert all(one != other for one, other in zip(expected, serial["data" in layout], strict=True))
    for record in runs.trained(**merge(drawn, layout)):
        assert record.samples == expected


def test_a_draw_depends_on_no_earlier_one(runs: Runs) -> None:
    """So a resumed run draws the same samples."""
    drawn: dict[str, Any] = {"training": {**DRAWN, "eval_interval": 4}}
    (later,) = runs.trained(**drawn)[0].samples
    assert later == runs.trained(training=DRAWN)[0].samples[1]


@pytest.mark.parametrize("changes", [CHUNKS, CONTEXT], ids=["chunks", "context"])
def test_samples_change_no_bit_of_the_training(changes: dict[str, Any], runs: Runs) -> None:
    for sampled, alone in zip(
        runs.trained(**changes), runs.trained(prompts=[], **changes), strict=True
    ):
        assert len(sampled.samples) == 2 and not alone.samples
        for name in ("loss", "grad_norm", "learning_rate", "skipped"):
            numbers = [getattr(step, name) for step in sampled.steps]
            assert numbers == [getattr(step, name) for step in alone.steps]
        assert sampled.validations == alone.validations
        assert sampled.last_weights.keys() == alone.last_weights.keys()
        for name, weight in sampled.last_weights.items():
            assert torch.equal(weight, alone.last_weights[name]), name


def test_compiled_blocks_are_not_compiled_again(
    runs: Runs, serial: dict[bool, list[SampleMetrics]]
) -> None:
    changes: dict[str, Any] = {"tp": 2, "data": {"reset_at_documents": True}}
    changes["training"] = {"compile": True}
    sampled, alone = runs.trained(**changes), runs.trained(prompts=[], **changes)
    assert sampled[0].samples == serial[True]
    assert sampled[0].graphs == alone[0].graphs > 0


def test_samples_are_what_generate_writes_from_the_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    training = {"steps": 1, "run_dir": str(tmp_path / "run"), "sample_prompts": PROMPTS}
    run = tiny_run(
        TEXT,
        dp=2,
        model={**LLAMA, "initializer_range": 0.7},
        training={**training, "sample_tokens": TOKENS},
        zero_optimization={"stage": 3},
    )
    record, _ = pool.run(2, train, run, tiny_corpus(run, tmp_path / "cache"))
    # Imported here, because every rank imports this file, and transformers takes a second.
    from megaspeed.hugging_face.text_model import Sampling, continue_prompt, load_text_model

    model = load_text_model(tmp_path / "run", tokenizer=None, precision="float32")
    (samples,) = (metrics.samples for metrics in record.samples)
    assert [prompt for prompt, _ in samples] == PROMPTS
    for prompt, text in samples:
        greedy = Sampling(temperature=0, max_tokens=TOKENS)
        assert text == continue_prompt(model, prompt, 1, greedy).text


def test_a_document_that_the_model_ends_is_not_continued(tmp_path: Path) -> None:
    run = tiny_run(TEXT, training={"sample_prompts": ["a", "a"], "sample_tokens": 9})
    corpus = tiny_corpus(run, tmp_path)
    read = read_prompts(run.config.training, corpus.tokenizer, corpus.sequence_length)
    assert read is not None
    tokenizer, rows = read
    (first,), (second,) = tokenizer.encode(["x"]), tokenizer.encode(["y"])
    tokens = iter([[*first, *second], [tokenizer.end_of_text, *second], [*first, 0], [1, 1]])
    seen: list[list[int]] = []
    draws: list[Draw] = []

    def next_tokens(batches: list[MicroBatch], draw: Draw) -> list[int]:
        (batch,) = batches
        draws.append(draw)
        seen.append((batch.targets != NOT_COUNTED).int().argmax(dim=1).tolist())
        return next(tokens)

    worker: Any = SimpleNamespace(
        run=run,
        context=SimpleNamespace(device=torch.device("cpu")),
        next_tokens=next_tokens,
    )
    samples = write_samples(worker, corpus, LoaderShape(2, 1, 0, 1), read, step=3)
    assert samples == [("a", "x"), ("a", "yy")], "equal prompts have a sample each"
    assert rows == [[0, *ids] for ids in tokenizer.encode(["a", "a"])], "the prompts are kept"
    assert seen == [[1, 1], [2, 2], [3, 3]], "it stops when all documents have ended"
    assert draws == [
        Draw(random_key(f"sample/1234/3/{token}"), temperature=0.0) for token in range(3)
    ], "each token has its own random numbers"


def test_padding_of_the_vocabulary_is_never_the_likeliest() -> None:
    """The logit of the padding, 0, is the largest."""
    output, loss = nn.Linear(2, 4, bias=False), VocabParallelLoss(range(5, 8), TensorAxis())
    with torch.no_grad():
        output.weight.copy_(torch.tensor([[-3.0, 0], [-1, 0], [-1, 0], [0, 0]]))
    x = torch.tensor([[[9.0, 9], [1, 1]], [[2, 2], [9, 9]], [[9, 9], [9, 9]]])
    targets = torch.full((3, 2), NOT_COUNTED)
    targets[0, 1] = targets[1, 0] = 7
    draw = Draw(random_key(""), temperature=0.0)
    logits, ids = loss.next_token(x, output, targets, draw=draw).tolist()
    assert logits == [-1, -2, -torch.inf], "the last row has no counted target"
    assert ids[:2] == [6, 6], "the first of equal ones"


def test_prompts_that_do_not_fit_are_refused_with_their_numbers(tmp_path: Path) -> None:
    run = tiny_run(TEXT, training={"sample_prompts": ["a", "aQbQcQdQ"], "sample_tokens": 9})
    corpus = tiny_corpus(run, tmp_path)
    with pytest.raises(DataError) as caught:
        read_prompts(run.config.training, corpus.tokenizer, corpus.sequence_length)
    assert str(caught.value) == (
        "training.sample_prompts[1] has 9 tokens with the end-of-text before it. 9 + "
        "training.sample_tokens 9 must be at most data.sequence_length 16; shorten the prompt, or "
        "lower training.sample_tokens"
    )


def test_prompts_need_a_tokenizer() -> None:
    samples = {"sample_prompts": ["a"], "sample_tokens": 4}
    training = tiny_run(TEXT, training=samples).config.training
    with pytest.raises(DataError, match=r"without a tokenizer; name it in data\.tokenizer"):
        read_prompts(training, None, 16)
