"""Reading one item ahead: while the caller works on item k, a thread reads the one after k."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from megaspeed.topology.process_settings import use_device

Key = TypeVar("Key")
Item = TypeVar("Item")


class OneAhead(Generic[Key, Item]):
    """`load`, with the item that is expected next read in the background.

    A wrong guess costs a read and changes nothing: `get(key)` always returns `load(key)`, and an
    error in the thread is raised by the `get` that asks for that item.

    Args:
        load: reads an item; must be safe to call from another thread.
        following: the key that is expected after a key.
        device: what the background thread works for.
    """

    def __init__(
        self,
        load: Callable[[Key], Item],
        following: Callable[[Key], Key],
        device: torch.device,
    ) -> None:
        self._load = load
        self._following = following
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="prefetch",
            initializer=use_device,
            initargs=(device,),
        )
        self._expected: tuple[Key, Future[Item]] | None = None

    def get(self, key: Key) -> Item:
        """`load(key)`, ready already if the guess was right."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == key:
            item = expected[1].result()
        else:
            item = self._load(key)
        following = self._following(key)
        self._expected = (following, self._thread.submit(self._load, following))
        return item

    def close(self) -> None:
        """Ends the thread; an item under way is dropped."""
        self._expected = None
        self._thread.shutdown(wait=True, cancel_futures=True)
