"""Each matrix has one owner, gets each of its elements once, and owners have about equal costs."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.orthogonalization import Orthogonalization
from megaspeed.model.parameters import parameters_of
from tests.support.tiny import LLAMA, MOE


def run_of(model: dict[str, Any], ranks: int, stage: int = 1, **parallel: Any) -> Run:
    muon = parallel.pop("muon", {})
    config = parse_config(
        {
            "model": model,
            "parallel": parallel,
            "data": {"train": ["text"], "sequence_length": 16},
            "training": {"steps": 1},
            "train_batch_size": 4 * ranks,
            "optimizer": {"type": "Muon", "params": muon},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
        }
    )
    return resolve_run(config, World(ranks, "a test"), name="run")


def plan_of(run: Run, pipeline_stage: int = 0) -> Orthogonalization:
    plan = data_axis_of(run, pipeline_stage, "cpu").orthogonalization
    assert plan is not None
    return plan


LAYOUTS: list[dict[str, Any]] = [
    {"ranks": 1, "stage": 0},
    {"ranks": 3, "stage": 0},
    {"ranks": 5, "stage": 1},
    {"ranks": 3, "stage": 3},
    {"ranks": 4, "tensor": 4},
    {"ranks": 8, "tensor": 4, "stage": 0},
    {"ranks": 12, "tensor": 4, "stage": 3},
    {"ranks": 8, "tensor": 2, "replicate": 2, "stage": 2},
    {"ranks": 12, "pipeline": 2, "tensor": 2, "stage": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_each_element_is_sent_once_and_returned_to_all_that_hold_it(
    layout: dict[str, Any], per_head: bool
) -> None:
    run = run_of(LLAMA, **layout, muon={"per_head_muon": per_head})
    for stage in range(run.grid.pp):
        plan = plan_of(run, stage)
        batches = [*chain(*plan.rounds)]
        returned = Counter[int]()
        for batch in batches:
            arrived = [0] * batch.elements
            for member in range(plan.members):
                for part in plan.parts(batch, member):
                    returned[member] += part.length
                    for place in range(part.place, part.place + part.length * (not part.is_copy)):
                        arrived[place] += 1
            assert arrived == [1] * batch.elements
        axis = data_axis_of(run, stage, "cpu")
        held = sum(p.elements for p in axis.parameters if p.group == "orthogonalized")
        assert sum(returned.values()) == held * run.grid.tp, "each member, whatever it owns"


def test_the_matrices_of_each_expert_are_orthogonalized_by_themselves() -> None:
    plan = plan_of(run_of(MOE, ranks=3, stage=2))
    shapes = Counter((section.name, *section.shape) for section in plan.sections)
    for expert in range(8):
        for name in ("gate", "up"):
            assert shapes[f"{expert}.{name}", 1, 24, 32] == 3, "one in each block"
        assert shapes[f"{expert}", 1, 32, 24] == 3
    elements = sum(section.elements for section in plan.sections)
    axis = data_axis_of(run_of(MOE, ranks=3, stage=2), 0, "cpu")
    assert elements == sum(p.elements for p in axis.parameters if p.group == "orthogonalized")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_messages_of_two_ranks_fit(layout: dict[str, Any]) -> None:
    """What a rank sends, another expects, in the same order, in both directions."""
    plan = plan_of(run_of(LLAMA, **layout))
    for number in range(len(plan.rounds)):
        own = [plan.round_of(number, owner) for owner in range(plan.members * plan.groups)]
        for group in range(plan.groups):
            members = own[group * plan.members :][: plan.members]
            for one, sender in enumerate(members):
                for other, receiver in enumerate(members):
                    assert sender.sends[other] == receiver.receives[one]
                    assert sender.returns[other] == receiver.results[group][one]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_matrix_of_a_block_is_divided_into_its_sections(layout: dict[str, Any]) -> None:
    run = run_of(LLAMA, **layout)
    found = [s for stage in range(run.grid.pp) for s in plan_of(run, stage).sections]
    matrices = [p for p in parameters_of(run.config.model).values() if p.is_block_matrix]
    expected = Counter((p.name, s) for p in matrices for s in p.row.sections)
    assert Counter((each.parameter.name, each.name) for each in found) == expected
    for section in found:
        rows = next(
            p.row.sections[section.name] for p in matrices if p.row.name in section.parameter.name
        )
        assert section.shape[1:] == (rows, section.elements // rows)


def test_each_head_is_a_matrix_if_the_json_says_so() -> None:
    plan = plan_of(run_of(LLAMA, 2, tensor=2, muon={"per_head_muon": True}))
    shapes = {section.name: section.shape for section in plan.sections}
    assert shapes["query"] == (4, 8, 32) and shapes["key"] == shapes["value"] == (2, 8, 32)
    assert shapes["hidden"][0] == shapes["gate"][0] == 1


@pytest.mark.parametrize(
    ("preset", "ranks", "parallel", "most"),
    [
        ("gpt2", 8, {}, 1.05),
        ("gpt2-xl", 8, {}, 1.01),
        ("llama-3.2-1b", 8, {}, 1.01),
        ("llama-3-8b", 64, {}, 1.11),
        ("llama-3-8b", 64, {"tensor": 8}, 1.11),
        ("llama-3-70b", 64, {"pipeline": 4, "tensor": 8}, 1.03),
    ],
)
def test_owners_have_about_equal_costs(
    preset: str, ranks: int, parallel: dict[str, Any], most: float
) -> None:
    costs = plan_of(run_of({"preset": preset}, ranks, **parallel)).costs
    assert len(costs) == ranks // parallel.get("pipeline", 1)
    assert max(costs) <= most * sum(costs) / len(costs)


def test_the_batches_depend_on_the_pipeline_stage_alone() -> None:
    """Otherwise a layout could choose the kernel, and so the rounding."""
    layouts: list[tuple[int, dict[str, Any]]] = [(1, {}), (8, {"stage": 0}), (64, {"stage": 3})]
    layouts.append((4, {"tensor": 4}))
    found = set()
    for ranks, layout in layouts:
        plan = plan_of(run_of({"preset": "gpt2"}, ranks, **layout))
        batches = chain(*plan.rounds)
        names = (tuple((s.parameter.name, s.name) for s in batch.sections) for batch in batches)
        found.add(frozenset(names))
    (sections,) = found
    assert Counter(map(len, sections)) == {6: 8, 1: 24}  # 48 square matrices, and those of the MLP


def test_sections_of_a_batch_are_alike() -> None:
    for batch in chain(*plan_of(run_of(LLAMA, 2, tensor=2)).rounds):
        assert len({section.kind for section in batch.sections}) == 1
        assert batch.elements == sum(section.elements for section in batch.sections)
