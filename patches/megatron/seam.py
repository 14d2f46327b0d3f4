"""Megatron-core, and what builds on it: patches that are applied and reverted together."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ascend_parallel.patches import megatron
from ascend_parallel.patches.base import PatchError, PatchSet
from ascend_parallel.patches.megatron.built_classes import BuiltClasses, replaced_classes
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.seam import AppliedPatches, Seam, say_once
from ascend_parallel.settings import Settings


@dataclass(frozen=True)
class OnTop:
    """A module that needs Megatron-core's layers, whose classes are patched once it is imported.

    note
        Returns what is said when that happens, or None.
    """

    module: str
    patch_set: Callable[[Megatron], PatchSet]
    note: Callable[[], str | None] = lambda: None


class MegatronPatches(AppliedPatches):
    """Patched layers with the same settings: Megatron-core's, and those of `on_top` whose modules are imported."""

    def __init__(self, settings: Settings, on_top: Sequence[OnTop]) -> None:
        """Import Megatron-core's layers."""
        self._on_top = on_top
        self.layers: ModuleType = importlib.import_module(megatron.LAYERS)
        self._insists = settings.insists
        self._megatron = megatron.installed(settings)
        super().__init__(
            "megatron-core", megatron.installed_version(), megatron.patch_set(self._megatron), self._megatron
        )

    def apply(self) -> None:
        """Apply all patches, and watch which classes the program builds."""
        self.extend()
        patched = tuple(patch.holder() for patch in self._sets[self.title].patches)
        self._built = BuiltClasses(self.layers, patched, self._insists)

    def extend(self, imported: ModuleType | None = None) -> None:
        """Apply the patches of the modules of `on_top` that have been imported, `imported` just now."""
        for number, other in enumerate(self._on_top):
            name = f"{number} {other.module}"  # several may wait for one module
            found = sys.modules.get(other.module)
            # A module that imports Megatron-core itself is still being executed: it is imported later.
            unfinished = getattr(getattr(found, "__spec__", None), "_initializing", False)
            unfinished = unfinished and found not in (imported, self.layers)
            if found is not None and not unfinished and name not in self._sets:
                self._add(name, other.module, other.patch_set(self._megatron))
                if note := other.note():
                    say_once(note)
        super().apply()

    def _add(self, name: str, module: str, patches: PatchSet) -> None:
        """Add the patches of a module, or log why they do not fit it; with strict settings raise instead."""
        try:
            patches.check(self.version)
        except PatchError as error:
            if self._insists:
                raise
            say_once(f"{module} is left as it is: {error}")
        else:
            self._sets[name] = patches

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


def seam(*others: OnTop) -> Seam:
    """Return Megatron-core as a framework, with the patches of `others`."""
    return Seam(
        name="megatron",
        title="megatron-core",
        module=megatron.LAYERS,
        make=lambda settings: MegatronPatches(settings, others),
        on_top=tuple(other.module for other in others),
        imported_by_apply=True,
    )


def _has_file(name: str) -> bool:
    """Tell whether an imported module has a file; MindSpeed's dummy modules name one that does not exist."""
    return Path(getattr(sys.modules.get(name), "__file__", None) or "").is_file()
