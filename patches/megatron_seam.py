"""Megatron-core, and what builds on it: patches that are applied and reverted together."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from ascend_parallel.patches import megatron, mindspeed
from ascend_parallel.patches.base import PatchError, PatchSet
from ascend_parallel.patches.megatron.built_classes import BuiltClasses, replaced_classes
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.mindspeed import has_file, layernorm_column
from ascend_parallel.patches.seam import AppliedPatches, Seam, say_once
from ascend_parallel.settings import Settings

# Modules that need Megatron-core's layers -> the patches of their classes, once the module is imported.
MINDSPEED: dict[str, Callable[[Megatron], PatchSet]] = {layernorm_column.MODULE: layernorm_column.patch_set}
ON_TOP = dict(MINDSPEED)


class MegatronPatches(AppliedPatches):
    """Patched layers with the same settings: Megatron-core's, and those of `ON_TOP` whose modules are imported."""

    def __init__(self, settings: Settings) -> None:
        """Import Megatron-core's layers."""
        self.layers: ModuleType = importlib.import_module(megatron.LAYERS)
        self._strict = settings.strict
        self._megatron = megatron.installed(settings)
        super().__init__(
            "megatron-core", megatron.installed_version(), megatron.patch_set(self._megatron), self._megatron
        )

    def apply(self) -> None:
        """Apply all patches, and watch which classes the program builds."""
        self.extend()
        patched = tuple(patch.holder() for patch in self._sets[self.title].patches)
        self._built = BuiltClasses(self.layers, patched, strict=self._strict)

    def extend(self, imported: ModuleType | None = None) -> None:
        """Apply the patches of the modules of `ON_TOP` that have been imported, `imported` just now."""
        for module, patch_set in ON_TOP.items():
            found = sys.modules.get(module)
            # A module that imports Megatron-core itself is still being executed: it is imported later.
            unfinished = getattr(getattr(found, "__spec__", None), "_initializing", False) and found is not imported
            if found is not None and not unfinished and module not in self._sets:
                self._add(module, patch_set(self._megatron))
                if module in MINDSPEED and (note := mindspeed.version_note()):
                    say_once(note)
        super().apply()

    def _add(self, module: str, patches: PatchSet) -> None:
        """Add the patches of a module, or log why they do not fit it; with strict settings raise instead."""
        try:
            patches.check(self.version)
        except PatchError as error:
            if self._strict:
                raise
            say_once(f"{module} is left as it is: {error}")
        else:
            self._sets[module] = patches

    def revert(self) -> None:
        """Restore the original methods; raises `PatchError` if another patch was put on top."""
        super().revert()
        self._built.stop()

    def why_idle(self) -> str:
        """Return the reason why no layer of Megatron-core ran with overlap."""
        if others := replaced_classes(self.layers):
            return others
        why = super().why_idle()
        if all(patch.applied for patch in self.status()) and has_file("transformer_engine"):
            return "TransformerEngine's layers are not covered: use --transformer-impl local"
        return why


MEGATRON = Seam(
    name="megatron",
    title="megatron-core",
    module=megatron.LAYERS,
    make=MegatronPatches,
    on_top=tuple(ON_TOP),
    imported_by_apply=True,
)
