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
from ascend_parallel.patches.framework_patch import is_installed
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
    schemes
        Of a linear method that leaves its arithmetic to a layer's scheme: the classes that work row by row.
    """

    module: str
    owner: str
    method: str = "forward"
    rows: tuple[int, ...] = (0,)
    writes: bool = False
    derived: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()

    def names(self, kind: type, scheme: type) -> bool:
        """Tell whether a class is this one or of `derived`, and its layer's scheme of `schemes`, if it has any."""
        named = full_name(kind) in (f"{self.module}.{self.owner}", *self.derived)
        return named and (not self.schemes or scheme.__name__ in self.schemes)

    def kind(self) -> type | None:
        """Return the class; None: this version has none, or no such module."""
        if not is_installed(self.module):
            return None
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
# Matmuls of quantised layers: with weights alone of few bits, or with activations of a fixed scale or one per token.
# Not here: a scale over all rows; kernels that unpack the weight in each call (AWQ, the first GPTQ).
QUANTISED_MATMULS = (
    RowWise(
        f"{LAYERS}.quantization.compressed_tensors.compressed_tensors",
        "CompressedTensorsLinearMethod",
        "apply",
        rows=(1,),
        schemes=("CompressedTensorsW8A8Int8", "CompressedTensorsWNA16"),
    ),
    RowWise(f"{LAYERS}.quantization.auto_gptq", "AutoGPTQLinearMethod", "apply", rows=(1,)),
    RowWise(f"{LAYERS}.quantization.gptq_marlin", "GPTQMarlinLinearMethod", "apply", rows=(1,)),
)
MODULES = (*NORMS, *ACTIVATIONS, *MATMULS)
# In modules that are patched once the program has imported them.
LATER = (ASCEND_MATMUL, *QUANTISED_MATMULS)


def method_of(layer: Any) -> str:
    """Return the name of the class that multiplies in a layer: its scheme, or else its linear method."""
    return type(getattr(layer, "scheme", None) or layer.quant_method).__name__


def multiplies_by_rows(layer: Any) -> bool:
    """Tell whether the linear method of a layer gives each row what it would give it alone."""
    method: type = type(getattr(layer, "quant_method", None))
    scheme: type = type(getattr(layer, "scheme", None))
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
    return any(is_unfinished(args[place]) for place in rows if place < len(args))
