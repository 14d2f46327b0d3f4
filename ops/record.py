"""What ran when: matmuls, collectives and waits of each call, kept in memory while somebody records.

`RECORDING.recorder` is None when nobody does; looking at it is then all that a call costs. A recorder
keeps its last calls and forgets those before. Nothing here decides what a call does: results are the
same bits with and without. What the times mean is in docs/timeline.md.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Clock, DeviceClock, HostClock

Watch = Callable[[list[Any]], list[Any]]

P = ParamSpec("P")
T = TypeVar("T")

# Kinds of spans. Computing beside a matmul (a sum over ranks) keeps the rank busy, but is no matmul.
MATMUL, BESIDE, COMM, WAIT, FUSED, CLOCKS = "matmul", "beside", "comm", "wait", "fused", "clocks"


class RecordedSpan:
    """Something that ran from `begin` to `end`, which is None until it is known."""

    __slots__ = ("begin", "end", "index", "kind", "name", "workers")

    def __init__(self, kind: str, name: str, index: int, begin: Any) -> None:
        """Begin; `index` counts the spans of one kind and call."""
        self.kind, self.name, self.index, self.begin = kind, name, index, begin
        self.end: Any = None
        # Of a collective: how many of its kind and group run at a time; 0: not known.
        self.workers = 0


class RecordedPass:
    """One forward or backward of a layer, or one operator called by itself, with its spans."""

    __slots__ = ("begin", "calls", "clock", "direction", "end", "group", "kind", "layer", "matmuls", "spans")

    def __init__(self, clock: Clock, kind: str, direction: str, layer: str) -> None:
        """Begin a pass of the layer named `layer` (empty: unnamed), whose function is `kind`."""
        self.clock, self.kind, self.direction, self.layer = clock, kind, direction, layer
        self.group: list[int] = []
        self.calls: list[dict[str, object]] = []
        self.spans: list[RecordedSpan] = []
        self.matmuls = 0
        self.begin = clock.mark()
        self.end: Any = None

    def span(self, kind: str, name: str, index: int) -> RecordedSpan:
        """Begin a span."""
        span = RecordedSpan(kind, name, index, self.clock.mark())
        self.spans.append(span)
        return span

    def close(self) -> None:
        """End, or end later than it did: waiting for an operator that is called by itself prolongs its pass."""
        self.end = self.clock.mark()


class Communication:
    """The collectives of one pending result, in the pass that started them."""

    __slots__ = ("_kept", "_operator", "_pass", "_recorder", "_spans", "_workers")

    def __init__(self, recorder: Recorder, in_pass: RecordedPass, operator: str, workers: int) -> None:
        """Record in `in_pass`, also what is waited for after it; `workers` collectives of the group run at a time."""
        self._recorder, self._pass, self._operator, self._workers = recorder, in_pass, operator, workers
        self._spans: list[RecordedSpan] = []
        self._kept: list[object] = []

    def launch(self, start: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Start a collective by ``start(*args, **kwargs)``; return what is to be waited for."""
        span = self._pass.span(COMM, self._operator, len(self._spans))
        self._spans.append(span)
        work = start(*args, **kwargs)
        # A stream that waits for a collective lets torch free what it reads, while ours may still compute.
        self._kept.append((args, kwargs))
        if hasattr(work, "watched"):
            work.watched(functools.partial(self._watch, span))
        elif isinstance(work, dist.Work):
            (work,) = self._watch(span, [work])
        return work  # of another kind's end nothing is known before it is waited for

    def wait(self, index: int, work: Any) -> None:
        """Wait for the collective `index`, and record that."""
        span = self._recorder.wait(self._pass, index, work.wait)
        if self._spans[index].end is None:
            self._spans[index].end = span.end
        self._kept[index] = None

    def _watch(self, span: RecordedSpan, works: list[Any]) -> list[Any]:
        # Sends and receives share a connection, which carries them one after the other.
        span.workers = self._workers if len(works) == 1 else 1
        return self._pass.clock.watch(functools.partial(setattr, span, "end"), works)


