"""Keys of calls of repeated blocks: calls with equal keys run the same operators on tensors of the same kinds.

A key holds what the code of a block can read: the block's modules with their attributes, the arguments, torch's modes,
and the lines of the model that made the call. What the code reads besides, global variables, is described by
`executed_code.py`. Whatever is not understood (hooks, iterators, tensors that are no parameters) raises
`UnknownValueError`: such a block is traced like every other module.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import get_current_meta

from ascend_parallel.sharding.tracing.attribute_reads import (
    Attribute,
    is_number_of_model,
)
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


def key_of_module(
    block: torch.nn.Module, ignored: Mapping[int, Any]
) -> tuple[tuple[Any, ...], tuple[tuple[Attribute, int], ...]]:
    """Return what a block's code reads of its modules; without the forwards of the modules in `ignored`, by id.

    Apart from the rest: the numbers that models give their modules, which the code may not read (`attribute_reads.py`).
    """
    numbers: list[tuple[Attribute, int]] = []
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
            elif is_number_of_model(module, name, value, _file_of(type(module))):  # type: ignore[arg-type]
                parts.append((name, int))
                numbers.append(((module, name), value))
            elif name not in OWN_ATTRIBUTES and not (name == "forward" and id(module) in ignored):
                parts.append((name, describe(value)))
    return tuple(parts), tuple(numbers)


@cache
def is_model_code(code: CodeType) -> bool:
    """Tell whether code is of the model, not of torch or of this package."""
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
        if is_model_code(frame.f_code):
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
    if type(value) is partial:
        return (partial, *map(inner, (value.func, value.args, value.keywords, vars(value))))
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
