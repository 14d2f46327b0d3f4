"""A framework as this package knows it: the module to wait for, and the patches of its layers."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from ascend_parallel.overlap.choices import NO_LAYER
from ascend_parallel.patches.base import PatchError, PatchSet, PatchStatus
from ascend_parallel.patches.framework import Framework
from ascend_parallel.settings import Settings
from ascend_parallel_autoload.frameworks import FrameworkFacts

log = logging.getLogger("ascend_parallel")


@dataclass(frozen=True)
class OnTop:
    """A module that builds on a framework's layers, whose classes are patched once it is imported.

    patch_set
        Returns its patches, from the framework as it runs its layers.
    note
        Returns what is said when that happens, or None.
    """

    module: str
    patch_set: Callable[[Any], PatchSet]
    note: Callable[[], str | None] = lambda: None


class AppliedPatches:
    """The patches of a framework with the same settings, applied and reverted together."""

    def __init__(
        self,
        title: str,
        version: str,
        patches: PatchSet,
        framework: Framework | None = None,
        others: Mapping[str, PatchSet] | None = None,
        on_top: Sequence[OnTop] = (),
    ) -> None:
        """Hold patches of the framework `title` of `version`; `apply` applies them. `framework` runs its layers.

        others: patches of what builds on these layers, by name.
        on_top: those that are applied once their module is imported.
        """
        self.title, self.version = title, version
        self._runs, self._on_top = framework, on_top
        self._sets = {title: patches, **(others or {})}

    def apply(self) -> None:
        """Check all targets, then replace them; raises `PatchError` if the framework is not as expected."""
        self.extend()

    def extend(self, imported: ModuleType | None = None) -> None:
        """Apply all patches whose modules have been imported, also those of `on_top`; `imported` just now."""
        for number, other in enumerate(self._on_top):
            name = f"{number} {other.module}"  # several may wait for one module
            found = sys.modules.get(other.module)
            # A module that imports the framework's layers itself is still being executed: it is imported later.
            unfinished = getattr(getattr(found, "__spec__", None), "_initializing", False) and found is not imported
            if found is not None and not unfinished and name not in self._sets:
                self._add(name, other)
        for patches in self._sets.values():
            patches.apply(self.version)
        if self._runs is not None:
            self._runs.put_in_force()

    def _add(self, name: str, other: OnTop) -> None:
        """Add the patches of a module, or log why they do not fit it; with strict settings raise instead."""
        assert self._runs is not None
        patches = other.patch_set(self._runs)
        try:
            patches.check(self.version)
        except PatchError as error:
            if self._runs.settings.insists:
                raise
            say_once(f"{other.module} is left as it is: {error}")
        else:
            self._sets[name] = patches
        if note := other.note():
            say_once(note)

    def refuse_if_covered(self) -> None:
        """Raise `PatchError` if another patch was put on top of one of these."""
        for patches in self._sets.values():
            patches.refuse_if_covered()

    def revert(self) -> None:
        """Restore the original methods; raises `PatchError` if another patch was put on top."""
        self.refuse_if_covered()
        for patches in self._sets.values():
            patches.revert()
        if self._runs is not None:
            self._runs.put_out_of_force()

    def status(self) -> list[PatchStatus]:
        """Return the status of each patch."""
        return [status for patches in self._sets.values() for status in patches.status()]

    def state(self) -> str:
        """Return in words how many methods are replaced."""
        own = [patch.applied for patch in self._sets[self.title].status()]
        others = [patch.applied for patch in self.status()[len(own) :]]
        text = f"{sum(own)} of {len(own)} methods of {self.title} {self.version} replaced"
        text += f", and {sum(others)} of {len(others)} others" if others else ""
        why = None if self._runs is None else self._runs.uncovered_everywhere()
        return text if why is None else f"{text}, {NO_LAYER}: {why}"

    @property
    def region(self) -> str:
        """Whether layers leave their rows unfinished, and the figures behind it; empty before the first call."""
        return str(self._runs.region_choice) if self._runs is not None and self._runs.used else ""

    @property
    def leaves_rows(self) -> bool:
        """Whether layers may leave their rows unfinished in a training."""
        return self._runs is not None and bool(self._runs.settings.region)

    def why_idle(self) -> str:
        """Return the reason why no layer of the framework ran with overlap."""
        replaced = [patch for patch in self.status() if not patch.applied]
        if replaced:
            return "; ".join(f"{patch.target} was {patch.reason}" for patch in replaced)
        return f"no layer of {self.title} with a tensor-parallel group of several ranks was called"


@dataclass(frozen=True, kw_only=True)
class FrameworkPatch(FrameworkFacts):
    """A framework, and the patches of its layers.

    make
        Returns the patches, not yet applied; the module has been imported.
    on_top
        Further modules whose import is waited for once the patches are applied.
    """

    make: Callable[[Settings], AppliedPatches]
    on_top: Sequence[str] = ()

    @classmethod
    def of(
        cls, facts: FrameworkFacts, make: Callable[[Settings], AppliedPatches], on_top: Sequence[str] = ()
    ) -> FrameworkPatch:
        """Return the patch of a framework of the table."""
        return cls(**{field.name: getattr(facts, field.name) for field in fields(facts)}, make=make, on_top=on_top)

    @property
    def imported(self) -> bool:
        """Whether the module has been imported."""
        module: Any = sys.modules.get(self.module)
        return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)

    @property
    def installed(self) -> bool:
        """Whether the framework can be imported."""
        return self.module in sys.modules or is_installed(self.package)


@functools.cache
def say_once(text: str) -> None:
    """Log a text on rank 0, once. The groups need not exist yet."""
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", text)


def is_installed(name: str) -> bool:
    """Tell whether a module can be found, without importing it; its parents are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or the module was made by hand
        return False
