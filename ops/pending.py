"""Results of unfinished collectives, and errors that name the failed collective and the missing ranks."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.record import RECORDING, Steps, Watch
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.process_groups import (
    UNREAD,
    LimitedWork,
    describe,
    listed,
    raise_failed_wait,
    wait_limit,
    wait_within,
)
from ascend_parallel.process_groups.backend import Backend
from ascend_parallel.process_groups.rendezvous import Rendezvous

P = ParamSpec("P")
T = TypeVar("T")

# Seconds for which a rank that saw a collective fail waits for the other ranks' sign of life.
ROLL_CALL = 5


# Computations that nobody needs yet: a wait whose collective is not done runs them first.
IDLE_WORK: deque[Callable[[], object]] = deque()


class CollectiveError(RuntimeError):
    """A collective failed or ran out of time; the message names operator, chunk, group and missing ranks."""


@dataclass(slots=True, eq=False)
class FinishingWork:
    """Started works of a group, and a local step behind them.

    A `Pending` waits for the works and runs the step itself; elsewhere `wait` does.

    works
        Those that nobody has waited for: gloo's would block if they were waited for again.
    finish
        Writes the result, `out`, from what has come; None: it has come in its place.
    """

    works: list[Any]
    finish: Callable[[], object] | None
    group: dist.ProcessGroup
    out: torch.Tensor
    done: bool = False
    tells_completion: ClassVar[bool] = False  # gloo's sends and receives are complete once they are waited for

    def record_end(self, watch: Watch) -> None:
        """Have `watch` record when the works are done."""
        self.works = list(watch([limited(work, self.group, self.out.device) for work in self.works]))

    def is_completed(self) -> bool:
        """Tell whether `wait` has run the step."""
        return self.done

    def wait(self) -> None:
        """Wait for the works and run the step; a second call does nothing."""
        if self.done:
            return
        limit = wait_limit(self.group, self.out.device) if self.works else None
        while self.works:
            wait_within(limit, self.group, self.works[0])
            del self.works[0]
        if self.finish is not None:
            self.finish()
            self.finish = None  # what it holds is freed
        self.done = True


class Pending:
    """A tensor that unfinished collectives may still write.

    `wait` returns the finished tensor. The context manager waits on exit, also after an exception, so that no
    collective outlives its buffers.
    """

    __slots__ = ("_count", "_limit", "_loop", "_operator", "_recorded", "_works", "group", "sizes", "tensor")

    def __init__(
        self, tensor: torch.Tensor, operator: str, group: dist.ProcessGroup, count: int = 1, sizes: Sizes = ()
    ) -> None:
        """Hold `tensor`, the result, maybe unfinished, of `operator` on `group`, which launches `count` collectives.

        sizes: the rows that each collective finishes, in order; empty: only all of them together finish rows.
        """
        self.sizes = sizes
        self.tensor = tensor
        self._operator = operator
        self.group = group
        self._count = count
        self._works: list[Work | None] = []  # None: waited for
        self._loop: Any = None  # the extension's, which has works of its own
        self._limit: timedelta | None = UNREAD
        self._recorded = None if RECORDING.recorder is None else RECORDING.communication(operator, group, tensor)

    def launch(self, start: Callable[..., Work | None], *args: object, **kwargs: object) -> None:
        """Start a collective by ``start(*args, **kwargs)``; `wait` waits for it."""
        self.launch_each((functools.partial(start, *args, **kwargs),))

    def launch_each(
        self,
        starts: Sequence[Callable[[], Work | None]],
        before: Sequence[Steps] = (),
        behind: Sequence[Steps] = (),
    ) -> None:
        """Start collectives by ``start()``, in turn; `wait` waits for them.

        The steps of each run `before` its start and `behind` it; none: nothing runs there. If a step or a start fails,
        wait for the collectives that have started.
        """
        assert {len(before), len(behind)} <= {0, len(starts)}, "each start has its steps, or none has"
        try:
            for index, start in enumerate(starts):
                for step in before[index] if before else ():
                    step()
                try:
                    work = start() if self._recorded is None else self._recorded.launch(start)
                except RuntimeError as error:
                    raise self._failure(len(self._works), error) from error
                assert work is not None, "this rank is not a member of the group"
                self._works.append(work)
                works = work.works if isinstance(work, FinishingWork) else (work,)
                if self._limit is UNREAD and works and isinstance(works[0], dist.Work):
                    self._limit = wait_limit(self.group, self.tensor.device)
                for step in behind[index] if behind else ():
                    step()
        except BaseException:
            self.drain()
            raise

    def launch_loop(self, loop: Any, backend: Backend, run: Callable[..., T], *args: object) -> T:
        """Have a loop in C++ start all collectives, by ``run(*args)``, on the group's backend; waits are the loop's.

        If a step or a start fails, wait for the collectives that have started.
        """
        self.hold(loop, wait_limit(self.group, self.tensor.device, backend))
        try:
            return run(*args)
        except BaseException as error:
            self.fail(error)
            raise

    def hold(self, loop: Any, limit: timedelta | None) -> None:
        """Have a loop in C++, whose waits end after `limit`, wait for what it has started."""
        self._loop, self._limit = loop, limit

    def fail(self, error: BaseException) -> None:
        """Raise the error of the loop's collective that failed, if one did; wait for those that have started."""
        loop = self._loop
        try:
            if isinstance(error, RuntimeError) and loop.starting >= 0:
                raise self._failure(loop.starting, error) from error
            if isinstance(error, RuntimeError) and loop.waiting >= 0:
                self._raise_failure(loop.waiting, loop.failed, error)
        finally:
            self.drain()

    def expect(self, post: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``post(*args, **kwargs)``, which posts the receives of collectives to launch."""
        try:
            return post(*args, **kwargs)
        except RuntimeError as error:
            raise self._failure(0, error) from error

    def done(self) -> bool:
        """Tell whether `wait` would return at once; not meant for reduce-scatters: on gloo they never report done."""
        if self._loop is not None:
            return all(map(self._loop.is_completed, range(len(self._loop))))
        return all(work is None or work.is_completed() for work in self._works)

    def advance(self, index: int) -> None:
        """Start what follows the first step of the collective `index`, a `FollowedWork`."""
        advance: Callable[[], None] = self._works[index].advance  # type: ignore[union-attr]
        try:
            advance()
        except RuntimeError as error:
            raise self._failure(index, error) from error

    def wait_for(self, first: int, stop: int = 0) -> None:
        """Wait for the collective `first`, or for those from it to before `stop`.

        Raises `CollectiveError` on the rank that sees a failure.
        """
        if self._loop is not None:
            self._wait_in_loop(first, stop or first + 1)
            return
        for index in range(first, stop or first + 1):
            while IDLE_WORK and self._works and self._may_take(index):
                IDLE_WORK.popleft()()
            work = self._works[index] if self._works else None  # work beside the wait may have waited for all
            if work is None:
                continue
            works, part = work.works if isinstance(work, FinishingWork) else [work], work
            try:
                if self._recorded is not None:
                    self._recorded.wait(index, functools.partial(wait_within, self._limit, self.group, work))
                    works = []
                while works:
                    part = works[0]
                    if self._limit is None or not isinstance(part, dist.Work):
                        part.wait()
                    else:
                        part.wait(self._limit)
                    del works[0]
            except RuntimeError as error:
                self._raise_failure(index, part, error)
            if isinstance(work, FinishingWork) and work.finish is not None:  # a recorded wait has run it
                work.finish()
                work.finish, work.done = None, True
            if self._works:
                self._works[index] = None

    def _wait_in_loop(self, first: int, stop: int) -> None:
        loop = self._loop
        while first < stop:
            while IDLE_WORK and self._may_take(first):
                IDLE_WORK.popleft()()
            until = first + 1 if IDLE_WORK else stop
            try:
                loop.wait(first, until, self._limit)
            except RuntimeError as error:
                if loop.waiting < 0:
                    raise
                self._raise_failure(loop.waiting, loop.failed, error)
            first = until

    def _may_take(self, index: int) -> bool:
        """Tell whether a wait is known to take time: idle work before a wait that takes none delays what comes next.

        Where a wait orders streams the host runs ahead, so idle work belongs before it. A work is not asked there: that
        ends the capture of a graph.
        """
        if self._loop is not None:
            done = self._limit is not None and self._loop.is_completed(index)
            return not done and (self._limit is None or self._loop.tells_completion(index))
        work = self._works[index]
        if work is None or self._limit is None:
            return work is not None
        return getattr(work, "tells_completion", True) and not work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait for every collective and return the tensor; a second call returns at once."""
        if self._loop is not None:
            self._wait_in_loop(0, len(self._loop))
            self._loop = None
        elif self._works:
            self.wait_for(0, len(self._works))
            self._works.clear()
        return self.tensor

    def wait_each(self, then: Sequence[Steps]) -> torch.Tensor:
        """Wait for the collectives in turn, run after each its steps of `then`, and return the tensor.

        If a step fails, wait for the other collectives.
        """
        try:
            for index, steps in zip(range(len(self._works)), then, strict=True):
                self.wait_for(index)
                for step in steps:
                    step()
        except BaseException:
            self.drain()
            raise
        self._works.clear()
        return self.tensor

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Guard a loop that starts collectives one by one: if it fails, wait for those already started."""
        try:
            yield
        except BaseException:
            self.drain()
            raise

    def __enter__(self) -> Pending:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the remaining collectives."""
        if not self._works and self._loop is None:
            return
        if kind is None:
            self.wait()
        else:
            self.drain()

    def drain(self) -> None:
        """Wait for the collectives that have started, after an error: it is raised, not theirs."""
        if self._loop is not None:
            self._loop.drain(self._limit)
            self._loop = None
        for work in self._works:
            if work is None:
                continue
            with suppress(RuntimeError):
                wait_within(self._limit, self.group, work)
        self._works.clear()

    def _raise_failure(self, index: int, work: Work, error: RuntimeError) -> NoReturn:
        """Raise the error of the wait for the collective `index`."""
        try:
            raise_failed_wait(None if self._recorded is not None else self._limit, self.group, work, error)
        except RuntimeError as failed:
            raise self._failure(index, failed) from error

    def _failure(self, index: int, error: RuntimeError) -> CollectiveError:
        return _failure(f"{self._operator}, collective {index + 1} of {self._count},", self.group, error)


def run_in_loops(
    loops: Mapping[str, Any], group: dist.ProcessGroup, limit: timedelta | None, run: Callable[..., T], *args: Any
) -> T:
    """Return ``run(*args, limit)``, which starts the collectives of loops in C++, waits for them, and finishes.

    loops: by the names of what they run. Errors are those of a `Pending`; what has started is waited for.
    """
    try:
        return run(*args, limit)
    except BaseException as error:
        unread = next(arg for arg in args if isinstance(arg, torch.Tensor))
        held = [Pending(unread, operator, group, len(loop)) for operator, loop in loops.items()]
        for pending, loop in zip(held, loops.values(), strict=True):
            pending.hold(loop, limit)
        try:
            for pending in held:
                pending.fail(error)
        finally:
            for pending in held:
                pending.drain()
        raise


class NamedWork:
    """A started collective outside the operators: an error of `wait` names the collective, group and missing ranks."""

    def __init__(self, name: str, work: Work | None, group: dist.ProcessGroup, device: torch.device) -> None:
        """Hold a work of `group` on tensors of `device`."""
        self._name, self._work, self._group = name, limited(work, group, device), group

    def is_completed(self) -> bool:
        """Tell whether the collective has finished."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait, no longer than the group's time limit."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failure(self._name, self._group, error) from error


def run_collective(
    name: str, collective: Callable[..., Work | None], *tensors: Any, group: dist.ProcessGroup | None, **options: Any
) -> None:
    """Run a collective of torch.distributed to its end; an error names it as `NamedWork` does.

    torch's own wait would end with the group's own limit: half an hour in groups of Megatron and of DeviceMesh.
    tensors: the collective's arguments, of which the last is on the device of the collective.
    """
    own = group or dist.group.WORLD
    assert own is not None, "torch.distributed is not initialised"
    NamedWork(name, collective(*tensors, group=own, async_op=True, **options), own, tensors[-1].device).wait()


def limited(work: Work | None, group: dist.ProcessGroup, device: torch.device) -> Work:
    """Return a started work as `LimitedWork`; a wrapper of this package has limits for the works inside."""
    assert work is not None, "this rank is not a member of the group"
    return LimitedWork(work, group, wait_limit(group, device)) if isinstance(work, dist.Work) else work


def _failure(name: str, group: dist.ProcessGroup, error: RuntimeError) -> CollectiveError:
    text = f"{name} on {describe(group)} failed on rank {dist.get_rank()}: {first_line(error)}; {roll_call(group)}"
    return CollectiveError(text)


def roll_call(group: dist.ProcessGroup) -> str:
    """Return a sentence that names the ranks of `group` that do not report through its store in time.

    Every rank that has seen a collective fail calls this; ranks that do not report are dead or run other code.
    """
    try:
        rendezvous = Rendezvous(group, "roll call")
        rendezvous.publish("alive", "")
        silent = rendezvous.absent("alive", ROLL_CALL)
        if not silent:
            rendezvous.forget_earlier()
    except RuntimeError:
        return "the group's store is gone too: its host, usually rank 0, has stopped"
    if not silent:
        return "all its ranks are alive: they disagree, or the network failed"
    return f"no sign of rank {listed(silent)} within {ROLL_CALL} s: it has stopped or never called the collective"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
