"""Refuse features that exclude overlap, and detect replacements of functions that the layers call inside forward.

A patched layer does the work of these functions without calling them. If another package replaced one of them (a
quantiser, a pass that schedules the backward), a patched layer would silently train without the replacement. Every
call compares the functions by identity (`WatchedNames`); a new function is judged by the module and name of its code.

Sources: the incompatibilities that MindSpeed's CoC feature declares, and Megatron-core's ``tp_comm_overlap``;
megatron/core/tensor_parallel/layers.py and mappings.py, 0.10 to 0.19.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ascend_parallel.patches.base import ConflictError, Function, WatchedNames, defined_in, full_name
from ascend_parallel.settings import Settings

GLOBAL_VARIABLES = "megatron.training.global_vars"

# Name of a configuration field or command-line argument -> the feature.
CONFLICTS = {
    "tp_comm_overlap": "Megatron-core's own overlap of tensor-parallel communication",
    "use_ascend_mc2": "MindSpeed's MC2, which replaces the same layers",
    "use_ascend_coc": "MindSpeed's CoC, which replaces the same layers",
    "optimize_recomp_communication_level": "MindSpeed's overlap of recomputation with communication",
    "unaligned_linear": "MindSpeed's unaligned linear layers",
    "tp_2d": "MindSpeed's two-dimensional tensor parallelism",
}


def refuse_conflicts(config: Any, settings: Settings) -> None:
    """Raise `ConflictError` if a Megatron configuration or the program's arguments exclude overlap with `settings`."""
    parsed = getattr(sys.modules.get(GLOBAL_VARIABLES), "_GLOBAL_ARGS", None)
    for place, holder in (("config", config),) if parsed is None else (("config", config), ("argument", parsed)):
        for name in CONFLICTS:
            if getattr(holder, name, None) and not (settings.take_over and name == "use_ascend_coc"):
                raise ConflictError(
                    f"{place} {name}={getattr(holder, name)!r} ({CONFLICTS[name]}) cannot be used together with "
                    "overlapped linear layers: switch it off, or unset COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL"
                )


def arguments() -> Any:
    """Return the parsed arguments of Megatron's training program, or None if another program runs."""
    return getattr(sys.modules.get(GLOBAL_VARIABLES), "_GLOBAL_ARGS", None)


MAPPINGS = "megatron.core.tensor_parallel.mappings"

# Names of the layers' module: functions that forward calls (a layer may hold them as `_forward_impl`), and mappings.
FUNCTIONALS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
MAPPED = (
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)
# Autograd functions of the layers' module and of the mappings' module; forward and backward are compared.
AUTOGRAD = ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
REGIONS = ("_CopyToModelParallelRegion", "_ReduceFromModelParallelRegion", "_ReduceScatterToSequenceParallelRegion")
REGION_FUNCTIONS = ("_reduce", "_gather_along_first_dim", "_reduce_scatter_along_first_dim")
# Functions of torch.distributed and megatron.core.utils under names of both modules; tools may wrap them beforehand.
FOREIGN_FUNCTIONS = ("dist_all_gather_func", "dist_reduce_scatter_func", "prepare_input_tensors_for_wgrad_compute")

# Modules of the decorators that Megatron puts on its own functions.
TRANSPARENT = ("torch.amp.autocast_mode", "torch.cuda.amp.autocast_mode")

# Foreign wrappers whose effect a patched layer keeps: MindSpeed's swap-attention and ripipe pass the weight itself to
# the backward for its main_grad; a patched layer holds the weight (wgrad.py).
HARMLESS = {
    (module, name)
    for module in ("mindspeed.core.memory.common", "mindspeed.core.tensor_parallel.layers")
    for name in ("linear_forward_main_grad", "linear_backward_main_grad")
}


@dataclass(frozen=True)
class _Place:
    """A name in a module or class.

    holder, name
        The namespace and the name; a namespace may lack it.
    home
        The module that must define the function; None: the function must be `first`.
    first
        The function at the time of patching.
    communicates
        Whether the function is a collective, or the mapping that calls one.
    """

    holder: Mapping[str, Any]
    name: str
    home: ModuleType | None
    text: str
    first: object = None
    communicates: bool = False

    def function(self) -> object:
        """Return the present function of that name."""
        return self.holder.get(self.name)

    def replaced(self) -> bool:
        """Tell whether the function is another package's."""
        if self.home is None:
            return self.function() is not self.first
        return not _own(self.function(), self.home, self.name)


