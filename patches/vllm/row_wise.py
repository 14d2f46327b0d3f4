"""The modules of vLLM that work row by row (ops/row_wise.py) run on the rows that have arrived."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ascend_parallel.ops.record import RECORDING, compute_rows
from ascend_parallel.ops.row_wise import MATMULS, QUANTISED_MATMULS, RowWise
from ascend_parallel.ops.unfinished import is_unfinished
from ascend_parallel.ops.unfinished_modules import by_rows
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.vllm.chunks import LEAST_TOKENS


def method_of(layer: Any) -> str:
    """Return the name of the class that multiplies in a layer: its scheme, or else its linear method."""
    return type(getattr(layer, "scheme", None) or layer.quant_method).__name__


def multiplies_by_rows(layer: Any) -> bool:
    """Tell whether the linear method of a layer gives each row what it would give it alone."""
    method: type = type(getattr(layer, "quant_method", None))
    scheme: type = type(getattr(layer, "scheme", None))
    return _names(method, scheme)


@functools.lru_cache
def _names(method: type, scheme: type) -> bool:
    """Tell whether a linear method, with a layer's scheme, is in the table; each call of a layer asks."""
    return any(each.names(method, scheme) for each in (*MATMULS, *QUANTISED_MATMULS))


def row_wise_call(original: Function, each: RowWise) -> Function:
    """Make the method that runs `original` on the rows that have arrived."""
    first = each.rows[0]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) <= first or not _many_rows(args[first]):
            return original(self, *args, **kwargs)
        if not _waits(args, each.rows):
            if RECORDING.recorder is None:
                return original(self, *args, **kwargs)
            return compute_rows(type(self).__name__, original, self, *args, **kwargs)
        named = each.names(type(self), type(getattr(args[0], "scheme", None)))
        if not named or any(map(torch.is_tensor, kwargs.values())):
            return original(self, *args, **kwargs)
        places = [place for place in each.rows if place < len(args) and args[place] is not None]
        others = [None if place in places else value for place, value in enumerate(args)]  # holds no rows

        def run(*rows: torch.Tensor) -> Any:
            given = list(others)
            for place, x in zip(places, rows, strict=True):
                given[place] = x
            return original(self, *given, **kwargs)

        owner = args[0] if each.method == "apply" else self
        return by_rows(owner, run, *(args[place] for place in places), writes=each.writes)

    return call


def _many_rows(x: Any) -> bool:
    """Tell whether an argument has the rows of a step that may be cut, or recorded: what waits has no fewer."""
    return torch.is_tensor(x) and x.dim() > 0 and x.shape[0] >= LEAST_TOKENS


def _waits(args: tuple[Any, ...], rows: tuple[int, ...]) -> bool:
    """Tell whether rows of an argument are still to come."""
    for place in rows:  # noqa: SIM110 (each call asks, and a generator is two more functions)
        if place < len(args) and is_unfinished(args[place]):
            return True
    return False
