"""Notice, at the first call of a tensor-parallel layer, that the program builds other classes than the patched ones.

MindSpeed's flags give the names ColumnParallelLinear and RowParallelLinear to its own subclasses, with their own
forward. Nothing fails then, and no patched forward is ever called.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from ascend_parallel.ops import UnmetRequestError
from ascend_parallel.ops.arithmetic import EVERY_DEGREE, INVARIANT
from ascend_parallel.patches.base import full_name
from ascend_parallel.patches.compiled import between_graphs
from ascend_parallel.patches.megatron.uncovered import TE_EXTENSION

log = logging.getLogger("ascend_parallel")

NAMES = ("ColumnParallelLinear", "RowParallelLinear")

# Package of a class -> the flag of MindSpeed that puts the class in place of Megatron-core's.
FLAGS = {
    "mindspeed.core.tensor_parallel.coc_feature": "--use-ascend-coc",
    "mindspeed.core.tensor_parallel.mc2_feature": "--use-ascend-mc2",
    "mindspeed.core.tensor_parallel.unaligned_layers": "--unaligned-linear",
}
PACKAGES = tuple(FLAGS)
COC = "--use-ascend-coc"

# The same for the class MoELayer of this module, by the class.
MOE_LAYERS = "megatron.core.transformer.moe.moe_layer"
MOE_FLAGS = {
    "MindSpeedAlltoAllOverlapMoeLayerAdaptor": "--moe-alltoall-overlap-comm",
    "MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor": "--moe-alltoall-overlap-comm",
    "MindSpeedAllGatherOverlapMoeLayerAdaptor": "--moe-allgather-overlap-comm",
    "MindSpeedAlltoAllSEQTptoEpMoELayer": "--moe-tp-extend-ep",
    "MindSpeedAlltoAllMC2MoeLayerAdaptor": "--moe-alltoall-mc2",
}


class BuiltClasses:
    """Looks at the modules that are called: until the first with tensor-parallel layers, or at all layers."""

    def __init__(self, layers: ModuleType, patched: tuple[type, ...], insists: str) -> None:
        """Watch for instances of `patched`, the patched classes of `layers`.

        insists
            As of the settings: looks at all layers, and raises instead of logging. The tree excludes
            TransformerEngine's linear layers too.
        """
        self._layers = layers
        self._patched = patched
        self._insists = insists
        self._seen: WeakSet[Any] = WeakSet()
        # A hook that goes away while a model is compiled would have it compiled once more: outside of graphs alone.
        hook = between_graphs(self._look, lambda *_: None, always=lambda _: True)
        self._hook = register_module_forward_pre_hook(hook)

    def stop(self) -> None:
        """Look no further."""
        self._hook.remove()

    def _has_layers(self, module: Any) -> bool:
        """Tell whether a module has one of the layers, when it is called for the first time."""
        if module in self._seen:
            return False
        self._seen.add(module)
        return any(isinstance(each, self._patched) for each in module.modules())

    def _look(self, module: Any, _: Any) -> None:
        if not isinstance(module, self._patched):
            if (
                self._insists in (EVERY_DEGREE.asked, INVARIANT.asked)
                and type(module).__module__ == TE_EXTENSION
                and "Linear" in type(module).__name__
            ):
                raise UnmetRequestError(
                    f"{self._insists}: TransformerEngine's {type(module).__name__} is not covered: use "
                    "--transformer-impl local"
                )
            if self._insists or not self._has_layers(module):
                return
        if not self._insists:
            self.stop()
        elif hasattr(getattr(type(module), "forward", None), "ascend_parallel"):
            return
        for text in filter(None, (replaced_classes(self._layers), replaced_experts())):
            if self._insists:
                raise UnmetRequestError(f"{self._insists}: {text}")
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("%s", text)


def replaced_classes(layers: ModuleType) -> str | None:
    """Return which classes stand under the names of Megatron-core's layers instead, and the flag; None: its own."""
    built = [(name, getattr(layers, name, None)) for name in NAMES]
    others = [kind for name, kind in built if full_name(kind) != f"{layers.__name__}.{name}"]
    others = [kind for kind in others if not hasattr(getattr(kind, "forward", None), "ascend_parallel")]
    if not others:
        return None
    texts = " and ".join(full_name(kind) for kind in others)
    flag = flag_of(others[0])
    if flag is None:
        return f"overlap covers no layer of {texts}: another package put them in place of Megatron-core's layers"
    advice = f"drop {flag}" + (", or export COC_TAKE_OVER=1 to run this package in its place" if flag == COC else "")
    return f"{flag} put {texts} in place of Megatron-core's layers, and overlap covers none of them: {advice}"


def replaced_experts() -> str | None:
    """Return which class stands under the name of Megatron-core's MoELayer instead, and the flag; None: its own."""
    kind = getattr(sys.modules.get(MOE_LAYERS), "MoELayer", None)
    if kind is None or full_name(kind) == f"{MOE_LAYERS}.MoELayer":
        return None
    flag = MOE_FLAGS.get(kind.__name__)
    if flag is None:
        return f"overlap covers no experts of {full_name(kind)}: another package put it in place of MoELayer"
    return f"{flag} put {full_name(kind)} in place of Megatron-core's MoELayer, and overlap covers none: drop {flag}"


def flag_of(kind: object) -> str | None:
    """Return the flag of MindSpeed that puts a class in place of Megatron-core's, or None."""
    module = str(getattr(kind, "__module__", ""))
    if not module.startswith(PACKAGES):
        return None
    return next(flag for package, flag in FLAGS.items() if module.startswith(package))
