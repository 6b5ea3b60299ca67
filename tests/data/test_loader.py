"""A loader gives each dp rank its rows of a step, as tensors, and reads one micro-batch ahead."""

import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megaspeed.data import sampler as rows
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import (
    LoaderShape,
    OneAhead,
    TrainingLoader,
    ValidationLoader,
    read_micro_batch,
)
from megaspeed.data.sampler import Place, Rows, shuffled
from megaspeed.model.micro_batch import NOT_COUNTED, PADDING_SAMPLE, MicroBatch
from tests.data.numbered_corpus import (
    alone,
    numbered_corpus,
    numbered_mixture,
    write_numbered_tokens,
)
from tests.support.machine import limit

S = 6
TRAIN_BATCH = 48  # dp 1, 2, 3, 4 and micro-batches 1, 2, 4 all divide it
SEQUENCES = 37  # does not divide anything
LAYOUTS = list(product((1, 2, 3, 4), (1, 2, 4)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return numbered_corpus(
        tmp_path_factory.mktemp("corpus"),
        train_tokens=SEQUENCES * S + 4,  # a rest of 3 tokens that fills no sequence
        validation_tokens=21 * S + 1,
        sequence_length=S,
    )


def shape(dp_rank: int, dp_size: int, micro_batch_size: int) -> LoaderShape:
    steps = TRAIN_BATCH // (dp_size * micro_batch_size)
    return LoaderShape(micro_batch_size, steps, dp_rank, dp_size)


def one_step(
    corpus: PreparedCorpus, samples_consumed: int, dp_size: int, micro_batch_size: int
) -> dict[int, list[int]]:
    """Return {sample: its S tokens and its last target} of a step, gathered from all dp ranks."""
    rows: dict[int, list[int]] = {}
    for dp_rank in range(dp_size):
        cut = shape(dp_rank, dp_size, micro_batch_size)
        loader = TrainingLoader(corpus, cut)
        for micro_batch in range(cut.gradient_accumulation_steps):
            batch = loader.micro_batch(samples_consumed, micro_batch)
            assert batch.tokens.shape == batch.targets.shape == (micro_batch_size, S)
            assert batch.tokens.dtype == batch.targets.dtype == torch.int64
            assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
            for sample, tokens, targets in zip(
                batch.samples.tolist(), batch.tokens.tolist(), batch.targets.tolist(), strict=True
            ):
                assert sample not in rows
                rows[sample] = [*tokens, targets[-1]]
    return rows


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return numbered_mixture(tmp_path_factory.mktemp("mixture"), S)


@given(st.sampled_from(LAYOUTS), st.integers(0, 1000))
def test_a_step_has_the_same_samples_at_every_layout_and_after_any_resume(
    corpus: PreparedCorpus, mixture: PreparedCorpus, layout: tuple[int, int], consumed: int
) -> None:
    """Both one source and a mixture of three go through many epochs."""
    key = f"{corpus.seed}:{corpus.fingerprint}"
    rows = one_step(corpus, consumed, *layout)
    assert sorted(rows) == list(range(consumed, consumed + TRAIN_BATCH))
    for sample, row in rows.items():
        start = shuffled(sample, SEQUENCES, key) * S
        assert row == list(range(start, start + S + 1))
    assert one_step(mixture, consumed, *layout) == one_step(mixture, consumed, 1, 1)


def test_a_component_of_a_mixture_has_every_sequence_once_before_any_twice(
    mixture: PreparedCorpus,
) -> None:
    first_ids = [row[0] for row in one_step(mixture, 0, 1, 1).values()]
    of_c_and_d = [first_id for first_id in first_ids if first_id >= 20_000]
    sequences = [*range(20_000, 20_024, S), *range(30_000, 30_018, S)]
    assert len(of_c_and_d) >= 14  # 0.3 of 48 samples: two epochs of 7 sequences
    assert sorted(of_c_and_d[:7]) == sorted(of_c_and_d[7:14]) == sequences


def test_an_epoch_predicts_every_token_once(corpus: PreparedCorpus) -> None:
    loader = TrainingLoader(corpus, LoaderShape(1, 1, dp_rank=0, dp_size=1))
    targets = [loader.micro_batch(sample, 0).targets for sample in range(SEQUENCES)]
    assert sorted(torch.cat(targets).flatten().tolist()) == list(range(1, SEQUENCES * S + 1))


def test_the_drawing_of_rows_in_the_loaders_docstring() -> None:
    def rows(dp_rank: int, micro_batch: int) -> list[int]:
        return list(LoaderShape(2, 2, dp_rank, dp_size=2).rows(micro_batch))

    assert [rows(0, 0), rows(0, 1)] == [[0, 1], [4, 5]]
    assert [rows(1, 0), rows(1, 1)] == [[2, 3], [6, 7]]


@pytest.mark.parametrize("eval_batches", [1, 2])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), LAYOUTS)
def test_an_evaluation_counts_the_same_rows_at_every_layout(
    corpus: PreparedCorpus, dp_size: int, micro_batch_size: int, eval_batches: int
) -> None:
    steps = 16 // (dp_size * micro_batch_size) or 1
    shapes = [LoaderShape(micro_batch_size, steps, rank, dp_size) for rank in range(dp_size)]
    counted = min(21, eval_batches * shapes[0].train_batch_size)
    seen: list[int] = []
    targets: list[int] = []
    lengths = set()
    for cut in shapes:
        loader = ValidationLoader(corpus, cut, eval_batches=eval_batches)
        lengths.add(len(loader))
        assert loader.predicted_tokens == counted * S
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            assert batch.tokens.shape == (micro_batch_size, S)
            padding = batch.samples < 0
            assert torch.all(batch.targets[padding] == NOT_COUNTED)
            seen += batch.samples[~padding].tolist()
            targets += batch.targets[~padding].flatten().tolist()
    assert len(lengths) == 1
    assert sorted(seen) == list(range(counted))
    assert sorted(targets) == list(range(1, counted * S + 1))


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), LAYOUTS)
def test_an_evaluation_of_a_mixture_has_the_same_rows_at_every_layout(
    mixture: PreparedCorpus, dp_size: int, micro_batch_size: int
) -> None:
    rows: dict[int, int] = {}
    for dp_rank in range(dp_size):
        cut = LoaderShape(micro_batch_size, 1, dp_rank, dp_size)
        for batch in ValidationLoader(mixture, cut, eval_batches=100):
            rows |= dict(zip(batch.samples.tolist(), batch.tokens[:, 0].tolist(), strict=True))
    rows.pop(PADDING_SAMPLE, None)
    assert sorted(rows) == list(range(mixture.validation_sequences))
    # Of every component the sequences in order, and again from the first.
    assert mixture.validation is not None
    for number, component in enumerate(mixture.validation.components):
        first_id, sequences = number * 10_000, component.sequences(S)
        own = [rows[row] for row in sorted(rows) if first_id <= rows[row] < first_id + 10_000]
        assert own == [first_id + draw % sequences * S for draw in range(len(own))]


