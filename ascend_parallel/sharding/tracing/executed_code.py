"""The code that ran in a block, and what it keeps outside: global variables, closures, default arguments."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ascend_parallel.sharding.collector import collector_paused
from ascend_parallel.sharding.tracing.attribute_reads import may_read_all
from ascend_parallel.sharding.tracing.block_keys import UnknownValueError, described, is_model_code, key_of_class
from ascend_parallel.sharding.tracing.model_files import is_model_file


@dataclass
class Executed:
    """The code of the model that ran in a block, with the global variables that the code names, and its functions."""

    frames: dict[int, tuple[CodeType, dict[str, Any]]]  # by the code's id
    functions: tuple[FunctionType, ...] = ()
    may_read_all: bool = False  # whether it may have read modules' attributes without a lookup of their names

    def state(self) -> tuple[Any, ...]:
        """Return the values that the code keeps outside of the block: of global variables, closures, default arguments.

        Raises `UnknownValueError` where they cannot be compared.
        """
        names = tuple((id(code), *_globals_of(code, names)) for code, names in self.frames.values())
        return (names, tuple(map(_kept_by, self.functions)))


@contextmanager
def noting_code() -> Iterator[Executed]:
    """Note the code of the model that runs inside the context.

    The garbage collector waits: what its callbacks run (hypothesis registers one) is not the model's.
    """
    executed = Executed({})
    frames = executed.frames
    plain: dict[int, Any] = {}  # arguments from which no module can be reached, by id

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not is_model_code(frame.f_code):
            return
        frames.setdefault(id(frame.f_code), (frame.f_code, frame.f_globals))
        if not executed.may_read_all and may_read_all(frame.f_code):
            # its arguments, and the variables of its closure
            executed.may_read_all = not _all_plain(list(frame.f_locals.values()), plain)

    with collector_paused():
        sys.setprofile(note)
        try:
            yield executed
        finally:
            sys.setprofile(None)
            codes = [code for code, _ in frames.values()]
            referrers = gc.get_referrers(*codes) if codes else []
            executed.functions = tuple(each for each in referrers if type(each) is FunctionType)


def _all_plain(values: Sequence[Any], known: dict[int, Any]) -> bool:
    """Tell whether no module can be reached from the values; note those of which this is known."""
    for value in values:
        if id(value) not in known and not isinstance(value, torch.Tensor):
            try:
                described(value)
            except UnknownValueError:
                return False
            known[id(value)] = value
    return True


def _kept_by(function: FunctionType) -> Any:
    """Return what a function keeps between calls: its closure, default arguments and attributes."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    kept = (cells, function.__defaults__, function.__kwdefaults__, vars(function))
    return (id(function), len(function.__closure__ or ()), described(kept))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def check_code(executed: Executed) -> None:
    """Raise `UnknownValueError` for code that keeps a state in global variables, closures or default arguments."""
    codes = [code for code, _ in executed.frames.values()]
    inner = {constant for code in codes for constant in code.co_consts if isinstance(constant, CodeType)}
    for code in codes:
        written = _written(code)
        if "STORE_GLOBAL" in written or ("STORE_DEREF" in written and code not in inner):
            raise UnknownValueError(f"{code.co_name}, which keeps a state outside of the module")


@cache
def _written(code: CodeType) -> frozenset[str]:
    """Return which variables outside of a function it writes: STORE_GLOBAL, or STORE_DEREF of an outer function's."""
    steps = [step for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "STORE_DEREF")]
    return frozenset(step.opname for step in steps if step.opname == "STORE_GLOBAL" or step.argval in code.co_freevars)


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    loads = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(loads))


def _globals_of(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the global variables that a function names, also those of modules."""
    for name in _global_names(code):
        if name in names:
            value = names[name]
            if isinstance(value, ModuleType):
                yield from _named(value, code)
            elif isinstance(value, type):
                yield key_of_class(value)
            else:
                yield (name, described(value))


def _named(module: ModuleType, code: CodeType) -> Iterator[Any]:
    """Yield the variables of a module of the model that a function names."""
    if not is_model_file(getattr(module, "__file__", None) or "<built-in>"):
        return
    for name in code.co_names:
        value = vars(module).get(name)
        if not isinstance(value, ModuleType):
            yield (name, key_of_class(value) if isinstance(value, type) else described(value))
