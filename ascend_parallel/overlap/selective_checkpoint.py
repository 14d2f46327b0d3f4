"""Hide operators from selective activation checkpoint policies.

A policy lists operators whose saved results the recomputation uses instead of running them. Two kinds of operators
must be hidden from it:

- Operators inside a layer. Their results are buffers: an all-reduce or a bias changes them in place later,
  ``mm(out=...)`` writes to a different buffer in each run, and a collective that a rank skips blocks the other ranks.
- Measurements and checks. They run in only one of forward and recomputation, which would shift the indices by which
  the checkpoint finds saved results.

So recomputation runs a layer as a whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

P = ParamSpec("P")
T = TypeVar("T")

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextmanager
def hide_from_selective_checkpoint() -> Iterator[None]:
    """Remove the dispatch modes of selective checkpoints from the mode stack inside this context."""
    stack = _get_current_dispatch_mode_stack()
    lowest = next((index for index, mode in enumerate(stack) if isinstance(mode, _SELECTIVE)), len(stack))
    remaining = [mode for mode in stack[lowest:] if not isinstance(mode, _SELECTIVE)]
    _replace_top(stack[lowest:], remaining)
    try:
        yield
    finally:
        _replace_top(remaining, stack[lowest:])


def checkpoint_frame(*, again: bool) -> object | None:
    """Return the frame of the checkpointed call in which this thread runs: the same object in both of its runs.

    again
        Whether the call is run again.

    None outside of torch.utils.checkpoint, in a reentrant one, and under other hooks on saved tensors inside of it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = None if hooks is None else inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", None) != checkpoint.__name__:
        return None
    held = {name: cell.cell_contents for name, cell in zip(pack.__code__.co_freevars, pack.__closure__, strict=True)}
    frame: object | None = held["target_frame_ref"]() if again and "target_frame_ref" in held else None
    return frame if again else held.get("frame")


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the random generators of the host and of `device`."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


@contextmanager
def without_trace(device: torch.device, states: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Run work on `device` that is no part of the run: its random states, hooks on saved tensors and checkpoints.

    states: of `random_states`, with which the work begins; empty: as they are.
    """
    devices = [] if device.type == "cpu" else [device.index]
    with (
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        hide_from_selective_checkpoint(),
    ):
        for state in states[:1]:
            torch.set_rng_state(state)
        for state in states[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        yield


def hidden_from_selective_checkpoint(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in `hide_from_selective_checkpoint` if any dispatch mode is active."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with hide_from_selective_checkpoint():
            return function(*args, **kwargs)

    return run


def _replace_top(before: list[Any], after: list[Any]) -> None:
    """Replace the modes `before` at the top of the stack by `after`; the last mode is on top."""
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
