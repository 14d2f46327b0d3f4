"""Picks the loop of a chunked call: the C++ extension's (csrc/chunk_loop.h), or Python's (ops/chunked.py).

Both make the same calls of torch in the same order. Python's runs where the extension is missing, while a timeline is
recorded, and for what C++ does not cover: operands that are not plain tensors or not all there, groups written in
Python, and functions of torch that the program has replaced, or watches by a function mode, which C++ would pass by.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.record import RECORDING
from ascend_parallel.ops.shm_extension import REBUILD, extension, watched

ChunkLoop = Any
"""An object of the extension's class: the chunks of one call."""

# Of the calls between this package and the class; csrc/module.cpp has the same number.
INTERFACE = 3

# The functions of torch that Python calls in place of C++, by their namespaces.
_CALLED = (
    *((vars(dist), name) for name in ("all_reduce", "isend", "irecv", "all_to_all")),
    *((vars(torch), name) for name in ("mm", "bmm", "matmul", "add", "split_with_sizes", "empty_like")),
)


class OwnFunctions:
    """Tells whether those functions are torch's own; looks at each anew once one is another object."""

    def __init__(self) -> None:
        """Look at the first question."""
        self.same: Callable[[], bool] = lambda: False
        """Tells whether the functions are those that were looked at last, and were torch's own."""

    def in_place(self) -> bool:
        """Tell it of the present functions."""
        if self.same():
            return True
        replaced = bool(_replaced(_functions()))
        looked = None if replaced else watched([(space, name, space[name]) for space, name in _CALLED])
        self.same = (lambda: False) if looked is None else looked.same
        return not replaced


OWN = OwnFunctions()


def _functions() -> tuple[Any, ...]:
    """Return the functions of torch that Python calls in place of C++."""
    return tuple(space[name] for space, name in _CALLED)


@lru_cache(maxsize=1)
def _folders() -> tuple[Path, ...]:
    """Return where torch and torch_npu are: transfer_to_npu wraps functions that take a device, for their argument."""
    npu = importlib.util.find_spec("torch_npu")
    of_npu = list(npu.submodule_search_locations or ()) if npu is not None else []
    return (Path(torch.__file__).parent, *map(Path, of_npu))


def _is_own(function: object) -> bool:
    """Tell whether a function is one that torch or torch_npu came with."""
    if isinstance(function, FunctionType):
        return any(map(Path(function.__code__.co_filename).is_relative_to, _folders()))
    return isinstance(function, BuiltinFunctionType)


@lru_cache(maxsize=16)
def _replaced(functions: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of those that the program has replaced."""
    return tuple(function.__name__ for function in functions if not _is_own(function))


def _loaded() -> type[Any] | str:
    """Return the extension's class, or the reason why Python's loop runs every call."""
    module = extension()
    if isinstance(module, str):
        return module
    if getattr(module, "LOOP_INTERFACE", 0) != INTERFACE:
        return f"the C++ extension is that of another version of this package: {REBUILD}"
    replaced = _replaced(_functions())
    return f"the program has replaced torch's {', '.join(replaced)}" if replaced else module.ChunkLoop


LOOP: type[Any] | str = _loaded()
"""The extension's class, or the reason why Python's loop runs every call. A test that compares the two sets it."""


EXTENSION: Any = extension()
"""The extension, or why it is missing: then `in_cpp` is false."""


def in_cpp(*operands: object) -> bool:
    """Tell whether C++ may multiply these tensors in place of Python; None stands for one that is not there."""
    if isinstance(LOOP, str) or RECORDING.recorder is not None or not EXTENSION.covers(*operands):
        return False
    return OWN.same() or OWN.in_place()


def chunk_loop(group: dist.ProcessGroup, *operands: object) -> ChunkLoop | None:
    """Return a loop in C++ for a call of these operands on `group`; None: Python's loop runs it."""
    if isinstance(LOOP, str) or type(group) is not dist.ProcessGroup or c10d._world.pg_coalesce_state:
        return None
    return LOOP(group) if in_cpp(*operands) else None
