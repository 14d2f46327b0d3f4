"""Attention's output projection under the exchange of heads: the row layer that reads a core attention's output.

A core attention does not know the module that it is a part of; torch tells when that module takes it. At a
tensor-parallel size of 1 the row layer ``linear_proj`` communicates nothing. The core attention multiplies its weight
while the last heads come back, and the layer's forward (layers.py) takes the product if it gets just that output. The
weight gradient goes where the layer sends it (wgrad.py). How heads come back depends on the configuration alone; which
layer is found, and whether this rank multiplies under the exchange, changes no collective.

Written against megatron-core 0.13 to 0.19, transformer/attention.py.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_module_registration_hook

from ascend_parallel.overlap.projected import Projection
from ascend_parallel.patches.attention_projection import ProjectionsByUse, is_plain
from ascend_parallel.patches.base import full_name, written_in
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.uncovered import uncovered_layer

MODULE = "megatron.core.transformer.attention"
CORE = "megatron.core.transformer.dot_product_attention"
LAYER = "linear_proj"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks")

# Where a core attention notes that its heads come back in rows: it is a part of Megatron-core's attention.
BY_ROWS = "_ascend_parallel_by_rows"

# The modules that core attentions are parts of, since this process built them.
_PARENTS: WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = WeakKeyDictionary()


@functools.cache
def watch_parents() -> None:
    """Have torch tell, from now on, which module takes a core attention as a part."""
    register_module_module_registration_hook(_note_parent)


def _note_parent(parent: torch.nn.Module, _: str, part: Any) -> None:
    if not hasattr(part, "exchange_of_context") or part.config.tensor_model_parallel_size != 1:
        return
    if isinstance(parent, importlib.import_module(MODULE).Attention):
        _PARENTS[part] = weakref.ref(parent)
        vars(part)[BY_ROWS] = True


class OutputProjections:
    """The row layers that read core attentions' outputs, as they run with the settings of a framework."""

    def __init__(self, megatron: Megatron) -> None:
        """Know no layer."""
        self._megatron = megatron
        self._by_use = ProjectionsByUse()

    def of(self, core: Any, query: torch.Tensor, width: int) -> tuple[Any, Projection] | None:
        """Return the layer that reads the output of a core attention, and its product; None: it multiplies itself.

        query: [s, B, N, D]. width: the features of a head of the output.
        """
        parent = _PARENTS.get(core, lambda: None)()
        if parent is None or (layer := getattr(parent, LAYER, None)) is None:
            return None
        if (reason := self._changed_here(core, layer)) is not None:
            self._megatron.note_here(_behind(parent, reason))
            return None
        if (reason := self._uncovered(parent, layer, query, width)) is not None:
            self._megatron.note(_behind(parent, reason))
            return None
        weight = layer._parameters["weight"]
        to = functools.partial(self._megatron.weight_gradient, layer, weight)
        always = self._megatron.settings.fused
        projection = self._by_use.of(core, weight, None, always=always, weight_gradient=to)
        return None if projection is None else (layer, projection)

    def _changed_here(self, core: Any, layer: Any) -> str | None:
        """Return what a program has, on this rank at least, around an attention or the layer behind it."""
        for name, module, own in (
            (LAYER, layer, self._megatron.layers.RowParallelLinear),
            ("core_attention", core, importlib.import_module(CORE).DotProductAttention),
        ):
            if type(module) is not own or "forward" in vars(module):
                return f"{name} is a {full_name(type(module))} with a forward of its own"
            if any(not _is_ours(hook) for hooks in HOOKS for hook in getattr(module, hooks).values()):
                return f"{name} has hooks"
        if any(not _is_ours(hook) for name in GLOBAL_HOOKS for hook in getattr(torch_module, name).values()):
            return "all modules have hooks"
        return self._megatron.replaced(layer)

    def _uncovered(self, parent: Any, layer: Any, query: torch.Tensor, width: int) -> str | None:
        """Return why a layer multiplies behind the exchange, as Megatron-core does, on all ranks alike."""
        if parent.checkpoint_core_attention and parent.training:
            return "core_attn is recomputed alone (recompute_modules)"
        weight = layer._parameters.get("weight")
        if not is_plain(weight, query) or weight.shape[1] != query.shape[2] * width:
            return f"{LAYER} has a weight of another kind than its input"
        if torch.is_autocast_enabled(query.device.type):
            return "autocast is on"
        if hasattr(weight, "__fsdp_param__"):
            return "Megatron-FSDP shards its weight"
        return uncovered_layer(layer, self._megatron.version)


def _behind(parent: Any, reason: str) -> str:
    ranks = parent.config.context_parallel_size
    name = type(parent).__name__
    return f"context_parallel_size={ranks}: {name}: {reason}: it is projected behind the exchange, not under it"


def _is_ours(hook: Any) -> bool:
    return written_in(hook).partition(".")[0] == "ascend_parallel"
