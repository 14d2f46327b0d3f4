"""Runs repeated blocks of a model once: later calls with an equal key repeat what the first did.

Blocks are the modules of lists that hold several of a class. Of each kind two calls run, and must have done the same;
from the third on, `BlockRecorder.replay` stands in for the forward. A block that differs in anything (`block_keys.py`)
runs like every other module.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Protocol

import torch

from ascend_parallel.sharding.tracing.attribute_reads import Attribute, noting_reads
from ascend_parallel.sharding.tracing.block_keys import (
    UnknownValueError,
    flattened,
    key_of_callers,
    key_of_modes,
    key_of_module,
    key_of_tensor,
    tensors_of,
)
from ascend_parallel.sharding.tracing.executed_code import Executed, check_code, noting_code

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


@dataclass(frozen=True)
class BlockCall:
    """A call of a block: its path in the model, and the leaves of its arguments.

    tensors
        Its parameters and buffers, `own` many, then the tensors among the arguments.
    numbers
        The whole numbers among the attributes of its modules, which its code may not read.
    """

    path: str
    block: torch.nn.Module
    leaves: tuple[Any, ...]

    own: int
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[tuple[Attribute, int], ...]


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
    """Calls with equal keys, and equal numbers at the places that their code reads.

    record
        What the first call did; None: not to be repeated.
    read
        The places, among `BlockCall.numbers`, of the numbers that the code reads, with their values.
    executed, state
        The code that ran, and the state that it left in global variables.
    """

    record: Any
    read: Mapping[int, int]
    executed: Executed
    state: tuple[Any, ...] = ()
    is_confirmed: bool = False

    def is_of(self, call: BlockCall) -> bool:
        """Tell whether a call with an equal key reads the same numbers."""
        return all(call.numbers[place][1] == value for place, value in self.read.items())


@dataclass
class RepeatedBlocks:
    """The repeated blocks of one run of a model's forward; none where a profiler runs, as Python has only one."""

    recorder: BlockRecorder
    _kinds: dict[Any, list[_Kind]] = field(default_factory=lambda: defaultdict(list))
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
                kind = next((kind for kind in self._kinds[key] if kind.is_of(call)), None)
                is_other = kind is not None and (kind.record is None or kind.executed.state() != kind.state)
                if not is_other and kind is not None and kind.is_confirmed:
                    return self.recorder.replay(kind.record, call)
                begun = self.recorder.begin(call)
            except UnknownValueError:
                is_other = True
        if is_other:
            return forward(*args, **kwargs)
        with ExitStack() as stack:
            read = stack.enter_context(noting_reads([attribute for attribute, _ in call.numbers]))
            executed = stack.enter_context(noting_code()) if kind is None else kind.executed
            returned = forward(*args, **kwargs)
        if executed.may_read_all:
            read = set(range(len(call.numbers)))
        own = _Kind(None, {place: call.numbers[place][1] for place in read}, executed)
        with torch._C.DisableTorchFunction(), suppress(UnknownValueError):
            after, key_after = self._keyed(path, block, (args, kwargs))
            if (key_after, after.numbers) == (key, call.numbers) and all(map(operator.is_, after.leaves, call.leaves)):
                check_code(executed)
                own.record, own.state = self.recorder.end(begun, call, returned), executed.state()
        if kind is None:
            self._kinds[key].append(own)
        else:
            kind.is_confirmed = own.record is not None and (own.record, own.read, own.state) == (
                kind.record,
                kind.read,
                kind.state,
            )
            kind.record = kind.record if kind.is_confirmed else None
        return returned

    def _keyed(self, path: str, block: torch.nn.Module, arguments: Any) -> tuple[BlockCall, Any]:
        leaves: list[Any] = []
        structure = flattened(arguments, leaves)
        own = tensors_of(block).values()
        tensors = (*own, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        of_module, numbers = key_of_module(block, self._replaced)
        call = BlockCall(path, block, tuple(leaves), len(own), tensors, numbers)
        known: dict[int, int] = {}
        metas = tuple(key_of_tensor(tensor, known) for tensor in tensors)
        parts = (of_module, structure, metas, key_of_modes(), key_of_callers())
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
