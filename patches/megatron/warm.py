"""Calls of Megatron-core's linear layers that were decided before: what was read then is the key of one look-up.

A warm call takes the layer of its key, and runs; one that was left whole runs Megatron-core's own forward. What is read
of the layer, its configuration, the program's arguments and its operands is in the key, with what is measured also
their shapes; what may change beside them, the replaced functions, is asked at each call. A call that the
key does not describe in full is never kept: it is decided each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.unfinished import UnfinishedTensor
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.overlap.layer_shape import COLUMN
from ascend_parallel.overlap.weight_gradient import WeightGradient
from ascend_parallel.patches.framework import Framework
from ascend_parallel.patches.linear_call import LinearCall, layer_of
from ascend_parallel.patches.megatron.conflicts import CONFLICTS, arguments
from ascend_parallel.patches.megatron.uncovered import FSDP_BUFFER

# What the forwards read of a layer beside its parameters, and of its configuration.
OF_LAYERS = (
    "sequence_parallel",
    "skip_bias_add",
    "gradient_accumulation_fusion",
    "explicit_expert_comm",
    "gtp_remat_size",
    "output_dtype",
    "gather_output",
    "output_size_per_partition",
    "input_size",
    "allreduce_dgrad",
    "disable_grad_reduce",
    "input_is_parallel",
)
OF_CONFIGS = ("deterministic_mode", "defer_embedding_wgrad_compute", "_cpu_offloading_context", *CONFLICTS)
FSDP = "__fsdp_param__"
MOST_KEPT = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ToGradient(Protocol):
    """Returns where the weight gradient of a layer's call goes."""

    def __call__(self, layer: Any, weight: Any, begin: None) -> WeightGradient:
        """Return it."""


class WarmCalls:
    """The decided calls of one framework's settings, by group and key."""

    def __init__(
        self,
        framework: Framework,
        version: tuple[int, ...],
        *,
        any_replaced: Callable[[Any], bool],
        weight_gradient: ToGradient,
    ) -> None:
        """Keep none yet; none ever where each call is checked, digested or needs the tree.

        any_replaced
            Tells whether a function behind a layer is not the framework's own.
        weight_gradient
            For layers that add it to ``main_grad``.
        """
        settings = framework.settings
        self._framework, self._version = framework, version
        self._any_replaced, self._weight_gradient = any_replaced, weight_gradient
        self._keeps = framework.verifier is None and settings.digests is None
        self._keeps = self._keeps and not settings.arithmetic.forms_every_product
        self._measures = framework.decider.measures
        self._of_groups: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, dict[str, Any]]] = WeakKeyDictionary()

    def find(
        self, layer: Any, kind: str, x: torch.Tensor, weight: torch.Tensor | None, gathers: bool | None = None
    ) -> ParallelLinear | bool | None:
        """Return the layer that runs a call of `layer` with x; True: the original runs; None: it is to be decided.

        weight, gathers: as a column layer's caller gives them; None: the layer's own.
        """
        if not self._keeps or not dist.is_initialized():
            return None
        framework, measured = self._framework, None
        group = framework.group_of(layer)
        if self._measures:
            if (measured := measured_key(layer, kind, x, weight)) is None:
                return None
            decided = framework.decider.groups.get(group)
            if decided is None:
                return None
            measured = decided.way, *measured
            if measured in decided.left_whole:
                return None if framework.region_choice.on or framework.region_choice.undecided else True
        calls = self._of_groups.get(group)
        if calls is None or framework.region_choice.undecided:
            return None
        leaves_rows = framework.leaves_rows_of(layer) if framework.region_choice.on else 0
        key = measured, leaves_rows, _key(layer, kind, x, weight, gathers)
        try:
            options = calls.get(key)
        except TypeError:  # the value of an option cannot be hashed
            return None
        if options is None:
            return None
        if self._any_replaced(layer):
            return None
        found: ParallelLinear = object.__new__(ParallelLinear)  # a constructor takes five times as long
        vars(found).update(options, group=group)
        if layer.gradient_accumulation_fusion:
            own = layer._parameters.get("weight")
            used = own if weight is None else weight
            if self._version >= FSDP_BUFFER and (hasattr(own, FSDP) or hasattr(used, FSDP)):
                return None
            vars(found)["weight_gradient"] = self._weight_gradient(layer, used, None)
        return found

    def keep(self, call: LinearCall, weight: torch.Tensor | None, gathers: bool | None = None) -> None:
        """Keep a call that was decided, once its group's ranks have agreed, for later ones with its key."""
        framework, layer = self._framework, call.layer
        if not self._keeps or framework.region_choice.undecided:
            return
        if call.own_matmul is not None or call.enter is not None or not _is_described(call, weight, gathers):
            return
        group, measured = framework.group_of(layer), None
        if framework.unconfirmed(group) is not None or self._any_replaced(layer):
            return
        if self._measures and (measured := measured_key(layer, call.kind, call.x, weight)) is None:
            return
        shared = call.sequence_dim is not None
        known = framework.prepare(
            layer,
            call.kind,
            call.x,
            call.weight,
            group,
            sequence_parallel=shared,
            reduce_input_grad=call.reduce_input_grad,
        )
        if known.original:
            return
        if measured is not None:
            measured = framework.decider.groups[group].way, *measured
        options = dict(vars(layer_of(framework, call, group, known)))
        leaves_rows = options["leaves_rows"]
        del options["group"]  # the table would keep it alive
        options["weight_gradient"] = WeightGradient()
        calls = self._of_groups.setdefault(group, {})
        if len(calls) == MOST_KEPT:
            calls.clear()
        calls[measured, leaves_rows, _key(layer, call.kind, call.x, weight, gathers)] = options


