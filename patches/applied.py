"""The patches of this process, of Megatron-core and of what builds on it: applied and reverted together."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

from ascend_parallel.patches import megatron, mindspeed
from ascend_parallel.patches.base import PatchError, PatchSet, PatchStatus
from ascend_parallel.patches.megatron.built_classes import BuiltClasses
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.region_checks import LAYER
from ascend_parallel.patches.megatron.region_patches import region_patch_set
from ascend_parallel.patches.mindspeed import layernorm_column
from ascend_parallel.settings import Settings

log = logging.getLogger("ascend_parallel")

# Modules that need Megatron-core's layers -> the patches of their classes, once the module is imported.
MINDSPEED: dict[str, Callable[[Megatron], PatchSet]] = {layernorm_column.MODULE: layernorm_column.patch_set}
ON_TOP = {LAYER: region_patch_set} | MINDSPEED


class AppliedPatches:
    """Patched layers with the same settings: Megatron-core's, and those of `ON_TOP` whose modules are imported."""

    def __init__(self, settings: Settings) -> None:
        """Import Megatron-core's layers, check them and patch them; raises `PatchError` if they are not as expected."""
        self.layers: ModuleType = importlib.import_module(megatron.LAYERS)
        self._strict = settings.strict
        self._megatron = megatron.installed(settings)
        self._sets = {megatron.LAYERS: megatron.patch_set(self._megatron)}
        self.apply()

    def apply(self) -> None:
        """Apply all patches, and watch which classes the program builds."""
        self.extend()
        patched = tuple(patch.holder() for patch in self._sets[megatron.LAYERS].patches)
        self._built = BuiltClasses(self.layers, patched, strict=self._strict)

    def extend(self, imported: ModuleType | None = None) -> None:
        """Apply the patches of the modules of `ON_TOP` that have been imported, `imported` just now."""
        for module, patch_set in ON_TOP.items():
            found = sys.modules.get(module)
            # A module that imports Megatron-core itself is still being executed: it is imported later.
            unfinished = getattr(getattr(found, "__spec__", None), "_initializing", False) and found is not imported
            if found is not None and not unfinished and module not in self._sets:
                self._add(module, patch_set(self._megatron))
                if module in MINDSPEED:
                    _log_once(mindspeed.version_note())
        for patches in self._sets.values():
            patches.apply(megatron.installed_version())

    def _add(self, module: str, patches: PatchSet) -> None:
        """Add the patches of a module, or log why they do not fit it; with strict settings raise instead."""
        try:
            patches.check(megatron.installed_version())
        except PatchError as error:
            if self._strict:
                raise
            _log_once(f"{module} is left as it is: {error}")
        else:
            self._sets[module] = patches

    def revert(self) -> None:
        """Restore the original methods; raises `PatchError` if another patch was put on top."""
        for patches in self._sets.values():
            patches.refuse_if_covered()
        for patches in self._sets.values():
            patches.revert()
        self._built.stop()

    @property
    def region(self) -> str:
        """Whether modules run as regions, and the figures behind it; empty before transformer layers are patched."""
        return str(self._megatron.region_choice) if LAYER in self._sets else ""

    def status(self) -> list[PatchStatus]:
        """Return the status of each patch."""
        return [status for patches in self._sets.values() for status in patches.status()]


@functools.cache
def _log_once(text: str | None) -> None:
    """Log a text on rank 0, once; nothing for None. The groups need not exist yet."""
    if text is not None and os.environ.get("RANK", "0") == "0":
        log.warning("%s", text)