class Recorder:
    """Keeps the last `limit` passes of this process."""

    def __init__(self, limit: int, meet: Callable[[dist.ProcessGroup], None], modules: Sequence[str] = ()) -> None:
        """Record; `meet` is called once for each group, alike on its ranks, before its first recorded call.

        `modules` names the modules whose forwards are running, innermost last.
        """
        self.passes: deque[RecordedPass] = deque(maxlen=limit)
        self.total = 0
        self.modules = modules
        self._open: list[RecordedPass] = []
        self._met: WeakSet[dist.ProcessGroup] = WeakSet()
        self._meet = meet
        self._clocks: dict[str, Clock] = {}

    @property
    def current(self) -> RecordedPass | None:
        """The pass that is running."""
        return self._open[-1] if self._open else None

    def compute(self, kind: str, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run and record a matmul or another computation of the running pass."""
        current = self.current
        if current is None:
            return function(*args, **kwargs)
        span = current.span(kind, name, current.matmuls)
        current.matmuls += kind == MATMUL
        try:
            return function(*args, **kwargs)
        finally:
            span.end = current.clock.mark()

    @contextmanager
    def layer(self, kind: str, direction: str, name: str, device: str) -> Iterator[None]:
        """Record what runs inside as one pass of a layer."""
        with self._running(self._begin(RecordedPass(self._clock(device), kind, direction, name))):
            yield

    @contextmanager
    def call(self, call: dict[str, object], device: str, group: dist.ProcessGroup, fused: bool) -> Iterator[None]:
        """Record one operator: in the running pass, or in one of its own; a fused one as a single span."""
        current = self.current
        running = current or self._begin(RecordedPass(self._clock(device), str(call["operator"]), "", ""))
        running.calls.append(call)
        running.matmuls = 0
        running.group = dist.get_process_group_ranks(group)
        self._meet_once(group, running)
        with self._running(running):
            span = running.span(FUSED, str(call["kernel"]), 0) if fused else None
            yield
            if span is not None:
                span.end = running.clock.mark()

    def wait(self, in_pass: RecordedPass, index: int, wait: Callable[[], object]) -> RecordedSpan:
        """Record waiting, and what is computed meanwhile, in a pass that may have ended."""
        span = in_pass.span(WAIT, "wait", index)
        with self._running(in_pass):
            wait()
            span.end = in_pass.clock.mark()
        return span

    def _begin(self, begun: RecordedPass) -> RecordedPass:
        self.passes.append(begun)
        self.total += 1
        return begun

    @contextmanager
    def _running(self, running: RecordedPass) -> Iterator[None]:
        self._open.append(running)
        try:
            yield
            running.close()
        finally:
            self._open.pop()

    def _clock(self, device: str) -> Clock:
        if device not in self._clocks:
            self._clocks[device] = HostClock() if device == "cpu" else DeviceClock(torch.get_device_module(device))
        return self._clocks[device]

    def _meet_once(self, group: dist.ProcessGroup, running: RecordedPass) -> None:
        if group not in self._met and group.size() > 1:
            self._met.add(group)
            span = running.span(CLOCKS, "clocks compared", 0)
            self._meet(group)
            span.end = running.clock.mark()


class Recording:
    """Who records in this process."""

    def __init__(self) -> None:
        """Start with nobody."""
        self.recorder: Recorder | None = None

    def communication(self, operator: str, group: dist.ProcessGroup, tensor: torch.Tensor) -> Communication | None:
        """Return what records the collectives on `tensor` in the running pass, if somebody records one."""
        recorder = self.recorder
        if recorder is None or recorder.current is None:
            return None
        return Communication(recorder, recorder.current, operator, _workers(group, tensor.device))


RECORDING = Recording()


def compute(kind: str, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function(*args, **kwargs)``, recorded as `kind` under `name` if somebody records."""
    recorder = RECORDING.recorder
    if recorder is None:
        return function(*args, **kwargs)
    return recorder.compute(kind, name, function, *args, **kwargs)


def recorded_layer(kind: str, direction: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Record the forward or backward of an autograd function of ``ctx, x, ...``; backward bears forward's name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            recorder = RECORDING.recorder
            if recorder is None:
                return function(*args, **kwargs)
            ctx: Any = args[0]
            x: Any = args[1]
            if direction == "forward" and recorder.modules:
                ctx.recorded_as = recorder.modules[-1]
            with recorder.layer(kind, direction, getattr(ctx, "recorded_as", ""), x.device.type):
                return function(*args, **kwargs)

        return run

    return decorate


def _workers(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives of `group` its backend runs at a time: gloo's threads, one stream elsewhere."""
    backend: Any = group._get_backend(device)
    return int(getattr(getattr(backend, "options", None), "_threads", 1))
