"""Autograd functions of the table of ops/row_wise.py run on the rows that have arrived, whatever framework calls them.

Their forward and backward are replaced once their module has been imported, with COC_REGION=1 or auto alone. A function
that another package has replaced is left to it, and waits for all rows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from ascend_parallel.ops.row_wise import FUNCTIONS, RowWiseFunction
from ascend_parallel.ops.unfinished_functions import RUNNING, RowFunction
from ascend_parallel.patches.base import Function, Patch, PatchError, PatchSet, PatchStatus
from ascend_parallel.patches.framework_patch import say_once

MODULES = tuple(dict.fromkeys(line.module for line in FUNCTIONS))
# Where a replacement keeps the method that it replaces, for subclasses that inherit it.
ORIGINAL = "_ascend_parallel_original"
_BY_CLASS: dict[type | None, RowFunction] = {}
"""What runs each patched class: a class may inherit one of its two methods from another."""


def patch_set(line: RowWiseFunction) -> PatchSet:
    """Return the patches of a function, whose module has been imported; none if this version has no such function."""
    package, kind = line.module.partition(".")[0], line.kind()
    if kind is None or kind.setup_context is not torch.autograd.Function.setup_context:  # type: ignore[attr-defined]
        return PatchSet(package, None, [])
    forward, backward = (_original(kind, name) for name in ("forward", "backward"))
    _BY_CLASS[kind] = RowFunction(line.owner, forward, backward, line.rows, writes=line.writes)
    return PatchSet(
        package,
        None,
        [
            Patch(
                target=f"{line.module}.{line.owner}.{name}",
                replacement=functools.partial(_replaced, name),
                parameters=None,
                reason="runs on the rows that have arrived",
                may_be_wrapped=True,
            )
            for name in ("forward", "backward")
            if name in vars(kind)
        ],
    )


def _original(kind: type, name: str) -> Function:
    method: Any = inspect.getattr_static(kind, name)
    method = getattr(method, "__func__", method)
    original: Function = getattr(method, ORIGINAL, method)
    return original


def _replaced(name: str, original: Function) -> Function:
    """Make the method `name` that runs by rows, but where torch.compile traces it, or for subclasses without a line."""

    @functools.wraps(original)
    def call(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs or RUNNING in vars(ctx):
            return original(ctx, *args, **kwargs)
        function = _BY_CLASS.get(getattr(type(ctx), "_forward_cls", None))
        return (original if function is None else getattr(function, name))(ctx, *args)

    setattr(call, ORIGINAL, original)
    return call


class RowWiseFunctions:
    """The patched functions of this process."""

    def __init__(self) -> None:
        """Nothing is patched."""
        self._sets: dict[RowWiseFunction, PatchSet] = {}

    def extend(self) -> None:
        """Patch the functions whose modules have been imported; those that do not fit are named once."""
        for line in FUNCTIONS:
            module: Any = sys.modules.get(line.module)
            if module is None or line in self._sets or getattr(module.__spec__, "_initializing", False):
                continue
            self._sets[line] = patches = patch_set(line)
            try:
                patches.apply("")
            except PatchError as error:
                say_once(f"{line.module}.{line.owner} waits for all rows: {error}")

    def refuse_if_covered(self) -> None:
        """Raise `PatchError` if another patch was put on top of one of these."""
        for patches in self._sets.values():
            patches.refuse_if_covered()

    def revert(self) -> None:
        """Restore the original methods."""
        for patches in self._sets.values():
            patches.revert()
        self._sets.clear()
        _BY_CLASS.clear()

    def status(self) -> list[PatchStatus]:
        """Return the status of each patch."""
        return [status for patches in self._sets.values() for status in patches.status()]
