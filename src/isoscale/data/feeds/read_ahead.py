"""Reading ahead: an iterator that runs in a thread of its own, or in the caller's."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any


class Reader:
    """Runs an iterator in a thread, a few items ahead; an error in it is raised where the item is asked for."""

    def __init__(self, items: Iterator[Any], num_ahead: int) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(num_ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="isoscale-reader", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: tuple[Any, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> Any:
        """The next item; waits for it."""
        item, error = self._queue.get()
        if error is not None:
            raise error
        return item

    def __iter__(self) -> Iterator[Any]:
        """The items that are left; like the iterator, it may have no end."""
        while True:
            yield self.get()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # make room, so that a thread that waits for it sees at once that it is closed
                self._queue.get_nowait()
        self._thread.join()


class Inline:
    """Takes the items of an iterator in the thread that asks."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def get(self) -> Any:
        """The next item."""
        return next(self._items)

    def close(self) -> None:
        """Forget the iterator."""
        self._items = iter(())
