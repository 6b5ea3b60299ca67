"""The model and the tokenizer of a checkpoint, and the ids that precede a document."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import PostProcessor, Sequence, TemplateProcessing
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, GenerationConfig

from megaspeed.checkpoint.run_state import NOT_STATED, RUN_STATE
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.generation import Sampling, continue_prompt
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.text_model import TextModel, load_text_model, opening_ids
from megaspeed.hugging_face.weight_files import HuggingFaceError
from tests.checkpoint.written import CONFIG, seal
from tests.hugging_face.models import gpt2, qwen3, saved, with_tokenizer
from tests.hugging_face.tiny_text import checkpoint_of_text, tiny_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_text(tmp_path_factory.mktemp("run"))


def load(place: Path, tokenizer: Path | None = None) -> tuple[TextModel, list[str]]:
    """Return the model, and the reported lines without the one about a document's beginning."""
    reported: list[str] = []
    model = load_text_model(
        place,
        tokenizer=tokenizer,
        opening="auto",
        always_open=True,
        device="cpu",
        precision="float32",
        report=reported.append,
    )
    assert reported.pop() == "a document begins with <|endoftext|> (id 0); --opening changes this"
    return model, reported


def test_a_run_is_its_newest_checkpoint_with_the_tokenizer_it_carries(checkpoint: Path) -> None:
    model, reported = load(checkpoint.parents[1])
    assert (model.source, reported) == (checkpoint, [])
    assert model.positions == CONFIG.model.max_position_embeddings
    assert (model.tokenizer.vocab_size, model.tokenizer.end_of_text) == (301, 0)
    assert (model.opening, model.ends) == ((0,), (0,))
    assert type(model.model).__name__ == "GPT2LMHeadModel"


def test_a_hugging_face_folder_is_loaded_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    export_model(checkpoint, tmp_path / "exported", verify=False)
    ours, _ = load(checkpoint)
    model, reported = load(tmp_path / "exported")
    assert (model.source, reported) == (tmp_path / "exported", [])
    prompt = torch.arange(1, 20)[None]
    assert torch.equal(model.model(prompt).logits, ours.model(prompt).logits)


def test_a_hugging_face_folder_ends_at_its_own_ids_and_samples_as_the_user_states(
    tmp_path: Path,
) -> None:
    folder = with_tokenizer(saved(gpt2(), tmp_path / "hf"))
    settings = {"eos_token_id": [0, 7, 9], "do_sample": True, "top_k": 3, "repetition_penalty": 9.0}
    GenerationConfig(**settings).save_pretrained(folder)
    model, _ = load(folder)
    assert set(model.ends) == {0, 7, 9}
    # Its file would change the greedy choice.
    greedy = continue_prompt(model, "not", 1, Sampling(temperature=0, max_tokens=9))
    stock = AutoModelForCausalLM.from_pretrained(folder)
    (ids,) = model.tokenizer.encode(["not"])
    plain = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 9}
    expected = stock.generate(torch.tensor([[0, *ids]]), **plain)[0, 1 + len(ids) :].tolist()
    assert list(greedy.ids) == expected


def test_a_hugging_face_folder_must_state_its_positions(tmp_path: Path) -> None:
    """Bloom has no positions. Its scores depend on distances."""
    bloom = BloomForCausalLM(BloomConfig(vocab_size=301, hidden_size=32, n_layer=1, n_head=4))
    folder = with_tokenizer(saved(bloom, tmp_path / "hf"))
    with pytest.raises(HuggingFaceError, match=f"must state max_position_embeddings, .* {folder}"):
        load(folder)


def test_a_model_that_no_class_of_transformers_has_is_computed_by_ours(tmp_path: Path) -> None:
    """The model has Qwen3's features under the name of Llama, whose class has no norms of queries
    and keys.
    """
    folder = with_tokenizer(saved(qwen3(), tmp_path / "hf"))
    import_model(folder, tmp_path / "ours", verify=False)
    expected, _ = load(tmp_path / "ours")
    state = json.loads((tmp_path / "ours" / RUN_STATE).read_text())
    state["config"]["model"]["architecture"] = "llama"
    (tmp_path / "ours" / RUN_STATE).write_text(json.dumps(state))
    seal(tmp_path / "ours")
    model, (note,) = load(tmp_path / "ours")
    assert note.startswith("note: megaspeed computes this model, because it cannot be exported: ")
    assert "model.qk_norm is True, but LlamaForCausalLM of transformers has False" in note
    prompt = torch.arange(1, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model.model(prompt).logits, expected.model(prompt).logits, rtol=1e-5, atol=1e-5
        )
    for sampling in (Sampling(temperature=0, max_tokens=110), Sampling(max_tokens=20)):
        assert continue_prompt(model, "be", 1, sampling) == continue_prompt(
            expected, "be", 1, sampling
        )