def test_rows_mark_their_documents_if_attention_restarts_at_each(tmp_path: Path) -> None:
    corpus = numbered_corpus(
        tmp_path, train_tokens=S + 1, validation_tokens=S + 1, sequence_length=S
    )
    resetting = replace(corpus, reset_at_documents=True)  # the id 0, the first, ends a document
    (plain, reset) = (
        TrainingLoader(each, LoaderShape(1, 1, 0, 1)).micro_batch(0, 0)
        for each in (corpus, resetting)
    )
    assert plain.documents is None
    assert reset.documents is not None and reset.documents.segments.cu_seqlens.tolist() == [0, S]
    (evaluated,) = ValidationLoader(resetting, LoaderShape(1, 1, 0, 1), eval_batches=1)
    assert evaluated.documents is not None
    assert evaluated.documents.positions.tolist() == [list(range(S))]


def test_without_held_out_documents_an_evaluation_is_empty(corpus: PreparedCorpus) -> None:
    alone = PreparedCorpus(corpus.train, None, corpus.tokenizer, S, corpus.seed)
    loader = ValidationLoader(alone, LoaderShape(2, 1, 0, 1), eval_batches=3)
    assert (len(loader), loader.predicted_tokens, list(loader)) == (0, 0, [])


def test_reading_ahead_changes_no_row(corpus: PreparedCorpus) -> None:
    cut = shape(dp_rank=1, dp_size=2, micro_batch_size=4)
    direct, behind = TrainingLoader(corpus, cut), TrainingLoader(corpus, cut)
    # What a loader does on a GPU, except pinning: it reads, and predicts the next read.
    read, requested = [], 0

    def reading(key: tuple[int, int, int]) -> MicroBatch:
        read.append(key)
        return behind._read(key)

    ahead = OneAhead(reading, behind._following, torch.device("cpu"))
    for samples_consumed in (0, 48, 96, 7):  # the last is a resumption that no guess foresees
        for micro_batch in range(cut.gradient_accumulation_steps):
            requested += 1
            expected = direct.micro_batch(samples_consumed, micro_batch)
            actual = ahead.get((samples_consumed, micro_batch, cut.train_batch_size))
            assert torch.equal(actual.samples, expected.samples)
            assert torch.equal(actual.tokens, expected.tokens)
    ahead.close()
    assert len(read) <= requested + 2, "one guess is wrong, and one comes after the end"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_on_a_gpu_are_those_on_the_cpu(corpus: PreparedCorpus) -> None:
    cut = shape(dp_rank=0, dp_size=1, micro_batch_size=4)
    on_cpu, on_gpu = TrainingLoader(corpus, cut), TrainingLoader(corpus, cut, "cuda")
    for micro_batch in range(cut.gradient_accumulation_steps):
        expected, actual = on_cpu.micro_batch(0, micro_batch), on_gpu.micro_batch(0, micro_batch)
        assert actual.tokens.is_cuda
        assert torch.equal(actual.tokens.cpu(), expected.tokens)
        assert torch.equal(actual.targets.cpu(), expected.targets)
    on_gpu.close()


