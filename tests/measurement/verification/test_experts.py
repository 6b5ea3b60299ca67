"""One process replays the choices of a layout, and counts where its own differ."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megaspeed.cli import main
from megaspeed.config.resolve import Run
from megaspeed.measurement.verification import verify
from megaspeed.measurement.verification.comparison import Comparison, flipped_choices, verdict
from megaspeed.measurement.verification.experts import ReferenceExperts
from megaspeed.measurement.verification.reference import ReferenceRun, train_reference
from megaspeed.measurement.verification.verify import ParallelRun, compare, whole_batch
from megaspeed.model.gpt import GPT
from megaspeed.model.micro_batch import MicroBatch
from tests.model.tiny_gpt import initialized
from tests.support.tiny import BF16_IN_FP32, MOE, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[3] / "LICENSE"
STEPS = 2
BALANCED: dict[str, Any] = {**MOE, "router_aux_loss_coef": 0.1, "router_bias_rate": 0.01}


class Recorded:
    """A run of one process and its choices, which stand for the choices of ranks."""

    def __init__(self, cache: Path, **changes: Any) -> None:
        self.run: Run = tiny_run(TEXT, model=BALANCED, **changes)
        self._batches = functools.partial(whole_batch, self.run, tiny_corpus(self.run, cache))
        samples = STEPS * self.run.batch.train_batch_size
        self.choices = torch.full((3, samples, 16, 2), -1).int()
        made = ReferenceExperts._decide

        def decide(experts: ReferenceExperts, block: int, choose: Any, scores: Tensor) -> Tensor:
            chosen = made(experts, block, choose, scores)
            self.choices[block, experts._samples] = chosen.view(-1, 16, 2).int()
            return chosen

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ReferenceExperts, "_decide", decide)
            self.record = self.train(None)

    def train(self, choices: Tensor | None) -> ReferenceRun:
        return train_reference(self.run, self._batches, STEPS, choices=choices)

    def compared(self, **changes: Any) -> Comparison:
        """Compare this run, as that of a layout, with a process that replays its choices.

        ``changes`` replace fields of the layout's ``ExpertRecord``, such as the choices.
        """
        experts = replace(self.record.experts, **{"choices": self.choices, **changes})
        fields = {**vars(self.record), "experts": experts}
        reference = self.train(experts.choices)
        return compare(self.run, ParallelRun(copies_differ_by=0.0, **fields), reference)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("cache"))


def test_the_same_choices_are_not_flipped(recorded: Recorded) -> None:
    assert bool((recorded.choices >= 0).all())
    comparison = recorded.compared()
    assert comparison.equal and comparison.flipped == 0
    assert comparison.choices == 3 * STEPS * 24 * 16 * 2
    assert [difference.relative for difference in comparison.experts] == [0.0] * 4
    assert flipped_choices(comparison) == ["of 4,608 choices of experts, none is flipped"]
    assert comparison.as_json()["flipped"] == 0


def test_another_order_of_a_tokens_experts_is_not_a_flip(recorded: Recorded) -> None:
    assert recorded.compared(choices=recorded.choices.flip(-1)).flipped == 0


def test_a_flipped_choice_that_is_not_a_near_tie_is_a_mistake(recorded: Recorded) -> None:
    wrong = recorded.choices.clone()
    worst = next(e for e in range(8) if e not in wrong[2, 30, 5])
    wrong[2, 30, 5, 1] = worst  # in step 2
    comparison = recorded.compared(choices=wrong)
    assert comparison.flipped == 1 and not comparison.equal
    *_, first, later = comparison.experts
    assert first.relative == 0.0 and later.relative > later.allowed == 1e-3
    (sentence,) = flipped_choices(comparison)
    assert "flipped choices of experts: 1 of 4,608; one process would have chosen" in sentence


def test_the_command_states_what_was_replayed(
    recorded: Recorded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(recorded.run.config.model_dump_json(exclude_unset=True, by_alias=True))
    comparison = recorded.compared()
    monkeypatch.setattr(verify, "verify", lambda *_: comparison)
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path))
    assert main(["verify", "--config", str(file), "--world-size", "1"]) == 0
    assert "of 4,608 choices of experts, none is flipped\nEQUAL: " in capsys.readouterr().out


def test_counts_and_biases_must_be_equal(recorded: Recorded) -> None:
    loads = [[list(block) for block in step] for step in recorded.record.experts.loads]
    loads[0][1][0] += 1
    comparison = recorded.compared(loads=loads)
    assert verdict(comparison).startswith("DIFFERENT: ")
    assert "tokens of each expert" in verdict(comparison)
    bias = recorded.record.experts.bias
    assert bias is not None
    moved = bias.clone()
    moved[0, 0] = torch.nextafter(moved[0, 0], torch.tensor(1.0))
    assert "biases of routers" in verdict(recorded.compared(bias=moved))
    assert not recorded.compared(bias=moved).differs_only_after_step_1


def test_the_bias_rises_for_experts_with_few_tokens(recorded: Recorded) -> None:
    experts = recorded.record.experts
    expected = torch.zeros(3, 8)
    for step in torch.tensor(experts.loads, dtype=torch.float64):
        assert step.sum(1).tolist() == [24 * 16 * 2] * 3
        expected += 0.01 * (step.mean(1, keepdim=True) - step).sign().float()
    assert experts.bias is not None and torch.equal(experts.bias, expected)


def test_the_auxiliary_loss_is_that_of_transformers_for_one_row_and_block() -> None:
    run = tiny_run(TEXT, model={**BALANCED, "num_hidden_layers": 1})
    model: GPT = initialized(run.config.model, seed=2)
    experts, found = ReferenceExperts(model, run, None), []
    experts.begin_step(24)
    for sample in range(3):
        tokens = torch.randint(301, (1, 16))
        batch = MicroBatch(tokens, targets=tokens, samples=torch.tensor([sample]))
        experts.begin_forward(batch)
        model(tokens)
        found.append(torch.as_tensor(experts.objective()).item())
        logits = experts._scores[0].detach().log()
        expected = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
        assert found[-1] == pytest.approx(0.1 * float(expected) / 24, rel=1e-6)
    assert experts.record.auxiliary_losses == pytest.approx([sum(found) / 0.1])


def test_bf16_flips_near_ties_only(tmp_path: Path) -> None:
    exact, rounded = Recorded(tmp_path), Recorded(tmp_path, **BF16_IN_FP32)
    comparison = rounded.compared(choices=exact.choices)
    assert 0 < comparison.flipped < comparison.choices / 20
    assert all(difference.equal for difference in comparison.experts[2:])
