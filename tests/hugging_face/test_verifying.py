"""The comparison itself: its prompts, its tolerances, and models with few positions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face import verifying
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.verifying import Disagreement, compare, load_transformers_model
from megaspeed.hugging_face.weights import HuggingFaceError
from megaspeed.model.gpt import Head
from tests.hugging_face.models import gpt2, llama, saved, weights_in
from tests.model.tiny_gpt import llama as our_llama


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (checkpoint, folder) of the same Llama."""
    root = tmp_path_factory.mktemp("both")
    import_model(saved(llama(), root / "hf"), root / "checkpoint", verify=False)
    return root / "checkpoint", root / "hf"


def test_figures_of_an_agreement(both: tuple[Path, Path]) -> None:
    found = compare(*both)
    assert found.tokens == 96
    assert 0 < found.difference < 1e-13
    assert found.tolerance == pytest.approx(1e-10 * 4, rel=0.5)


@pytest.mark.parametrize("positions", [1, 20])
def test_a_model_with_few_positions_gets_a_shorter_prompt(tmp_path: Path, positions: int) -> None:
    folder = saved(gpt2(n_positions=positions), tmp_path / "hf")
    import_model(folder, tmp_path / "checkpoint", verify=False)
    assert compare(tmp_path / "checkpoint", folder).tokens == positions


@pytest.mark.parametrize("vocab_size", [1, 7, 301, 128_256])
def test_prompts_cover_the_vocabulary(vocab_size: int) -> None:
    """64 ids are spread evenly over the sixteenths of the vocabulary."""
    ids = verifying._spread_ids(vocab_size, 64)
    assert ids.min() >= 0 and ids.max() < vocab_size
    assert torch.equal(ids, verifying._spread_ids(vocab_size, 64))
    counts = torch.histc(ids.float(), 16, 0, vocab_size)
    if vocab_size > 64:
        assert counts.min() >= 3 and counts.max() <= 5


def test_a_model_takes_prompts_of_up_to_512_tokens() -> None:
    config = our_llama(max_position_embeddings=4096)
    assert verifying._length(config) == 512


# --- limits ---------------------------------------------------------------------------------------


def shifted(by: float) -> Callable[..., Tensor]:
    """Return a forward pass of the head that adds ``by`` to one logit."""

    def forward(self: Head, x: Tensor, loss: None) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        logits[..., 5] += by
        return logits

    return forward


@pytest.mark.parametrize("by", [1e-8, -1e-8, float("nan"), float("inf")])
def test_one_logit_that_differs_by_more_than_the_limit_is_enough(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    """fp32 would not show such a difference."""
    monkeypatch.setattr("megaspeed.model.gpt.Head.forward", shifted(by))
    with pytest.raises(Disagreement, match=r"in fp64, but rounding explains only [\d.]+e-10 "):
        compare(*both)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("std", [None, 0.006], ids=["large", "small"])
def test_in_fp64_both_are_exact_to_its_rounding(
    tmp_path: Path, make: Callable[..., PreTrainedModel], std: float | None
) -> None:
    """This holds even if transformers rounds to fp32, which would cause 1e-7 of the
    largest logit.
    """
    model = make() if std is None else make(initializer_range=std, random=False)
    import_model(saved(model, tmp_path / "hf"), tmp_path / "checkpoint", verify=False)
    found = compare(tmp_path / "checkpoint", tmp_path / "hf")
    assert found.difference < 1e-3 * found.tolerance


def test_logits_that_are_nan_agree_with_nothing() -> None:
    for strange in (float("nan"), float("inf")):
        theirs = torch.zeros(8, 301)
        theirs[3, 3] = strange
        with pytest.raises(Disagreement, match="logits must be finite to be compared, but transf"):
            verifying._agreement(torch.zeros(8, 301), theirs)


def test_what_rounding_explains_passes(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaspeed.model.gpt.Head.forward", shifted(1e-10))
    assert compare(*both).difference == pytest.approx(1e-10, rel=0.1)


# --- what cannot be compared ----------------------------------------------------------------------


def test_transformers_must_use_exactly_the_stored_tensors(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "hf")
    weights = weights_in(folder)
    beside = {"model.layers.7.mlp.up_proj.weight": torch.zeros(48, 32)}
    save_file(weights | beside, folder / "model.safetensors", metadata={"format": "pt"})
    load_transformers_model(folder, strict=False)
    with pytest.raises(HuggingFaceError, match=r"it also has model\.layers\.7\.mlp"):
        load_transformers_model(folder, strict=True)
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HuggingFaceError, match=r"it does not have model\.norm\.weight"):
        load_transformers_model(folder, strict=False)


def test_too_little_memory_for_the_comparison_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-2 7B in fp64 has 54 GB of weights; the logits are added to this."""
    config = ModelConfig.model_validate({"preset": "llama-2-7b"})
    monkeypatch.setattr("megaspeed.hugging_face.verifying.available_memory_bytes", lambda: 32 << 30)
    with pytest.raises(HuggingFaceError, match=r"takes about 54,\d+,\d+,\d+ bytes of memory, but "):
        verifying.check_memory(config)
    monkeypatch.setattr("megaspeed.hugging_face.verifying.available_memory_bytes", lambda: 64 << 30)
    verifying.check_memory(config)
    monkeypatch.undo()
    assert 0 < verifying.available_memory_bytes() < 1 << 50
