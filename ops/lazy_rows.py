"""Rows that are filled in order, on demand, and where they lie in a tensor."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from ascend_parallel.ops.rows import Sizes, stops_of
from ascend_parallel.ops.without_modes import modes_are_on, without_grad_and_modes


class _Made:
    """Rows in the order in which they were made; what is finished, or held by nobody, is dropped now and then."""

    rows: ClassVar[deque[weakref.ReferenceType[LazyRows]]] = deque()
    most = 1000  # before they are looked at


def unfinished_rows() -> list[LazyRows]:
    """Return all rows of this process that are not finished, in the order in which they were made."""
    found = []
    with suppress(IndexError):  # another thread looks too
        for _ in range(len(_Made.rows)):
            reference = _Made.rows.popleft()
            if (rows := reference()) is not None and not rows.finished:
                found.append(rows)
                _Made.rows.append(reference)
    _Made.most = 2 * len(found) + 1000
    return found


class LazyRows:
    """The progress of rows that are filled in order, on demand; several tensors may share it.

    Filling a chunk may ask for the rows that it is made of in turn, so a chunk is pulled through a whole chain of
    operators. There is no scheduler: the order of the reads is the order of the work.

    A reader pays for streams, modes and autograd once, in `up_to`. What it pulls in turn is only filled, in `pull`: on
    a device a wait takes no time, and the host's calls are all that a read costs.
    """

    def __init__(
        self,
        sizes: Sizes,
        fill: Callable[..., object],
        part_of: LazyRows | None = None,
        *,
        at_once: bool = False,
        check: Callable[[], object] | None = None,
        done: Callable[[], object] | None = None,
    ) -> None:
        """Hold chunks of `sizes` rows; ``fill(i)`` finishes chunk i, and is called once for each, in order.

        part_of: the rows of which these are some, in the same memory; who changes some, changes the others' memory.
        at_once: ``fill(i, stop)`` finishes the chunks from i to before `stop`, as many as a reader asks for.
        check: called before chunks are filled; it raises if they can no longer be.
        done: called once, when all rows are there.
        """
        self.sizes = tuple(sizes)
        self._stops = stops_of(self.sizes)
        self.count = self._stops[-1] if self._stops else 0
        self._fill: Callable[..., object] | None = fill
        self._at_once, self._check, self._done = at_once, check, done
        self._next = 0
        self.filled, self.finished = 0, not self._stops  # the number of finished rows; whether all are there
        self._filling = False
        self._lock = threading.RLock()  # two threads of a program may read the same rows
        self._inference = torch.is_inference_mode_enabled()  # memory of that mode may be written there alone
        self._stream = torch.accelerator.current_stream() if has_streams() else None
        self._part_of: LazyRows | None = None if part_of is None else part_of._part_of or part_of
        self._readers: list[weakref.ReferenceType[LazyRows]] = []
        self._followers: list[weakref.ReferenceType[LazyRows]] = []
        _Made.rows.append(weakref.ref(self))
        if len(_Made.rows) > _Made.most:
            unfinished_rows()

    def up_to(self, stop: int) -> None:
        """Finish all rows before `stop`, for a reader in the current stream, without autograd and modes.

        The rows are filled in the stream in which their tensor was made, as if the call had filled them: a reader in
        another stream has waited for that call, and cannot know that an earlier reader has filled some of them.
        """
        if self._stream is not None and self._is_elsewhere():
            with self._in_its_stream():
                self.up_to(stop)
        elif self.finished or self.filled >= stop:
            return
        elif _THREAD.fills and torch.is_inference_mode_enabled() == self._inference:
            self.pull(stop)
        else:
            grad, outer, _THREAD.fills = torch.is_grad_enabled(), _THREAD.fills, True
            try:
                if modes_are_on(self._inference):
                    with without_grad_and_modes(self._inference):
                        self.pull(stop)
                else:
                    torch._C._set_grad_enabled(False)  # what torch.no_grad() does, in several functions of Python
                    with torch._C.DisableTorchFunction():
                        self.pull(stop)
            finally:
                _THREAD.fills = outer
                torch._C._set_grad_enabled(grad)

    def _is_elsewhere(self) -> bool:
        """Tell whether the current stream is another than that of the rows."""
        return torch.accelerator.current_stream() != self._stream

    @contextmanager
    def _in_its_stream(self) -> Iterator[None]:
        """Work in the stream of the rows, behind which the current one then comes."""
        assert self._stream is not None
        current = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(current)
        current.wait_stream(self._stream)

    def pull(self, stop: int) -> None:
        """Finish all rows before `stop`, inside a fill of rows that were made in the same stream and mode."""
        if self.finished or self.filled >= stop:
            return
        with self._lock:
            last = min(bisect_left(self._stops, stop) + 1, len(self._stops))
            if self._check is not None and self._next < last:
                self._check()
            self._filling = True
            try:
                while self._next < last:
                    assert self._fill is not None
                    stop_c = last if self._at_once else self._next + 1
                    if self._at_once:
                        self._fill(self._next, last)
                    else:
                        self._fill(self._next)
                    self._next = max(self._next, stop_c)  # work beside a wait may have asked for more
                    self.filled = self._stops[self._next - 1]
                    self.finished = self._next == len(self._stops)
            finally:
                self._filling = False
        if self.finished:
            self._let_go()

    def _let_go(self) -> None:
        """Drop what the rows were made of, and finish what follows them."""
        self._fill = self._check = None
        done, self._done = self._done, None
        followers, self._followers = self._followers, []
        if done is not None:
            done()
        if followers:
            finish_all(followers)

    def finish(self) -> None:
        """Finish all rows."""
        self.up_to(self.count)

    def puller(self, reader: LazyRows) -> Callable[[int], object]:
        """Return the function that finishes these rows up to a row inside a fill of other rows."""
        alike = (self._stream, self._inference) == (reader._stream, reader._inference)
        return self.pull if alike else self.up_to

    def read_by(self, reader: LazyRows) -> Callable[[int], object]:
        """Note a reader, whose rows are made of these, and return the `puller` for it."""
        (self._part_of or self)._readers.append(weakref.ref(reader))
        return self.puller(reader)

    def followed_by(self, follower: LazyRows) -> None:
        """Finish other rows as soon as these are finished."""
        self._followers.append(weakref.ref(follower))

    def make(self, memory: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return memory for these rows, made in their stream and mode while no thread fills them."""
        if self._stream is not None and self._is_elsewhere():
            with self._in_its_stream():
                return self.make(memory)
        with self._lock:
            if not modes_are_on(self._inference):
                return memory()
            with without_grad_and_modes(self._inference):
                return memory()

    @property
    def is_part(self) -> bool:
        """Whether these rows are a part of other rows."""
        return self._part_of is not None

    def finish_readers(self) -> None:
        """Finish the rows that are made of these, before these may change."""
        whole = self._part_of or self
        readers, whole._readers = whole._readers, []
        finish_all(readers)

    def settle(self) -> None:
        """Finish all rows, and all that are made of them."""
        self.finish()
        readers, self._readers = self._readers, []
        for reference in readers:
            if (reader := reference()) is not None:
                reader.settle()

    def change(self, act: Callable[[int], object]) -> None:
        """Change all rows, by ``act(i)`` those of chunk i: those that are there now, the others once they are."""
        self.finish_readers()
        fill = self._fill
        if self._next:
            with without_grad_and_modes(self._inference):
                for index in range(self._next):
                    act(index)
        if fill is not None:
            changed = fill if isinstance(fill, _ChangedFill) else _ChangedFill([fill])
            changed.steps.append(act)
            self._fill, self._at_once = changed, False


