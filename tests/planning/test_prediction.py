"""One prediction for each kind of pipeline stage contains the largest; the bubble's closed form."""

import pytest

from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.traffic import predict_traffic
from megaspeed.planning.prediction import (
    alike_stages,
    predict,
)
from tests.planning.tiny_runs import FOLDER, from_file, tiny


def test_the_530b_has_three_kinds_of_pipeline_stage() -> None:
    run = from_file(FOLDER / "mt_nlg_530b.json", world_size=4480).run
    assert alike_stages(run) == [range(1), range(1, 34), range(34, 35)]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("blocks", [8, 11])
def test_the_largest_of_all_pipeline_stages_is_found(
    schedule: str, zero_stage: int, blocks: int
) -> None:
    run = tiny(
        f"parallel.schedule={schedule}",
        f"zero_optimization.stage={zero_stage}",
        f"model.num_hidden_layers={blocks}",
        "parallel.pipeline=6",
        "parallel.tensor=2",
        "train_micro_batch_size_per_gpu=1",
        world_size=24,
    ).run
    memory = [StageMemory(run, stage) for stage in range(6)]
    traffic = [predict_traffic(run, stage) for stage in range(6)]
    peak = max(each.peak.total for each in memory)
    assert len(alike_stages(run)) < 6
    assert predict(run).fullest.peak_bytes == peak
    assert predict(run).fullest.pipeline_stage == [each.peak.total for each in memory].index(peak)
    sent = max(sum(each.values()) for each in traffic)
    assert predict(run).busiest.sent_bytes == sent
