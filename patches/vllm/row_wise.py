"""The modules of vLLM that work row by row: each row of the result depends on the same row of the inputs alone.

`tests/vllm/test_row_wise.py` proves it for each class of the table: a call with some rows gives the results of
these rows, bit for bit. A class that is not named, a subclass too, waits for all rows. The subclasses of vllm-ascend
are named for what their operators are documented to compute; none was run (docs/vllm.md).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from ascend_parallel.ops.record import RECORDING, compute_rows
from ascend_parallel.ops.unfinished import is_unfinished
from ascend_parallel.ops.unfinished_modules import by_rows
from ascend_parallel.patches.base import Function, full_name
from ascend_parallel.patches.vllm.chunks import LEAST_TOKENS

LAYERS = "vllm.model_executor.layers"
ASCEND = "vllm_ascend.ops"


@dataclass(frozen=True)
class RowWise:
    """A method that works row by row.

    module, owner, method
        The class and its method.
    rows
        The places of the arguments with rows, behind `self`; one that is None is left out.
    writes
        Whether its kernels may write to these arguments.
    derived
        The full names of subclasses that work row by row too.
    """

    module: str
    owner: str
    method: str = "forward"
    rows: tuple[int, ...] = (0,)
    writes: bool = False
    derived: tuple[str, ...] = ()

    def kind(self) -> type | None:
        """Return the class; None: this version has none."""
        found = getattr(importlib.import_module(self.module), self.owner, None)
        return found if isinstance(found, type) else None

    def exists(self) -> bool:
        """Tell whether this version has the class."""
        return self.kind() is not None

    def inherited(self) -> bool:
        """Tell whether the class inherits the method."""
        kind = self.kind()
        return kind is not None and self.method not in vars(kind)


NORMS = (
    *(
        RowWise(f"{LAYERS}.layernorm", owner, rows=(0, 1), writes=True, derived=(f"{ASCEND}.layernorm.Ascend{owner}",))
        for owner in ("RMSNorm", "GemmaRMSNorm")
    ),
    RowWise(f"{LAYERS}.layernorm", "LayerNorm"),
)
ACTIVATIONS = tuple(
    RowWise(f"{LAYERS}.activation", owner, derived=(f"{ASCEND}.activation.Ascend{owner}",))
    for owner in (
        "SiluAndMul",
        "MulAndSilu",
        "GeluAndMul",
        "NewGELU",
        "FastGELU",
        "QuickGELU",
        "ReLUSquaredActivation",
    )
)
# The matmuls of column layers, of replicated ones, and of those with adapters. ``apply(layer, x, bias)``
MATMULS = (
    RowWise(
        f"{LAYERS}.linear",
        "UnquantizedLinearMethod",
        "apply",
        rows=(1,),
        derived=(f"{ASCEND}.linear.AscendUnquantizedLinearMethod",),
    ),
)
# From vllm-ascend 0.23 on the subclass has a method of its own.
ASCEND_MATMUL = RowWise(f"{ASCEND}.linear", "AscendUnquantizedLinearMethod", "apply", rows=(1,))
MODULES = (*NORMS, *ACTIVATIONS, *MATMULS)


def row_wise_call(original: Function, each: RowWise) -> Function:
    """Make the method that runs `original` on the rows that have arrived."""
    kind, first = each.kind(), each.rows[0]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) <= first or not _waits(args, each.rows):
            if RECORDING.recorder is None or torch.compiler.is_compiling() or not _many_rows(args[first:]):
                return original(self, *args, **kwargs)
            return compute_rows(type(self).__name__, original, self, *args, **kwargs)
        by_name = type(self) is kind or full_name(type(self)) in each.derived
        if not by_name or any(map(torch.is_tensor, kwargs.values())):
            return original(self, *args, **kwargs)
        places = [place for place in each.rows if place < len(args) and args[place] is not None]

        def run(*rows: torch.Tensor) -> Any:
            given = list(args)
            for place, x in zip(places, rows, strict=True):
                given[place] = x
            return original(self, *given, **kwargs)

        owner = args[0] if each.method == "apply" else self
        return by_rows(owner, run, *(args[place] for place in places), writes=each.writes)

    return call


def _many_rows(args: tuple[Any, ...]) -> bool:
    """Tell whether the first argument has the rows of a step that is recorded."""
    return bool(args) and torch.is_tensor(args[0]) and args[0].shape[0] >= LEAST_TOKENS


def _waits(args: tuple[Any, ...], rows: tuple[int, ...]) -> bool:
    """Tell whether rows of an argument are still to come."""
    return any(is_unfinished(args[place]) for place in rows if place < len(args))