@dataclass(eq=False)
class _ChangedFill:
    """What fills a chunk and changes it, step by step.

    A step that has run does not run again: not after an error of a later one, and not where work beside a wait of a
    step has asked for the same chunk.
    """

    steps: list[Callable[[int], object]]
    index: int = 0  # of the chunk that is filled
    done: int = 0  # how many steps it has behind it

    def __call__(self, index: int) -> None:
        """Run the steps of a chunk that have not run; chunks come in order."""
        if index > self.index:
            self.index, self.done = index, 0
        while self.index == index and (step := self.done) < len(self.steps):
            self.steps[step](index)
            if self.index == index:
                self.done = max(self.done, step + 1)


class RowPieces:
    """The rows of a tensor with memory of its own for each chunk, until somebody asks for one memory.

    A piece is freed if nobody holds the tensor when the last of its readers reads it, so that what lies between two
    layers is never whole.
    """

    def __init__(self, shape: Sizes, dtype: torch.dtype, device: torch.device, sizes: Sizes) -> None:
        """Hold nothing yet of rows [M, ...], in chunks of `sizes` rows."""
        self.shape, self.dtype, self.device, self.sizes = shape, dtype, device, sizes
        self.rows: list[Any] = [None] * len(sizes)
        """The chunks that are there; in one memory, all."""
        self.memory: torch.Tensor | None = None  # of all rows, once somebody has asked for it
        self._readers, self._reads = 0, [0] * len(sizes)
        self._holder: Callable[[], object | None] = _nobody

    def held(self) -> object:
        """Return an object for the tensor to hold: its pieces stay as long as this does."""
        holder = _Holder()
        self._holder = weakref.ref(holder)
        return holder

    def read_by_one_more(self) -> list[Any]:
        """Note a reader, which calls `was_read`; return the chunks, each there once it is filled."""
        self._readers += 1
        return self.rows

    def was_read(self, index: int) -> None:
        """Free a chunk if this was the last reader of it, and nobody can read the tensor any more."""
        self._reads[index] += 1
        if self._reads[index] == self._readers and self.memory is None and self._holder() is None:
            self.rows[index] = None

    def joined(self) -> torch.Tensor:
        """Return one tensor for all rows, with those that have come; later calls return the same tensor."""
        if self.memory is None:
            memory = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            places = memory.split_with_sizes(self.sizes)
            for place, piece in zip(places, self.rows, strict=True):
                if piece is not None:
                    place.copy_(piece)
            self.rows[:], self.memory = places, memory
        return self.memory


class _Holder:
    """What a tensor holds, and drops when it is gone: a tensor that torch alone holds keeps it too."""

    __slots__ = ("__weakref__",)


def _nobody() -> None:
    """Return that there is no holder."""


class _Thread(threading.local):
    """Whether a thread fills rows: what fills them may ask for others."""

    fills = False


_THREAD = _Thread()


@cache
def has_streams() -> bool:
    """Tell whether this machine has an accelerator; that is asked once."""
    return torch.accelerator.is_available()


def finish_all(references: Sequence[weakref.ReferenceType[LazyRows]]) -> None:
    """Finish rows that still exist, except those that are being filled."""
    for reference in references:
        if (rows := reference()) is not None and not rows._filling:  # else they have asked for what they follow
            rows.finish()


class Rows(NamedTuple):
    """Where the rows of a tensor lie: its first `lead` dimensions are blocks times rows of a block.

    Usually there is one block. An embedding's tensor has a block for each sequence: the chunks of `progress` finish the
    same rows of every block.
    """

    progress: LazyRows
    blocks: int
    lead: int