class Replacements(NamedTuple):
    """Texts that name the first function behind all layers that was replaced, and the first that communicates."""

    function: str | None
    collective: str | None


class Originals(WatchedNames[Replacements]):
    """The functions behind the layers: which of them are not Megatron-core's own."""

    def __init__(self, layers: ModuleType) -> None:
        """Watch the functions behind `layers`, the module megatron.core.tensor_parallel.layers."""
        self._places = _places(layers)
        self._layers = layers
        self._own_impls: set[object] = set()
        super().__init__([(place.holder, place.name) for place in self._places], self._judge)

    def _judge(self) -> Replacements:
        foreign = [place for place in self._places if place.replaced()]
        texts = {f"{place.text} is {_origin(place.function())}": place.communicates for place in foreign}
        communicating = (text for text, communicates in texts.items() if communicates)
        return Replacements(next(iter(texts), None), next(communicating, None))

    def replaced_impl(self, layer: Any) -> str | None:
        """Name the replacement of the layer's `_forward_impl`: an attribute of the layer below 0.14, a method since."""
        inner = vars(layer).get("_forward_impl")
        if inner is not None:
            known = any(inner is getattr(self._layers, name) for name in FUNCTIONALS)
            return None if known else f"the layer's _forward_impl is {_origin(inner)}"
        method = getattr(type(layer), "_forward_impl", None)
        if method is None or method in self._own_impls:
            return None
        if _own(method, self._layers, "_forward_impl"):
            self._own_impls.add(method)
            return None
        return f"the layer's _forward_impl is {_origin(method)}"


@functools.cache
def _places(layers: ModuleType) -> tuple[_Place, ...]:
    """Return the names to look at behind `layers`; called first right after the module was imported, if it can be."""
    mappings = importlib.import_module(MAPPINGS)
    classes = [(layers, owner) for owner in AUTOGRAD] + [(mappings, owner) for owner in REGIONS]
    named = [(module, name) for module, name in classes if name in vars(module)]
    named += [(module, name) for module in (layers, mappings) for name in FOREIGN_FUNCTIONS if name in vars(module)]
    return (
        *(_place_of(layers, name, layers) for name in FUNCTIONALS),
        *(_place_of(layers, name, mappings, communicates=True) for name in MAPPED),
        *(_place_of(mappings, name, mappings, communicates=True) for name in REGION_FUNCTIONS),
        *(
            _place_of(module, name, module, owner=owner, communicates=module is mappings)
            for module, owner in classes
            for name in ("forward", "backward")
        ),
        *(
            _place_of(module, name, None, communicates=module is mappings or name.startswith("dist_"))
            for module, name in named
        ),
        _place_of(torch, "matmul", None),
        _place_of(torch, "matmul", None, owner="Tensor"),  # the gradients' products
    )


def _place_of(
    module: ModuleType, name: str, home: ModuleType | None, *, owner: str = "", communicates: bool = False
) -> _Place:
    """Return a name in `module`, or in its class `owner`; as in `_Place`."""
    holder = vars(getattr(module, owner)) if owner else vars(module)
    text = ".".join(filter(None, (module.__name__, owner, name)))
    return _Place(holder, name, home, text, holder.get(name) if home is None else None, communicates)


def _own(attribute: object, home: ModuleType, name: str) -> bool:
    """Tell whether a function was defined in `home` under that name, with known wrappers only."""
    function: Any = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
    return defined_in(function, home, _is_known_wrapper) and inspect.unwrap(function).__code__.co_name == name


def _is_known_wrapper(function: Function) -> bool:
    written = str(function.__globals__.get("__name__"))
    return written in TRANSPARENT or (written, function.__code__.co_name) in HARMLESS


def _origin(attribute: object) -> str:
    if isinstance(attribute, type):
        return full_name(attribute)
    function = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
    written = getattr(function, "__globals__", {}).get("__name__", "unknown origin")
    code = getattr(function, "__code__", None)
    return f"{code.co_name if code else repr(function)} of {written}"
