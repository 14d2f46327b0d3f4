"""Clocks of hosts and devices: for ops/record.py, and for whoever times a call.

On a CPU a time is CLOCK_MONOTONIC in ns. The backend's thread takes the end of a collective; a thread of this
package takes the end of sends and receives, which have no completion callback. On devices a time is an event in a
stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from ascend_parallel.devices import device_type

Ended = Callable[[Any], None]


def runs_ahead(device: str) -> bool:
    """Tell whether the host runs ahead of the work on a type of device."""
    return not device_type(device).is_host


def finish(device: torch.device) -> None:
    """Return once this process's work on `device` is done."""
    if runs_ahead(device.type):
        torch.accelerator.synchronize(device)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call on a type of device: of its work there, or of the host if that takes longer.

    The device is idle before. Its events do not count what the host needs to notice the end, which no step waits for;
    what the host needs to launch the work counts, since a device that has nothing to do waits for it.
    """
    if not runs_ahead(device):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    module: Any = torch.get_device_module(device)
    first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
    first.record()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    last.record()
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return max(host, milliseconds / 1e3)


class Mark:
    """A place in the program: when the host came to it, and when the current stream does, which is not waited for."""

    def __init__(self, device: torch.device) -> None:
        """Mark this place, in the stream behind all that was launched."""
        self._event: Any = None
        if runs_ahead(device.type):
            self._event = torch.get_device_module(device).Event(enable_timing=True)
            self._event.record()
        self._host = time.perf_counter()

    @property
    def is_reached(self) -> bool:
        """Whether the device has done what was launched before; a device with more to do has not."""
        return self._event is None or bool(self._event.query())

    def seconds_until(self, end: Mark) -> float:
        """Return the seconds to a later place, on the device or the host, whichever takes longer; wait for the end.

        The device may have had work left at the first place: a host that is slower shows later.
        """
        host = end._host - self._host
        if self._event is None:
            return host
        end._event.synchronize()
        milliseconds: float = self._event.elapsed_time(end._event)
        return max(host, milliseconds / 1e3)


class Work(Protocol):
    """The handle of an asynchronous collective: torch.distributed's, or a wrapper of this package."""

    def wait(self) -> object:
        """Wait until the collective's result can be read."""

    def is_completed(self) -> bool:
        """Tell whether the collective has finished, without waiting."""


class HostClock:
    """CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._thread: ThreadPoolExecutor | None = None

    mark = staticmethod(time.monotonic_ns)

    def ns(self, mark: int) -> int:
        """Return the mark: it is in ns."""
        return mark

    def watch(self, ended: Ended, works: list[Work]) -> list[Work]:
        """Call `ended` with the mark at which all `works` are done; return the works to wait for instead.

        The backend's thread marks a collective's end; a thread of this clock waits for sends and receives.
        """
        if len(works) == 1 and hasattr(works[0], "get_future"):
            works[0].get_future().add_done_callback(lambda _: ended(self.mark()))
            return works
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ascend_parallel timeline")
        return [_ThreadWork(self._thread.submit(self._wait, ended, works))]

    def _wait(self, ended: Ended, works: list[Work]) -> None:
        for work in works:
            work.wait()
        ended(self.mark())


class _ThreadWork:
    """Works that another thread waits for; `wait` raises that thread's errors."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


class DeviceClock:
    """Events in a device's streams (torch.cuda, torch.npu). Not tried on an NPU."""

    def __init__(self, module: Any) -> None:
        """Relate the device's time to the host's: the host reads its clock while the device is idle."""
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
        """Wait for the event and return the host time at which the stream reached it."""
        mark.synchronize()
        since: float = self._base.elapsed_time(mark)
        return self._base_ns + round(since * 1e6)

    def watch(self, ended: Ended, works: list[Work]) -> list[Work]:
        """Call `ended` with the mark in a side stream, which waits for the works; the computing stream does not."""
        with self._module.stream(self._side):
            for work in works:
                work.wait()
            ended(self.mark())
        return works


Clock = HostClock | DeviceClock
