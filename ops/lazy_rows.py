"""Rows that are filled in order, on demand, and where they lie in a tensor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ascend_parallel.ops.probing import in_inference_mode, without_grad_and_modes
from ascend_parallel.ops.rows import Sizes


class LazyRows:
    """The progress of rows that are filled in order, on demand; several tensors may share it.

    Filling a chunk may ask for the rows that it is made of in turn, so a chunk is pulled through a whole chain of
    operators. There is no scheduler: the order of the reads is the order of the work.
    """

    def __init__(self, sizes: Sizes, fill: Callable[[int], object], part_of: LazyRows | None = None) -> None:
        """Hold chunks of `sizes` rows; ``fill(i)`` finishes chunk i, and is called once for each, in order.

        part_of: the rows of which these are some, in the same memory; who changes some, changes the others' memory.
        """
        self.sizes = tuple(sizes)
        self._stops = list(accumulate(sizes))
        self._fill: Callable[[int], object] | None = fill
        self._next = 0
        self.filled, self.finished = 0, not self._stops  # the number of finished rows; whether all are there
        self._filling = False
        self._lock = threading.RLock()  # two threads of a program may read the same rows
        self._inference = torch.is_inference_mode_enabled()  # memory of that mode may be written there alone
        self._stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
        self._whole: LazyRows = self if part_of is None else part_of._whole
        self._readers: list[weakref.ReferenceType[LazyRows]] = []
        self._followers: list[weakref.ReferenceType[LazyRows]] = []

    def up_to(self, stop: int) -> None:
        """Finish all rows before `stop`, for a reader in the current stream.

        The rows are filled in the stream in which their tensor was made, as if the call had filled them: a reader in
        another stream has waited for that call, and knows nothing of readers that came between.
        """
        if self._stream is None or (current := torch.accelerator.current_stream()) == self._stream:
            if not self.finished and self.filled < stop:
                self._fill_up_to(stop)
            return
        torch.accelerator.set_stream(self._stream)
        try:
            self._fill_up_to(stop)
        finally:
            torch.accelerator.set_stream(current)
        current.wait_stream(self._stream)

    def _fill_up_to(self, stop: int) -> None:
        if self.finished or self.filled >= stop:
            return
        if _THREAD.fills and torch.is_inference_mode_enabled() == self._inference:
            self._up_to(stop)
        else:
            with _filling(self._inference):
                self._up_to(stop)

    def _up_to(self, stop: int) -> None:
        with self._lock:
            self._filling = True
            try:
                while not self.finished and self.filled < stop:
                    assert self._fill is not None
                    self._fill(self._next)
                    self.filled = self._stops[self._next]
                    self._next += 1
                    self.finished = self._next == len(self._stops)
            finally:
                self._filling = False
        if self.finished:
            self._fill = None  # and what it holds
            followers, self._followers = self._followers, []
            finish_all(followers)

    def finish(self) -> None:
        """Finish all rows."""
        self.up_to(self._stops[-1] if self._stops else 0)

    def read_by(self, reader: LazyRows) -> None:
        """Note rows that are made of these."""
        self._whole._readers.append(weakref.ref(reader))

    def followed_by(self, follower: LazyRows) -> None:
        """Finish other rows as soon as these are finished."""
        self._followers.append(weakref.ref(follower))

    @property
    def is_part(self) -> bool:
        """Whether these are some rows of others."""
        return self._whole is not self

    def finish_readers(self) -> None:
        """Finish the rows that are made of these, which may change."""
        readers, self._whole._readers = self._whole._readers, []
        finish_all(readers)

    def settle(self) -> None:
        """Finish all rows, and all that are made of them."""
        self.finish()
        readers, self._readers = self._readers, []
        for reference in readers:
            if (reader := reference()) is not None:
                reader.settle()

    def change(self, act: Callable[[int, int], object]) -> None:
        """Change all rows by ``act(start, stop)``: those that are there now, the others once they are."""
        self.finish_readers()
        fill, bounds = self._fill, list(pairwise((0, *self._stops)))
        if self.filled:
            with _filling(self._inference):
                act(0, self.filled)
        if fill is None:
            return

        def fill_and_change(index: int) -> None:
            fill(index)
            act(*bounds[index])

        self._fill = fill_and_change


class _Thread(threading.local):
    """Whether a thread fills rows: what fills them may ask for others."""

    fills = False


_THREAD = _Thread()


@contextmanager
def _filling(inference: bool) -> Iterator[None]:
    """Run a fill without autograd and modes, `inference` apart; entering these takes longer than a small operator."""
    if _THREAD.fills:
        with in_inference_mode(inference), torch.no_grad():
            yield
        return
    with without_grad_and_modes(inference):
        _THREAD.fills = True
        try:
            yield
        finally:
            _THREAD.fills = False


def finish_all(references: Sequence[weakref.ReferenceType[LazyRows]]) -> None:
    """Finish rows that still exist, except those that are being filled."""
    for reference in references:
        if (rows := reference()) is not None and not rows._filling:  # else they have asked for what they follow
            rows.finish()


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor lie: its first `lead` dimensions are blocks times rows of a block.

    Usually there is one block. An embedding's tensor has a block for each sequence: the chunks of `progress` finish the
    same rows of every block.
    """

    progress: LazyRows
    blocks: int
    lead: int
