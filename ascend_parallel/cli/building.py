"""Build the model that a user names by module and function, on the meta device."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def build_model(text: str, *, with_loss: bool = False) -> tuple[torch.nn.Module, tuple[Any, ...], Any]:
    """Call the named function; return the model, its arguments, and the keyword arguments or the loss."""
    where, _, name = text.rpartition(":")
    if not where:
        raise ValueError(f"{text!r}: give a module or a .py file and a function, such as my_models:llama")
    module = _import(where)
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name!r}")
    try:
        with torch.device("meta"):
            returned = getattr(module, name)()
    except Exception as error:  # the user's own function
        raise ValueError(f"{text} raised {type(error).__name__}: {error}") from error
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module)
    expected = "(model, batch) or (model, batch, loss)" if with_loss else "(model, args) or (model, args, kwargs)"
    if not fits:
        raise ValueError(f"{text} returned {type(returned).__name__}: give {expected}")
    model, args, *rest = returned
    if rest and callable(rest[0]) != with_loss:
        raise ValueError(f"{text} returned a {type(rest[0]).__name__} as the third value: give {expected}")
    if isinstance(args, torch.Tensor):
        raise ValueError(f"{text} returned a tensor as the arguments: give a tuple, such as (x,)")
    return model, tuple(args), rest[0] if rest else None


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"{where}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as for a script: the file may import its neighbours
    spec.loader.exec_module(module)
    return module
