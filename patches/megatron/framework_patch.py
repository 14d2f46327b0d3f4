"""Megatron-core, and what builds on it: patches that are applied and reverted together."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ascend_parallel.patches import megatron
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch, OnTop
from ascend_parallel.patches.megatron.built_classes import BuiltClasses, replaced_classes
from ascend_parallel.settings import Settings
from ascend_parallel_autoload.frameworks import MEGATRON


class MegatronPatches(AppliedPatches):
    """Patched layers with the same settings: Megatron-core's, and those of `on_top` whose modules are imported."""

    def __init__(self, settings: Settings, on_top: Sequence[OnTop]) -> None:
        """Import Megatron-core's layers."""
        self.layers: ModuleType = importlib.import_module(megatron.LAYERS)
        self._insists = settings.insists
        framework, version = megatron.installed(settings), megatron.installed_version()
        super().__init__("megatron-core", version, megatron.patch_set(framework), framework, on_top=on_top)

    def apply(self) -> None:
        """Apply all patches, and watch which classes the program builds."""
        self.extend(self.layers)
        patched = tuple(patch.holder() for patch in self._sets[self.title].patches)
        self._built = BuiltClasses(self.layers, patched, self._insists)

    def revert(self) -> None:
        """Restore the original methods; raises `PatchError` if another patch was put on top."""
        super().revert()
        self._built.stop()

    def why_idle(self) -> str:
        """Return the reason why no layer of Megatron-core ran with overlap."""
        if others := replaced_classes(self.layers):
            return others
        why = super().why_idle()
        if all(patch.applied for patch in self.status()) and _has_file("transformer_engine"):
            return "TransformerEngine's layers are not covered: use --transformer-impl local"
        return why


def framework_patch(*others: OnTop) -> FrameworkPatch:
    """Return Megatron-core as a framework, with the patches of `others`."""
    modules = tuple(other.module for other in others)
    return FrameworkPatch.of(MEGATRON, lambda settings: MegatronPatches(settings, others), on_top=modules)


def _has_file(name: str) -> bool:
    """Tell whether an imported module has a file; MindSpeed's dummy modules name one that does not exist."""
    return Path(getattr(sys.modules.get(name), "__file__", None) or "").is_file()
