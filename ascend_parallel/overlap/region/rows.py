"""Rows of a tensor that are filled in order, on demand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.utils.checkpoint

from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.rows import Sizes


class LazyRows:
    """The rows of a tensor, of which only the first `filled` are finished.

    A consumer calls ``up_to(stop)`` before it reads rows before `stop`. Filling a chunk may ask the rows that it is
    made of in turn, so a chunk is pulled through a whole chain of operators. There is no scheduler: the order of the
    consumer's reads is the order of the work.

    Nothing stops a reader that does not ask: it reads unfinished rows. Hand the tensor only to consumers that ask,
    or call `finish` first.
    """

    def __init__(self, sizes: Sizes, fill: Callable[[int], object]) -> None:
        """Hold chunks of `sizes` rows; ``fill(i)`` finishes chunk i, and is called once for each, in order."""
        self._stops = list(accumulate(sizes))
        self._fill = fill
        self._next = 0

    @property
    def filled(self) -> int:
        """The number of finished rows."""
        return self._stops[self._next - 1] if self._next else 0

    def up_to(self, stop: int) -> None:
        """Finish all rows before `stop`."""
        while self._next < len(self._stops) and self.filled < stop:
            self._fill(self._next)
            self._next += 1

    def finish(self) -> None:
        """Finish all rows."""
        self.up_to(self._stops[-1] if self._stops else 0)


def saved_hooks() -> Callable[[torch.Tensor], object] | None:
    """Return the innermost hook that packs tensors saved for backward, or None."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else top[0]


def saved_hook_reason() -> str | None:
    """Return why tensors with unfinished rows may not be saved for backward now, or None.

    Autograd hands a saved tensor to the innermost `torch.autograd.graph.saved_tensors_hooks` at once, and a hook that
    copies it, such as that of `save_on_cpu`, copies rows that are not there yet. Those of `torch.utils.checkpoint`
    keep no copy: the first drops the tensor, the second holds an alias.
    """
    hook = saved_hooks()
    if hook is None or getattr(hook, "__module__", None) == torch.utils.checkpoint.__name__:
        return None
    return "saved_tensors_hooks are active, which may copy rows that are not finished"


class PendingRows:
    """Takes the started collectives of a row-parallel layer, and finishes its rows on demand.

    `take` is the `finish` of `row_linear`. The context manager starts and waits for the remaining collectives on exit,
    also after an exception: a consumer that never comes leaves no collective behind, and no rank waiting.
    """

    def __init__(self, sizes: Sizes) -> None:
        """Expect an all-reduce in chunks of `sizes` rows."""
        self._sizes = sizes
        self._pending: Pending | None = None
        self._send: Callable[[int], None] = _all_sent
        self.rows: LazyRows | None = None

    def take(self, pending: Pending) -> torch.Tensor:
        """Keep the collectives and return their tensor, whose rows are unfinished."""
        self._pending = pending
        self.rows = LazyRows(self._sizes, pending.wait_for)
        return pending.tensor

    def take_unsent(self, pending: Pending, send: Callable[[int], None], ahead: int) -> torch.Tensor:
        """Keep collectives that are not started yet, and return their tensor, whose rows are unfinished.

        ``send(count)`` starts the collectives of the first `count` chunks. It is called for chunk i before the rows of
        chunk ``i - ahead`` are waited for.
        """

        def fill(index: int) -> None:
            send(min(len(self._sizes), index + 1 + ahead))
            pending.wait_for(index)

        self._pending, self._send = pending, send
        self.rows = LazyRows(self._sizes, fill)
        return pending.tensor

    def __enter__(self) -> PendingRows:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the remaining collectives."""
        if self._pending is not None:
            with self._pending.launching():
                self._send(len(self._sizes))
            self._pending.__exit__(kind, *rest)


def _all_sent(count: int) -> None:
    """Start nothing."""
