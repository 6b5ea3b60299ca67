"""Reading one ahead gives what reading directly gives, only sooner."""

import threading

import pytest
import torch

from megaspeed.data.loader import OneAhead

CPU = torch.device("cpu")


def test_the_next_item_is_read_before_it_is_asked_for() -> None:
    read: list[int] = []
    second_read = threading.Event()

    def load(key: int) -> int:
        read.append(key)
        if key == 1:
            second_read.set()
        return key * 10

    ahead = OneAhead(load, lambda key: key + 1, CPU)
    assert ahead.get(0) == 0
    assert second_read.wait(timeout=5)
    assert ahead.get(1) == 10
    ahead.close()
    assert read.count(1) == 1


def test_the_item_that_was_asked_for_is_given_when_the_guess_was_wrong() -> None:
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
    """A new thread is on GPU 0 otherwise, and pinning memory there opens a context on it."""
    taken: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: taken.append((threading.current_thread().name, gpu))
    )
    ahead = OneAhead(lambda key: key, lambda key: key + 1, torch.device("cuda", 3))
    ahead.get(0)
    ahead.close()
    assert taken == [("prefetch_0", torch.device("cuda", 3))]
