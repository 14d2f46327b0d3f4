"""Keys of calls of repeated blocks: calls with equal keys run the same operators on tensors of the same kinds.

A key holds what the code of a block can read: the block's modules with their attributes, the arguments, torch's modes,
and the lines of the model that made the call. What the code reads besides, global variables, is described by
`Executed`. Whatever is not understood (hooks, iterators, tensors that are no parameters) raises `UnknownValueError`:
such a block is traced like every other module.
"""

from __future__ import annotations

import dis
import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import get_current_meta

from ascend_parallel.sharding.tracing.model_files import is_model_file
from ascend_parallel.sharding.tracing.strategy_marks import KEY

MAX_DEPTH = 6
MAX_LENGTH = 256  # of containers: describing a vocabulary for each block would take longer than tracing
PLAIN = (bool, int, str, bytes, type(None))
BY_REPR = (float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice)
BY_IDENTITY = (
    type,
    FunctionType,
    BuiltinFunctionType,
    logging.Logger,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
OWN_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
OWN_FILES = str(Path(__file__).parent)
# Code typed in at a prompt, which has no file.
PROMPTS = ("<stdin", "<ipython", "<doctest")


class UnknownValueError(ValueError):
    """A value of which it is not known whether two blocks read the same."""


def key_of_module(block: torch.nn.Module, ignored: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return what a block's code reads of its modules; without the forwards of the modules in `ignored`, by id."""
    modules = list(block.named_modules(remove_duplicate=False))
    places = {id(module): place for place, (_, module) in enumerate(modules)}
    describe = partial(described, places=places)
    tensors: dict[int, int] = {}
    parts: list[Any] = []
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise UnknownValueError("hooks of all modules")
    for path, module in modules:
        parts += [path, places[id(module)], key_of_class(type(module)), tuple(module._modules)]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            parts.append((name, None if tensor is None else key_of_tensor(tensor, tensors)))
        for name, value in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                if value:
                    raise UnknownValueError(name)
            elif name not in OWN_ATTRIBUTES and not (name == "forward" and id(module) in ignored):
                parts.append((name, describe(value)))
    return tuple(parts)


@cache
def _is_model_code(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(PROMPTS) or (is_model_file(name) and not name.startswith(OWN_FILES))


def tensors_of(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a block's parameters and buffers, also tied ones, by name."""
    return dict((*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)))


def key_of_tensor(tensor: torch.Tensor, known: dict[int, int]) -> tuple[Any, ...]:
    """Return all of a tensor but its values; `known` numbers tensors and their memory in the order of the calls."""
    if type(tensor) not in TENSORS or tensor.layout != torch.strided or not all(type(n) is int for n in tensor.shape):
        raise UnknownValueError(f"a {type(tensor).__name__}")
    memory = tensor.untyped_storage()._cdata
    meta = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, str(tensor.device))
    flags = (tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), type(tensor))
    numbers = (known.setdefault(id(tensor), len(known)), known.setdefault(memory, len(known)))
    return (*meta, *flags, *numbers)


def key_of_modes() -> tuple[Any, ...]:
    """Return torch's modes that decide which operators run, and the marks that they get."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    stacks = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    custom = repr((get_current_meta().get("custom") or {}).get(KEY))
    grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (*grad, *autocast, torch.get_default_dtype(), *stacks, custom)


def key_of_callers() -> tuple[Any, ...]:
    """Return the lines of the model that made the call, to the instruction: errors name them."""
    places = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_model_code(frame.f_code):
            places.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def flattened(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested tuples, lists and dicts to `leaves`, and return their structure."""
    if type(value) in (tuple, list):
        return (type(value), tuple(flattened(item, leaves) for item in value))
    if type(value) is dict:
        return (dict, tuple((described(key), flattened(item, leaves)) for key, item in value.items()))
    leaves.append(value)
    return "a tensor" if isinstance(value, torch.Tensor) else ("a constant", described(value, depth=MAX_DEPTH))


def rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """Return nested tuples, lists and dicts as `value`, with other leaves."""
    if type(value) in (tuple, list):
        return type(value)(rebuilt(item, leaves) for item in value)
    if type(value) is dict:
        return {key: rebuilt(item, leaves) for key, item in value.items()}
    return next(leaves)


def described(value: Any, places: Mapping[int, int] | None = None, depth: int = 0) -> Any:
    """Return a comparable form of a value; `places` numbers the modules that may be among it, by id."""
    if isinstance(value, Enum) or type(value) in PLAIN:
        return (type(value), value)
    if type(value) in BY_REPR:
        return (type(value), repr(value))
    if isinstance(value, BY_IDENTITY):
        return (type(value), id(value))
    if places is not None and id(value) in places:
        return ("module", places[id(value)])
    if isinstance(value, (torch.Tensor, torch.nn.Module)) or depth >= MAX_DEPTH:
        raise UnknownValueError(f"a {type(value).__name__}")
    containers = (tuple, list, dict, set, frozenset)
    if len(value if isinstance(value, containers) else getattr(value, "__dict__", ())) > MAX_LENGTH:
        raise UnknownValueError(f"a {type(value).__name__} of many values")
    inner = partial(described, places=places, depth=depth + 1)
    if type(value) in (tuple, list, torch.Size):
        return (type(value), tuple(map(inner, value)))
    if isinstance(value, dict):
        items = tuple((inner(key), inner(item)) for key, item in list(value.items()))
        return (type(value), items, () if type(value) is dict else inner(dict(getattr(value, "__dict__", {}))))
    if type(value) in (set, frozenset):
        return (type(value), frozenset(map(inner, value)))
    if not hasattr(value, "__dict__") or hasattr(value, "__next__") or _is_native(type(value)):
        raise UnknownValueError(f"a {type(value).__name__}")
    return (
        *key_of_class(type(value)),
        id(value),
        tuple((name, inner(item)) for name, item in list(vars(value).items())),
    )


def _is_native(kind: type) -> bool:
    """Tell whether objects of a class can hold a state besides their attributes: bases in C, slots."""
    return any(
        vars(base).get("__slots__") or not base.__flags__ & 1 << 9 for base in kind.__mro__ if base is not object
    )


def key_of_class(kind: type) -> tuple[Any, ...]:
    """Return a class with the values among its attributes, which the code may change."""
    bases = [base for base in kind.__mro__ if is_model_file(_file_of(base))]
    attributes = [
        (name, value) for base in bases for name, value in vars(base).items() if not _is_definition(name, value)
    ]
    return (kind, tuple((name, described(value)) for name, value in attributes))


def _is_definition(name: str, value: Any) -> bool:
    """Tell whether a class's attribute is code: a method, a property, a class; or made by Python."""
    return name.startswith("__") or name == "_abc_impl" or isinstance(value, type) or hasattr(value, "__get__")


@cache
def _file_of(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>")


@dataclass
class Executed:
    """The code of the model that ran in a block, with the global variables that the code names, and its functions."""

    frames: dict[int, tuple[CodeType, dict[str, Any]]]  # by the code's id
    functions: tuple[FunctionType, ...] = ()

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

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and id(frame.f_code) not in frames and _is_model_code(frame.f_code):
            frames[id(frame.f_code)] = (frame.f_code, frame.f_globals)

    is_collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield executed
    finally:
        sys.setprofile(None)
        codes = [code for code, _ in frames.values()]
        referrers = gc.get_referrers(*codes) if codes else []
        executed.functions = tuple(each for each in referrers if type(each) is FunctionType)
        if is_collecting:
            gc.enable()


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
