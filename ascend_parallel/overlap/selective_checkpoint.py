"""What a selective activation checkpoint must not see: the inside of a layer, and what is run beside the model.

Its policy names operators whose results the second run is given instead of computing them. Inside a layer these are
buffers: an all-reduce or a bias changes them in place afterwards, ``mm(out=...)`` writes to another one in each run,
and a collective that one rank skips leaves the others waiting. And a measurement or a check that only one of the runs
makes moves the numbers by which results are found again. So neither is shown to the policy, and a layer runs again as
a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextmanager
def hide_from_selective_checkpoint() -> Iterator[None]:
    """Take selective checkpoints' modes, in which operators would be kept or given, from the stack for a while."""
    stack = _get_current_dispatch_mode_stack()
    lowest = next((place for place, mode in enumerate(stack) if isinstance(mode, _SELECTIVE)), len(stack))
    others = [mode for mode in stack[lowest:] if not isinstance(mode, _SELECTIVE)]
    _put(stack[lowest:], others)
    try:
        yield
    finally:
        _put(others, stack[lowest:])


def _put(before: list[Any], after: list[Any]) -> None:
    """Replace the modes `before` at the top of the stack, the last of them the uppermost, by `after`."""
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
