"""The log counts live memory by category, and finds its peak."""

import torch

from megaspeed.measurement.allocations import AllocationLog
from megaspeed.planning.costs.memory import Category, MemoryBytes

CPU = torch.device("cpu")
KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB // 4)


def test_the_peak_is_the_most_that_lived_at_the_same_time() -> None:
    with AllocationLog(CPU) as log:
        first = kib(3)
        second = kib(4)
        del first
        third = kib(2)
    assert log.peak() == MemoryBytes(activations=7 * KIB)
    assert log.live() == MemoryBytes(activations=6 * KIB)
    del second, third
    assert log.live() == MemoryBytes()


def test_views_of_one_storage_count_once_and_meta_tensors_not_at_all() -> None:
    with AllocationLog(CPU) as log:
        whole = kib(8)
        views = [whole[:10], whole.view(2, -1), whole.detach()]
        nothing = torch.empty(1 << 40, device="meta")
    assert log.live() == MemoryBytes(activations=8 * KIB)
    del views, nothing


def test_a_claim_holds_for_the_whole_life_of_a_storage() -> None:
    log = AllocationLog(CPU)
    weight = kib(5)
    log.claim("parameters", [weight, None])
    with log:
        gradient = kib(5)
        working = kib(1)
        log.claim("gradients", [gradient[:3]])
        del working
    assert log.peak() == MemoryBytes(parameters=5 * KIB, gradients=5 * KIB, activations=KIB)
    assert log.live() == MemoryBytes(parameters=5 * KIB, gradients=5 * KIB)


def test_unclaimed_memory_is_found_if_python_can_reach_it() -> None:
    forgotten = kib(6)
    log = AllocationLog(CPU)
    log.claim_everything_else_alive("communication_buffers")
    before = log.live().communication_buffers
    del forgotten
    assert before - log.live().communication_buffers == 6 * KIB


def test_a_sparse_tensor_is_skipped() -> None:
    """In an earlier version, one sparse tensor in the process prevented all counting on a rank."""
    sparse = torch.eye(2).to_sparse()
    log = AllocationLog(CPU)
    log.claim_everything_else_alive("communication_buffers")
    with log:
        kept = sparse + sparse
    assert kept.layout == torch.sparse_coo


def test_the_allocating_module_may_decide_the_category() -> None:
    def category_of(module: str) -> Category | None:
        return "communication_buffers" if module == __name__ else None

    with AllocationLog(CPU, category_of) as log:
        bucket = kib(2)
    assert log.live() == MemoryBytes(communication_buffers=2 * KIB)
    del bucket


def test_a_storage_that_is_resized_changes_its_bytes_and_keeps_its_category() -> None:
    with AllocationLog(CPU) as log:
        shard = kib(1)
        log.claim("parameters", [shard])
        shard.untyped_storage().resize_(4 * KIB)
        assert log.live() == MemoryBytes(parameters=4 * KIB)
        shard.untyped_storage().resize_(0)
        assert log.live() == MemoryBytes()
        shard.untyped_storage().resize_(2 * KIB)
    assert log.live().total == 2 * KIB
    assert log.peak().total == 4 * KIB


def test_an_operation_that_resizes_its_tensor_is_seen() -> None:
    with AllocationLog(CPU) as log:
        working = kib(1)
        working.resize_(3 * KIB // 4)
    assert log.live() == MemoryBytes(activations=3 * KIB)


def test_memory_of_the_backward_pass_is_seen() -> None:
    x = torch.ones(KIB, requires_grad=True)
    with AllocationLog(CPU) as log:
        (x * 2).sum().backward()
        log.claim("gradients", [x.grad])
    assert log.live() == MemoryBytes(gradients=4 * KIB)