def test_a_checkpoint_without_a_tokenizer_needs_one_named(checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (bare / "tokenizer.json").unlink()
    seal(bare)
    with pytest.raises(DataError, match=r"has no tokenizer; name .* in --tokenizer"):
        load(bare)
    model, reported = load(bare, write_tokenizer(tmp_path / "tokenizer.json"))
    assert (model.tokenizer.vocab_size, reported) == (301, [])


def test_an_unreadable_carried_tokenizer_is_not_called_a_setting(
    checkpoint: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (broken / "tokenizer.json").write_text("{}")
    seal(broken)
    with pytest.raises(DataError, match=r"^the tokenizer of the model must be .* save it"):
        load(broken)


def test_a_tokenizer_other_than_that_of_the_training_is_reported(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=280)
    model, (reported,) = load(checkpoint, other)
    assert reported.startswith(f"note: {checkpoint} was trained with the tokenizer of fingerprint ")
    assert reported.endswith(f"but that of {other} is {model.tokenizer.fingerprint}")


def test_token_files_that_state_no_tokenizer_fit_any(tmp_path: Path) -> None:
    _, reported = load(checkpoint_of_text(tmp_path / "run", trained_with=NOT_STATED))
    assert reported == []


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    larger = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=302)
    with pytest.raises(DataError) as caught:
        load(checkpoint, larger)
    for text in ("vocab_size: that is 301", f"--tokenizer, {larger}, has 302 entries"):
        assert text in str(caught.value)


def test_a_tokenizer_larger_than_a_hugging_face_model_is_refused(tmp_path: Path) -> None:
    folder = with_tokenizer(saved(gpt2(vocab_size=260), tmp_path / "hf"))
    with pytest.raises(DataError, match=rf"that of {folder} is 260, .* {folder} has 266 entries"):
        load(folder)


# --- what precedes a document ---------------------------------------------------------------------


def template(text: str) -> PostProcessor:
    """Return a template of a tokenizer in which 0 ends a text and ! and " have the ids 1 and 2."""
    return TemplateProcessing(single=text, special_tokens=[("!", 1), ('"', 2)])


@pytest.mark.parametrize(
    ("post_processor", "expected"),
    [
        (None, ()),
        (template("$A"), ()),
        (template("! $A"), (1,)),
        (template('! " $A'), (1, 2)),
        (template('! $A "'), (1,)),
        (template('$A "'), ()),
        (Sequence([template("$A"), template("! $A")]), (1,)),
    ],
    ids=["no template", "text", "one", "two", "one and an end", "an end", "in a sequence"],
)
def test_a_template_opens_with_what_it_puts_before_a_text(
    post_processor: PostProcessor | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    if post_processor is not None:
        tokenizer.tokenizer.post_processor = post_processor
    assert opening_ids("tokenizer", tokenizer, trained_here=True) == expected
    assert opening_ids("auto", tokenizer, trained_here=False) == expected
    assert opening_ids("auto", tokenizer, trained_here=True) == (0,)
    for here in (True, False):
        assert opening_ids("end-of-text", tokenizer, trained_here=here) == (0,)
        assert opening_ids("nothing", tokenizer, trained_here=here) == ()


def test_a_vocabulary_need_not_have_the_letter_a() -> None:
    digits = Tokenizer(models.BPE({"</s>": 0, "!": 1, '"': 2, "3": 3, "4": 4}, []))
    digits.post_processor = template('! $A "')
    assert digits.encode("a").ids == [1, 2]
    assert opening_ids("tokenizer", TextTokenizer(digits, 0), trained_here=False) == (1,)
