"""What Megatron-core's linear layers reach below their forward, and whether somebody replaced any of it.

A patched layer does what those functions do without calling them. So whatever was put in their place (a quantiser, a
pass that schedules the backward) would be lost, and the layer would train on without it. Everything is looked at by
identity, at every call, and judged by where its code was written.

Source: megatron/core/tensor_parallel/layers.py and mappings.py, 0.10 to 0.16.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MAPPINGS = "megatron.core.tensor_parallel.mappings"

# Of the layers' module: what forward calls, which a layer may also hold as `_forward_impl`, and what that goes through.
FUNCTIONALS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
REACHED = (
    *FUNCTIONALS,
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)
# Autograd functions, whose forward and backward are looked at: those of the layers' module, and the mappings'.
AUTOGRAD = ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
REGIONS = ("_CopyToModelParallelRegion", "_ReduceFromModelParallelRegion", "_ReduceScatterToSequenceParallelRegion")
REGION_FUNCTIONS = ("_reduce", "_reduce_scatter_along_first_dim")

# Decorators that Megatron puts on its own functions, by the module that their wrappers were written in.
TRANSPARENT = ("torch.amp.autocast_mode", "torch.cuda.amp.autocast_mode")

# Wrappers of others that change nothing a patched layer would lose: MindSpeed's swap-attention and ripipe hand the
# weight itself to the backward for its main_grad; a patched layer has it (wgrad.py).
HARMLESS = {
    (module, name)
    for module in ("mindspeed.core.memory.common", "mindspeed.core.tensor_parallel.layers")
    for name in ("linear_forward_main_grad", "linear_backward_main_grad")
}


@dataclass(frozen=True)
class _Place:
    """A name in a module or class, and the module in which its function has to be written."""

    holder: Mapping[str, Any]
    name: str
    home: ModuleType
    text: str

    def found(self) -> object:
        """Return what stands there now."""
        return self.holder.get(self.name)


class Originals:
    """What the layers reach: looked at by identity, and looked into when it is another object than before."""

    def __init__(self, layers: ModuleType) -> None:
        """Note where to look in `layers`, the module megatron.core.tensor_parallel.layers."""
        mappings = importlib.import_module(MAPPINGS)
        regions = [_Place(vars(layers), name, _home(name, layers, mappings), f"layers.{name}") for name in REACHED]
        regions += [_Place(vars(mappings), name, mappings, f"mappings.{name}") for name in REGION_FUNCTIONS]
        for module, owners in ((layers, AUTOGRAD), (mappings, REGIONS)):
            regions += [
                _Place(vars(getattr(module, owner)), name, module, f"{module.__name__.split('.')[-1]}.{owner}.{name}")
                for owner in owners
                for name in ("forward", "backward")
            ]
        self._places = tuple(regions)
        self._layers = layers
        self._seen: tuple[object, ...] = ()
        self._said: str | None = None

    def replaced(self, layer: Any) -> str | None:
        """Say what of the layer's computation is not Megatron's own, or None."""
        seen = tuple(place.found() for place in self._places)
        if seen != self._seen:
            self._said = next((_foreign(place) for place in self._places if not _own(place.found(), place.home)), None)
            self._seen = seen
        return self._said or self._impl(layer)

    def _impl(self, layer: Any) -> str | None:
        """Look at the layer's `_forward_impl`: set in the constructor below 0.14, a method since."""
        inner = vars(layer).get("_forward_impl")
        if inner is not None:
            known = any(inner is getattr(self._layers, name) for name in FUNCTIONALS)
            return None if known else f"the layer's _forward_impl is {_described(inner)}"
        method = getattr(type(layer), "_forward_impl", None)
        own = method is None or _own(method, self._layers)
        return None if own else f"the layer's _forward_impl is {_described(method)}"


def _home(name: str, layers: ModuleType, mappings: ModuleType) -> ModuleType:
    return layers if name in FUNCTIONALS else mappings


def _own(found: object, home: ModuleType) -> bool:
    """Tell whether a function was written in `home`, below nothing but wrappers that are known."""
    function = found.__func__ if isinstance(found, staticmethod) else found
    while inspect.isfunction(function):
        wrapped = getattr(function, "__wrapped__", None)
        if function.__globals__ is vars(home) and wrapped is None:
            return True
        written = str(function.__globals__.get("__name__"))
        if written not in TRANSPARENT and (written, function.__code__.co_name) not in HARMLESS:
            return False
        function = wrapped
    return False


def _foreign(place: _Place) -> str:
    return f"megatron.core.tensor_parallel.{place.text} is {_described(place.found())}"


def _described(found: object) -> str:
    function = found.__func__ if isinstance(found, staticmethod) else found
    written = getattr(function, "__globals__", {}).get("__name__", "unknown origin")
    code = getattr(function, "__code__", None)
    return f"{code.co_name if code else repr(function)} of {written}"
