"""Record when the matmuls, collectives and waits of each call ran, in memory, for a timeline.

`RECORDING.recorder` is None unless a recorder is active; a call then costs only that look-up. A recorder keeps
its last passes and drops older passes. Recording changes no result: the bits are the same with and without.
docs/timeline.md explains the times.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Clock, DeviceClock, HostClock, runs_ahead

Watch = Callable[[list[Any]], list[Any]]
Steps = Sequence[Callable[[], object]]
"""Calls of this process that run in turn, such as the matmuls of a chunk."""

P = ParamSpec("P")
T = TypeVar("T")

# Kinds of spans. BESIDE is computation other than a matmul, such as a sum over ranks.
MATMUL, BESIDE, COMM, WAIT, FUSED, CLOCKS = "matmul", "beside", "comm", "wait", "fused", "clocks"
# The matmuls among the operators of unfinished rows.
ROW_MATMULS = ("aten::mm", "aten::addmm")


@dataclass(slots=True, eq=False)
class RecordedSpan:
    """A matmul, collective or wait that ran from `begin` to `end`; `end` is None until it is known.

    index
        Counts the spans of the same kind and call.
    workers
        For a collective: how many collectives of its kind and group run at a time; 0: unknown.
    """

    kind: str
    name: str
    index: int
    begin: Any
    end: Any = None
    workers: int = 0


class RecordedPass:
    """A forward or backward of a layer, or an operator called outside a layer, with its spans."""

    __slots__ = ("begin", "calls", "clock", "direction", "end", "group", "kind", "layer", "matmuls", "spans")

    def __init__(self, clock: Clock, kind: str, direction: str, layer: str) -> None:
        """Begin a pass of the layer named `layer` (empty: unnamed), of the kind "column", "row" or an operator."""
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
        """Set the end; a later call moves it: the wait for an operator outside a layer prolongs its pass."""
        self.end = self.clock.mark()


class Communication:
    """Records the collectives of a pending result, in the pass that started them."""

    __slots__ = ("_kept", "_operator", "_pass", "_recorder", "_spans", "_workers")

    def __init__(self, recorder: Recorder, in_pass: RecordedPass, operator: str, workers: int) -> None:
        """Record in `in_pass`, also waits after its end; `workers` collectives of the group run at a time."""
        self._recorder, self._pass, self._operator, self._workers = recorder, in_pass, operator, workers
        self._spans: list[RecordedSpan] = []
        self._kept: list[object] = []

    def launch(self, start: Callable[[], Any]) -> Any:
        """Start a collective by ``start()``; return the work to wait for."""
        span = self._pass.span(COMM, self._operator, len(self._spans))
        self._spans.append(span)
        work = start()
        # The recorder's side stream waits for the collective, so torch could free the buffers too early.
        self._kept.append(start)
        if hasattr(work, "record_end"):
            work.record_end(functools.partial(self._watch, span))
        elif isinstance(work, dist.Work):
            (work,) = self._watch(span, [work])
        return work  # other kinds of work end, as far as is known, at their wait

    def wait(self, index: int, wait: Callable[[], object]) -> None:
        """Run ``wait()``, which waits for the collective `index`, and record it."""
        span = self._recorder.wait(self._pass, index, wait)
        if self._spans[index].end is None:
            self._spans[index].end = span.end
        self._kept[index] = None

    def _watch(self, span: RecordedSpan, works: list[Any]) -> list[Any]:
        # Sends and receives share a connection, which carries them one after the other.
        span.workers = self._workers if len(works) == 1 else 1
        return self._pass.clock.watch(functools.partial(setattr, span, "end"), works)


class Recorder:
    """Keeps the last `limit` passes of this process."""

    def __init__(
        self, limit: int, compare_clocks: Callable[[dist.ProcessGroup], None], modules: Sequence[str] = ()
    ) -> None:
        """Record no pass yet.

        compare_clocks
            Called once for each group, on all its ranks, before the group's first recorded call.
        modules
            Names of the modules whose forwards are running, innermost last.
        """
        self.passes: deque[RecordedPass] = deque(maxlen=limit)
        self.total = 0
        self.modules = modules
        self._open: list[RecordedPass] = []
        self._compared: WeakSet[dist.ProcessGroup] = WeakSet()
        self._compare_clocks = compare_clocks
        self._clocks: dict[str, Clock] = {}

    @property
    def current(self) -> RecordedPass | None:
        """The running pass, or None."""
        return self._open[-1] if self._open else None

    def compute(self, kind: str, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function(*args, **kwargs)`` and record it in the running pass."""
        current = self.current
        if current is None:
            return function(*args, **kwargs)
        span = current.span(kind, name, current.matmuls)
        current.matmuls += kind == MATMUL
        try:
            return function(*args, **kwargs)
        finally:
            span.end = current.clock.mark()

    def compute_rows(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run and record an operator of unfinished rows; between two passes it prolongs the pass before."""
        kind = MATMUL if name in ROW_MATMULS else BESIDE
        if self._open or not self.passes:
            return self.compute(kind, name, function, *args, **kwargs)
        with self._running(self.passes[-1]):
            return self.compute(kind, name, function, *args, **kwargs)

    @contextmanager
    def layer(self, kind: str, direction: str, name: str, device: str) -> Iterator[None]:
        """Record the context as a pass of a layer; inside a running pass, of a region, as a part of that pass."""
        if self._open:
            yield
            return
        with self._running(self._begin(RecordedPass(self._clock(device), kind, direction, name))):
            yield

    @contextmanager
    def call(self, call: dict[str, object], device: str, group: dist.ProcessGroup, fused: bool) -> Iterator[None]:
        """Record an operator in the running pass, or else in a new pass; a fused operator is a single span."""
        current = self.current
        running = current or self._begin(RecordedPass(self._clock(device), str(call["operator"]), "", ""))
        running.calls.append(call)
        running.matmuls = 0
        running.group = dist.get_process_group_ranks(group)
        self._compare_clocks_once(group, running)
        with self._running(running):
            span = running.span(FUSED, str(call["kernel"]), 0) if fused else None
            yield
            if span is not None:
                span.end = running.clock.mark()

    def wait(self, in_pass: RecordedPass, index: int, wait: Callable[[], object]) -> RecordedSpan:
        """Run and record ``wait()``, and the computations inside it, in a pass that may have ended."""
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
            self._clocks[device] = DeviceClock(torch.get_device_module(device)) if runs_ahead(device) else HostClock()
        return self._clocks[device]

    def _compare_clocks_once(self, group: dist.ProcessGroup, running: RecordedPass) -> None:
        if group not in self._compared and group.size() > 1:
            self._compared.add(group)
            span = running.span(CLOCKS, "clocks compared", 0)
            self._compare_clocks(group)
            span.end = running.clock.mark()


class Recording:
    """Holds this process's active recorder, if any."""

    def __init__(self) -> None:
        """Start without a recorder."""
        self.recorder: Recorder | None = None

    def communication(self, operator: str, group: dist.ProcessGroup, tensor: torch.Tensor) -> Communication | None:
        """Return a record for the collectives on `tensor` in the running pass; None if no pass is recorded."""
        recorder = self.recorder
        if recorder is None or recorder.current is None:
            return None
        return Communication(recorder, recorder.current, operator, _workers(group, tensor.device))


RECORDING = Recording()


def compute(kind: str, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``; record the call as `kind` under `name` if a recorder is active."""
    recorder = RECORDING.recorder
    if recorder is None:
        return function(*args, **kwargs)
    return recorder.compute(kind, name, function, *args, **kwargs)


def recorded_as(kind: str, name: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` as `compute` runs it, for a loop: `function` itself while no recorder is active."""
    recorder = RECORDING.recorder
    return function if recorder is None else functools.partial(recorder.compute, kind, name, function)


def recorded_steps(kind: str, name: str, chunks: Sequence[Steps]) -> Sequence[Steps]:
    """Return the steps of each chunk as `compute` records them, for a loop: `chunks` while no recorder is active."""
    recorder = RECORDING.recorder
    if recorder is None:
        return chunks
    return [(functools.partial(recorder.compute, kind, name, _run, steps),) for steps in chunks]


def _run(steps: Steps) -> None:
    for step in steps:
        step()


def compute_rows(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``, an operator of unfinished rows; record it if a recorder is active."""
    recorder = RECORDING.recorder
    if recorder is None:
        return function(*args, **kwargs)
    return recorder.compute_rows(name, function, *args, **kwargs)


@contextmanager
def recorded_pass(ctx: Any, kind: str, direction: str, device: str) -> Iterator[None]:
    """Record the context as a forward or backward of an autograd function; backward takes forward's layer name."""
    recorder = RECORDING.recorder
    if recorder is None:
        yield
        return
    if direction == "forward" and recorder.modules:
        ctx.recorded_as = recorder.modules[-1]
    with recorder.layer(kind, direction, getattr(ctx, "recorded_as", ""), device):
        yield


def _workers(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many collectives of `group` run at a time: the number of gloo's threads, 1 on other backends."""
    backend: Any = group._get_backend(device)
    return int(getattr(getattr(backend, "options", None), "_threads", 1))
