"""Times of what runs on the host and on devices, for ops/record.py.

On a CPU a time is CLOCK_MONOTONIC in ns, taken on a collective's end by the backend's own thread, and by a
thread of ours for sends and receives, which have no such call. On devices it is an event in a stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

Ended = Callable[[Any], None]


class Work(Protocol):
    """What torch.distributed returns for an asynchronous collective, and what wraps one here."""

    def wait(self) -> object:
        """Wait until the collective's result may be read."""

    def is_completed(self) -> bool:
        """Tell whether it ran, without waiting."""


class Clock(Protocol):
    """Takes times on one kind of device."""

    def mark(self) -> Any:
        """Take the time now, or have the device take it."""

    def ns(self, mark: Any) -> int:
        """Return a mark as nanoseconds of this host's CLOCK_MONOTONIC."""

    def watch(self, ended: Ended, works: list[Work]) -> list[Work]:
        """Call `ended` with the time at which `works` are done; return what is to be waited for in their place."""


class HostClock:
    """CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        """Start no thread before one is needed."""
        self._thread: ThreadPoolExecutor | None = None

    mark = staticmethod(time.monotonic_ns)

    def ns(self, mark: int) -> int:
        """Return the mark, which is ns already."""
        return mark

    def watch(self, ended: Ended, works: list[Work]) -> list[Work]:
        """Mark a collective's end in its backend's thread; wait for sends and receives in one of ours."""
        if len(works) == 1 and hasattr(works[0], "get_future"):
            works[0].get_future().add_done_callback(lambda _: ended(self.mark()))
            return works
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ascend_parallel timeline")
        return [_Waited(self._thread.submit(self._wait, ended, works))]

    def _wait(self, ended: Ended, works: list[Work]) -> None:
        for work in works:
            work.wait()
        ended(self.mark())


class _Waited:
    """Works that another thread waits for; whoever waits here sees its errors."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


class DeviceClock:
    """Events in a device's streams, such as those of torch.cuda and torch.npu. Not tried on an NPU."""

    def __init__(self, module: Any) -> None:
        """Tie the device's time to the host's, once: the host reads its clock when the device has nothing to do."""
        self._module = module
        self._side = module.Stream()
        module.synchronize()
        self._base = self.mark()
        module.synchronize()
        self._base_ns = time.monotonic_ns()

    def mark(self) -> Any:
        """Record an event in the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def ns(self, mark: Any) -> int:
        """Wait for the event and return when it was reached."""
        mark.synchronize()
        since: float = self._base.elapsed_time(mark)
        return self._base_ns + round(since * 1e6)

    def watch(self, ended: Ended, works: list[Work]) -> list[Work]:
        """Mark the end in a stream of its own, which waits for the works; the computing stream does not."""
        with self._module.stream(self._side):
            for work in works:
                work.wait()
            ended(self.mark())
        return works
