"""The model and the tokenizer of a checkpoint, and the ids that precede a document."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenizers.processors import PostProcessor, Sequence, TemplateProcessing
from transformers import GenerationConfig, PreTrainedModel

from megaspeed.checkpoint.run_state import RUN_STATE
from megaspeed.cli import main
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.text_model import TextModel, ids_before_text, load_text_model
from tests.checkpoint.written import CONFIG, seal
from tests.hugging_face.models import (
    gpt2,
    mixtral,
    olmoe,
    qwen3,
    qwen3_moe,
    same,
    saved,
    with_tokenizer,
)
from tests.hugging_face.tiny_text import checkpoint_of_text, tiny_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_text(tmp_path_factory.mktemp("run"))


def load(place: Path, tokenizer: Path | None = None) -> TextModel:
    return load_text_model(place, tokenizer=tokenizer, precision="float32", report=pytest.fail)


def test_a_run_is_its_newest_checkpoint_with_the_tokenizer_it_carries(checkpoint: Path) -> None:
    model = load(checkpoint.parents[1])
    assert model.source == checkpoint
    assert model.positions == CONFIG.model.max_position_embeddings
    assert (model.tokenizer.vocab_size, model.tokenizer.end_of_text) == (301, 0)
    assert (model.opening, model.ends) == ((0,), (0,))
    assert type(model.model).__name__ == "GPT2LMHeadModel"


def test_an_imported_model_ends_at_its_own_ids(tmp_path: Path) -> None:
    folder = with_tokenizer(saved(gpt2(), tmp_path / "hf"))
    GenerationConfig(eos_token_id=[0, 7, 9]).save_pretrained(folder)
    import_model(folder, tmp_path / "ours", verify=False)
    assert set(load(tmp_path / "ours").ends) == {0, 7, 9}


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, olmoe])
def test_imported_experts_have_the_same_weights_in_transformers(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """Files have a tensor for each expert. In memory, transformers stacks them in one parameter."""
    stock = make()
    import_model(with_tokenizer(saved(stock, tmp_path / "hf")), tmp_path / "ours", verify=False)
    assert same(load(tmp_path / "ours").model.state_dict(), stock.state_dict())
    assert main(["generate", "--checkpoint", str(tmp_path / "ours"), "--max-tokens", "3"]) == 0


def test_a_model_that_no_class_of_transformers_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has Qwen3's features under the name of Llama, whose class has no norms of queries
    and keys.
    """
    folder = with_tokenizer(saved(qwen3(), tmp_path / "hf"))
    import_model(folder, tmp_path / "ours", verify=False)
    state = json.loads((tmp_path / "ours" / RUN_STATE).read_text())
    state["config"]["model"]["architecture"] = "llama"
    (tmp_path / "ours" / RUN_STATE).write_text(json.dumps(state))
    seal(tmp_path / "ours")
    assert main(["generate", "--checkpoint", str(tmp_path / "ours")]) == 2
    message = "model.qk_norm is True, but LlamaForCausalLM of transformers has False"
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_needs_one_named(checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (bare / "tokenizer.json").unlink()
    seal(bare)
    with pytest.raises(DataError, match=r"has no tokenizer for it; name .* in --tokenizer"):
        load(bare)
    model = load(bare, write_tokenizer(tmp_path / "tokenizer.json"))
    assert model.tokenizer.vocab_size == 301


def test_an_unreadable_carried_tokenizer_is_not_called_a_setting(
    checkpoint: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (broken / "tokenizer.json").write_text("{}")
    seal(broken)
    with pytest.raises(DataError, match=r"^the tokenizer beside a model must be .* save it"):
        load(broken)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    larger = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=302)
    with pytest.raises(DataError) as caught:
        load(checkpoint, larger)
    for text in ("vocab_size: that is 301", f"--tokenizer, {larger}, has 302 entries"):
        assert text in str(caught.value)


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
    assert ids_before_text(tokenizer) == expected


def test_a_vocabulary_need_not_have_the_letter_a() -> None:
    digits = Tokenizer(models.BPE({"</s>": 0, "!": 1, '"': 2, "3": 3, "4": 4}, []))
    digits.post_processor = template('! $A "')
    assert digits.encode("a").ids == [1, 2]
    assert ids_before_text(TextTokenizer(digits, 0)) == (1,)
