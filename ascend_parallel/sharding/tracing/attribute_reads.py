"""Which numbers among a block's attributes its code reads: those that it does not read may differ between blocks.

Decoders number their layers (`layer_idx`), for a cache that training does not have. Two blocks that differ only in
numbers that the first did not read run alike: all that the code reads is the same, step for step, so the second comes
to no line that reads them either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch

from ascend_parallel.sharding.tracing.model_files import is_model_file

Attribute = tuple[torch.nn.Module, str]
OF_MODULES = frozenset(vars(torch.nn.Module()))
# Names in code that may read a module's attributes without a lookup by name.
READ_ALL = frozenset(
    (
        *("__dict__", "vars", "locals", "eval", "exec", "copy", "deepcopy", "replace", "pickle", "dumps"),
        *("__copy__", "__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__"),
    )
)


def is_number_of_model(module: torch.nn.Module, name: str, value: Any, file_of: str) -> bool:
    """Tell whether an attribute is a whole number that the module's own class, in `file_of`, gave its instance."""
    return (
        type(value) is int
        and is_model_file(file_of)
        and name not in OF_MODULES
        and not any(name in vars(base) for base in type(module).__mro__)
    )


@contextmanager
def noting_reads(attributes: Sequence[Attribute]) -> Iterator[set[int]]:
    """Note which of the attributes, by their places, are read or written inside the context.

    Their classes get properties of these names, through which every lookup goes.
    """
    places = {(id(module), name): place for place, (module, name) in enumerate(attributes)}
    noted: set[int] = set()
    added = list(dict.fromkeys((type(module), name) for module, name in attributes))
    for kind, name in added:
        setattr(kind, name, _noting(name, places, noted))
    try:
        yield noted
    finally:
        for kind, name in added:
            delattr(kind, name)


def _noting(name: str, places: Mapping[tuple[int, str], int], noted: set[int]) -> property:
    def note(module: Any) -> None:
        if (id(module), name) in places:
            noted.add(places[id(module), name])

    def read(module: Any) -> Any:
        note(module)
        held = object.__getattribute__(module, "__dict__")
        if name not in held:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        return held[name]

    def write(module: Any, value: Any) -> None:
        note(module)
        object.__getattribute__(module, "__dict__")[name] = value

    def delete(module: Any) -> None:
        note(module)
        del object.__getattribute__(module, "__dict__")[name]

    return property(read, write, delete)


@cache
def may_read_all(code: CodeType) -> bool:
    """Tell whether code may read attributes otherwise than by a lookup of their names."""
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return bool(READ_ALL.intersection(code.co_names) or READ_ALL.intersection(texts))