def measured_key(layer: Any, kind: str, x: torch.Tensor, given: torch.Tensor | None) -> tuple[Hashable, ...] | None:
    """Return the plain values of a call that decide what is measured of it; None: the call is not kept.

    That is what the decider distinguishes, and what `equals_original` and `with_options` look at. given: the weight
    that the caller gives a column layer. A weight that is computed at each read is not kept.
    """
    weight = layer._parameters.get("weight") if given is None else given
    if weight is None or torch.compiler.is_compiling():
        return None
    device = x.device
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    sums = (layer.allreduce_dgrad, layer.disable_grad_reduce) if kind == COLUMN else ()
    return (
        kind,
        x.shape,
        x.requires_grad,
        device,
        weight.shape,
        weight.dtype,
        weight.requires_grad,
        torch.is_grad_enabled(),
        autocast,
        layer.sequence_parallel,
        layer.gradient_accumulation_fusion,
        layer.config.deterministic_mode,
        sums,
    )


def _key(
    layer: Any, kind: str, x: torch.Tensor, weight: torch.Tensor | None, gathers: bool | None
) -> tuple[Hashable, ...]:
    """Return the plain values that decide a call."""
    config, parsed, parameters, held, own_type = layer.config, arguments(), layer._parameters, vars(layer), type(layer)
    own = parameters.get("weight")
    used = own if weight is None else weight
    return (
        kind,
        gathers,
        own_type,
        getattr(own_type, "weight", None),  # a class's property, or a plain attribute, goes before a parameter
        getattr(own_type, "bias", None),
        held.get("weight"),
        held.get("bias"),
        "parametrizations" in layer._modules,
        type(x),
        weight is None,
        type(used),
        None if used is None else used.shape,
        getattr(own, "partition_stride", 1),
        type(parameters.get("bias", layer)),  # one that is no parameter is not None
        type(config),
        *map(held.get, OF_LAYERS),
        *map(vars(config).get, OF_CONFIGS),
        *(() if parsed is None else map(vars(parsed).get, CONFLICTS)),
    )


def _is_described(call: LinearCall, weight: torch.Tensor | None, gathers: bool | None) -> bool:
    """Tell whether the key of a call has all that decides it, and no feature that is decided at each call."""
    layer, config, parsed = call.layer, call.layer.config, arguments()
    parameters, features = layer._parameters, ("defer_embedding_wgrad_compute", "_cpu_offloading_context")
    asked = layer.gather_output if gathers is None and call.kind == "column" else gathers
    return (
        type(call.x) in (*_PLAIN, UnfinishedTensor)
        and type(call.weight) in _PLAIN
        and call.weight is (parameters.get("weight") if weight is None else weight)
        and layer.bias is parameters.get("bias", layer)
        and not asked
        and "parametrizations" not in layer._modules
        and _holds(layer, vars(layer), OF_LAYERS)
        and _holds(config, vars(config), OF_CONFIGS)
        and not any(map(vars(config).get, features))
        and (parsed is None or _holds(parsed, vars(parsed), CONFLICTS))
    )


def _holds(holder: Any, held: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Tell whether an object's attributes of these names are its own, and plain: neither its class's nor computed."""
    found = [(getattr(holder, name, None), held.get(name)) for name in names]
    return all(value is own and isinstance(value, Hashable) for value, own in found)