def test_of_many_files_only_some_are_mapped_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mapped file takes a file descriptor, and a process may have only about a thousand."""
    monkeypatch.setattr(rows, "_MAPPED_AT_ONCE", 3)
    files = [write_numbered_tokens(tmp_path, S + 1, f"{i}", 100 * i) for i in range(20)]
    read = Rows(alone(*files), S)
    before = psutil.Process().num_fds()
    for i in [*range(20), 0]:
        place = Place(component=0, draw=i, sequence=i, file=i, first_token=0)
        assert read.at(place)[0] == 100 * i
        assert psutil.Process().num_fds() <= before + 3


END = 9
ROWS = [
    np.array([5, 6, END, 7, 8, END, END, 4, 3], dtype=np.uint16),
    np.array([END, 1, 2, 3, 4, 5, 6, 7, END], dtype=np.uint16),
]


def read(end_of_text: int | None) -> MicroBatch:
    return read_micro_batch(
        ROWS, [40, 41], micro_batch_size=3, sequence_length=8, end_of_text=end_of_text
    )


def test_end_of_text_opens_the_document_that_follows_it() -> None:
    batch = read(END)
    assert batch.tokens[0].tolist() == [5, 6, END, 7, 8, END, END, 4]
    assert batch.documents is not None
    assert batch.documents.positions[0].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert batch.documents.positions[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.documents.segments.cu_seqlens.tolist() == [0, 2, 5, 6, 8, 16, 24]


def test_a_padding_row_is_one_document() -> None:
    batch = read(0)  # the id of padding
    assert batch.documents is not None
    assert batch.documents.segments.cu_seqlens.tolist() == [0, 8, 16, 24]


@pytest.mark.parametrize("size", [1, 2])
def test_the_tokens_of_padding_rows_exist(size: int) -> None:
    """A dp rank whose last micro-batch of an evaluation has no row still runs the model."""
    batch = read_micro_batch([], [], micro_batch_size=size, sequence_length=8)
    assert torch.all(batch.tokens == 0) and torch.all(batch.targets == NOT_COUNTED)


def test_every_target_is_of_the_document_that_predicts_it_or_its_end() -> None:
    batch = read(END)
    assert batch.documents is not None
    numbers = (batch.documents.positions == 0).cumsum(dim=1)
    predicting, of_target = numbers[:, :-1], numbers[:, 1:]
    targets = batch.targets[:, :-1]
    goes_on = (targets != END) & (targets != NOT_COUNTED)
    assert torch.equal(predicting[goes_on], of_target[goes_on])
    ends = targets == END
    assert torch.equal(predicting[ends] + 1, of_target[ends])


def test_tokens_and_targets_do_not_depend_on_documents() -> None:
    reset, plain = read(END), read(None)
    assert plain.documents is None
    assert torch.equal(reset.tokens, plain.tokens)
    assert torch.equal(reset.targets, plain.targets)
    assert reset.samples.dtype == torch.int64
    assert reset.samples.tolist() == plain.samples.tolist() == [40, 41, PADDING_SAMPLE]


def test_a_batch_moves_with_its_samples_and_documents() -> None:
    moved = read(END).to(torch.device("meta"))
    assert moved.documents is not None
    positions, cu_seqlens = moved.documents.positions, moved.documents.segments.cu_seqlens
    tensors = (moved.tokens, moved.targets, moved.samples, positions, cu_seqlens)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert positions.shape == moved.tokens.shape
    assert read(None).to(torch.device("meta")).documents is None


CPU = torch.device("cpu")


def test_the_next_item_is_read_before_it_is_requested() -> None:
    read: list[int] = []
    second_read = threading.Event()

    def load(key: int) -> int:
        read.append(key)
        if key == 1:
            second_read.set()
        return key * 10

    ahead = OneAhead(load, lambda key: key + 1, CPU)
    assert ahead.get(0) == 0
    assert second_read.wait(timeout=limit(5))
    assert ahead.get(1) == 10
    ahead.close()
    assert read.count(1) == 1


def test_the_requested_item_is_returned_if_the_guess_was_wrong() -> None:
    ahead = OneAhead(lambda key: key * 10, lambda key: key + 1, CPU)
    assert [ahead.get(key) for key in (0, 1, 7, 8, 0, 0)] == [0, 10, 70, 80, 0, 0]
    ahead.close()


def test_an_error_is_raised_only_by_the_get_of_its_own_item() -> None:
    def load(key: int) -> int:
        if key == 1:
            raise OSError("disk")
        return key

    ahead = OneAhead(load, lambda key: key + 1, CPU)
    assert ahead.get(0) == 0
    with pytest.raises(OSError, match="disk"):
        ahead.get(1)
    assert ahead.get(2) == 2
    ahead.close()


def test_close_ends_the_thread() -> None:
    before = set(threading.enumerate())
    ahead = OneAhead(lambda key: key, lambda key: key + 1, CPU)
    ahead.get(0)
    (thread,) = set(threading.enumerate()) - before
    ahead.close()
    assert not thread.is_alive()


def test_the_thread_works_for_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the thread would use GPU 0, and pinning memory would open a context there."""
    taken: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: taken.append((threading.current_thread().name, gpu))
    )
    ahead = OneAhead(lambda key: key, lambda key: key + 1, torch.device("cuda", 3))
    ahead.get(0)
    ahead.close()
    assert taken == [("prefetch_0", torch.device("cuda", 3))]


def test_evaluations_and_samples_are_copied_to_a_gpu_from_pinned_memory(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from other memory makes the host wait. An earlier version pinned only in training."""
    pinned: set[int] = set()

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def copy_to(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert device.type == "cuda" and non_blocking and tensor.data_ptr() in pinned
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", copy_to)
    for each in ValidationLoader(corpus, shape(0, 1, 4), eval_batches=1, device="cuda"):
        assert each.tokens.shape == (4, S)
    assert len(pinned) > 0
