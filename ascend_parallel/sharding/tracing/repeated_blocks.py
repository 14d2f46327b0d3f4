"""Runs repeated blocks of a model once: later calls with an equal key repeat what the first did.

Blocks are the modules of lists that hold several of a class. Of each kind two calls run, and must have done the same;
from the third on, `BlockRecorder.replay` stands in for the forward. A block that differs in anything (`block_keys.py`)
runs like every other module.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Protocol

import torch

from ascend_parallel.sharding.tracing.block_keys import (
    Executed,
    UnknownValueError,
    check_code,
    flattened,
    key_of_callers,
    key_of_modes,
    key_of_module,
    key_of_tensor,
    noting_code,
    tensors_of,
)

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


@dataclass(frozen=True)
class BlockCall:
    """A call of a block: its path in the model, and the leaves of its arguments.

    tensors
        Its parameters and buffers, `own` many, then the tensors among the arguments.
    """

    path: str
    block: torch.nn.Module
    leaves: tuple[Any, ...]

    own: int
    tensors: tuple[torch.Tensor, ...]


class BlockRecorder(Protocol):
    """Records what a block's call does, and repeats it for a later call with an equal key."""

    def key_of(self, call: BlockCall) -> Any:
        """Return what the recorder needs to be equal besides; raise `UnknownValueError` where it cannot repeat."""

    def begin(self, call: BlockCall) -> Any:
        """Return where the record of a call begins."""

    def end(self, begun: Any, call: BlockCall, returned: Any) -> Any:
        """Return a call's record, which is equal to that of a call that did the same; or raise `UnknownValueError`."""

    def replay(self, record: Any, call: BlockCall) -> Any:
        """Do for another call what was recorded, and return what its forward would return."""


@dataclass
class _Kind:
    """Calls with equal keys: the first one's record, its code, and the state that it left in global variables."""

    record: Any
    executed: Executed
    state: tuple[Any, ...]
    is_confirmed: bool = False


@dataclass
class RepeatedBlocks:
    """The repeated blocks of one run of a model's forward; none where a profiler runs, as Python has only one."""

    recorder: BlockRecorder
    _kinds: dict[Any, _Kind | None] = field(default_factory=dict)  # None: not to be repeated
    _replaced: dict[int, str] = field(default_factory=dict)  # paths of the blocks, by id

    @contextmanager
    def repeating(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the model's repeated blocks run through the recorder inside the context."""
        with ExitStack() as stack:
            for path, block in repeated_blocks(model) if sys.getprofile() is None else ():
                self._replaced[id(block)] = path
                forward = block.forward
                vars(block)["forward"] = wraps(forward)(partial(self._call, path, block, forward))
                stack.callback(vars(block).pop, "forward")
            yield

    def _call(self, path: str, block: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # the modes of the tracer must not see how tensors are looked at
            try:
                call, key = self._keyed(path, block, (args, kwargs))
                kind = self._kinds.get(key)
                is_other = key in self._kinds and (kind is None or kind.executed.state() != kind.state)
                if not is_other and kind is not None and kind.is_confirmed:
                    return self.recorder.replay(kind.record, call)
                begun = self.recorder.begin(call)
            except UnknownValueError:
                is_other = True
        if is_other:
            return forward(*args, **kwargs)
        self._kinds[key] = None
        with ExitStack() as stack:
            executed = stack.enter_context(noting_code()) if kind is None else kind.executed
            returned = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction(), suppress(UnknownValueError):
            after, key_after = self._keyed(path, block, (args, kwargs))
            if key_after == key and all(map(operator.is_, after.leaves, call.leaves)):
                check_code(executed)
                record, state = self.recorder.end(begun, call, returned), executed.state()
                if kind is None or (record == kind.record and state == kind.state):
                    self._kinds[key] = _Kind(record, executed, state, is_confirmed=kind is not None)
        return returned

    def _keyed(self, path: str, block: torch.nn.Module, arguments: Any) -> tuple[BlockCall, Any]:
        leaves: list[Any] = []
        structure = flattened(arguments, leaves)
        own = tensors_of(block).values()
        tensors = (*own, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        call = BlockCall(path, block, tuple(leaves), len(own), tensors)
        known: dict[int, int] = {}
        metas = tuple(key_of_tensor(tensor, known) for tensor in tensors)
        parts = (key_of_module(block, self._replaced), structure, metas, key_of_modes(), key_of_callers())
        return call, (*parts, self.recorder.key_of(call))


def repeated_blocks(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules in lists that hold at least three of their class, with their paths.

    Left out are modules that share parameters or buffers with others, and all modules of a model that has a module
    under two names: torch.export names the paths of such a model by how its code reads them.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    if len({id(module) for _, module in modules}) < len(modules):
        return []
    uses = Counter(map(id, tensors_of(model).values()))
    found = []
    for prefix, parent in modules:
        if not isinstance(parent, LISTS):
            continue
        classes = Counter(type(child) for child in parent.children())
        for name, child in parent.named_children():
            own = Counter(map(id, tensors_of(child).values()))
            is_alone = all(uses[tensor] == count for tensor, count in own.items())
            if classes[type(child)] > 2 and is_alone and "forward" not in vars(child):
                found.append((f"{prefix}.{name}" if prefix else name, child))
    return found
