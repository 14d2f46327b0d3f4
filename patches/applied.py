"""The patches of this process: each framework's are applied, reported and left alone by themselves."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from types import ModuleType

from ascend_parallel.diagnostics.installed import installed_build
from ascend_parallel.patches.base import PatchError, PatchStatus
from ascend_parallel.patches.deepspeed import DEEPSPEED
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch, OnTop, say_once
from ascend_parallel.patches.megatron import context as megatron_context
from ascend_parallel.patches.megatron import embedding as megatron_embedding
from ascend_parallel.patches.megatron import every_degree as megatron_every_degree
from ascend_parallel.patches.megatron import experts as megatron_experts
from ascend_parallel.patches.megatron import framework_patch as megatron_core
from ascend_parallel.patches.mindspeed import context as mindspeed_context
from ascend_parallel.patches.mindspeed import experts as mindspeed_experts
from ascend_parallel.patches.mindspeed import layernorm_column
from ascend_parallel.patches.row_wise import RowWiseFunctions
from ascend_parallel.patches.symm_mem.framework_patch import SYMM_MEM
from ascend_parallel.patches.torch_native import TORCH
from ascend_parallel.patches.transformers import TRANSFORMERS
from ascend_parallel.patches.vllm import VLLM
from ascend_parallel.settings import Settings

log = logging.getLogger("ascend_parallel")

EVERY_DEGREE = [OnTop(module, make) for module, make in megatron_every_degree.patch_sets().items()]
MEGATRON = megatron_core.framework_patch(
    *megatron_embedding.ON_TOP,
    *megatron_experts.ON_TOP,
    megatron_context.ON_TOP,
    layernorm_column.ON_TOP,
    mindspeed_context.ON_TOP,
    mindspeed_experts.ON_TOP,
    *EVERY_DEGREE,
)
FRAMEWORK_PATCHES = (MEGATRON, TRANSFORMERS, TORCH, DEEPSPEED, SYMM_MEM, VLLM)
NOTHING = "the variables have nothing to overlap (column_linear, row_linear and the operators read none)"


def version_of(framework: FrameworkPatch) -> str:
    """Return the version of an installed framework."""
    build = installed_build(framework.title)
    return "unknown" if build is None else build[1]


def wanted(settings: Settings) -> list[FrameworkPatch]:
    """Return the frameworks that COC_FRAMEWORKS names; without it, all that need not be named."""
    named = settings.frameworks
    return [
        framework
        for framework in FRAMEWORK_PATCHES
        if (not framework.opt_in if named is None else framework.name in named)
    ]


class Patches:
    """The applied patches by framework, and why other frameworks are left as they are."""

    def __init__(self) -> None:
        """Nothing is applied."""
        self._applied: dict[str, AppliedPatches] = {}
        self._left: dict[str, str] = {}
        self._row_wise, self._leaves_rows = RowWiseFunctions(), False

    def __bool__(self) -> bool:
        """Tell whether any patch is applied."""
        return bool(self._applied)

    def apply(self, framework: FrameworkPatch, settings: Settings) -> None:
        """Import a framework and patch it; a second call does nothing. Raises `PatchError` if it is not as expected."""
        if framework.name in self._applied:
            return
        if not framework.installed:
            raise PatchError(f"{framework.title}: found none installed: {NOTHING}")
        try:
            importlib.import_module(framework.module)  # the import hook may apply the patches
        except ModuleNotFoundError as error:
            if not f"{framework.module}.".startswith(f"{error.name}."):  # it lacks a package that it needs
                raise
            version = version_of(framework)
            raise PatchError(f"{framework.title}: found version {version}, which has no {framework.module}") from error
        if framework.name not in self._applied:
            applied = framework.make(settings)
            applied.apply()
            self._applied[framework.name] = applied
            if settings.region:
                self._leaves_rows = True
                self._row_wise.extend()
            if os.environ.get("RANK", "0") == "0":
                log.info("%s", applied.state())

    def offer(self, framework: FrameworkPatch, settings: Settings) -> None:
        """Patch a framework that has been imported, or leave it as it is and log the reason once on rank 0.

        The reason is an error with COC_STRICT=1 or COC_DETERMINISTIC=tp, or if COC_FRAMEWORKS names the framework.
        """
        try:
            self.apply(framework, settings)
        except PatchError as error:
            if settings.insists or settings.frameworks is not None:
                raise
            self._left[framework.name] = str(error)
            say_once(f"left as it is: {error}")

    def extend(self, imported: ModuleType) -> None:
        """Apply patches of a module that frameworks have on top of their layers, and of functions by rows."""
        if self._leaves_rows:
            self._row_wise.extend()
        for name, applied in self._applied.items():
            if imported.__name__ in next(framework.on_top for framework in FRAMEWORK_PATCHES if framework.name == name):
                applied.extend(imported)

    def revert(self) -> dict[str, AppliedPatches]:
        """Restore all original methods, or none: raises `PatchError` if another patch was put on top of one.

        Returns what was applied, for `restore`.
        """
        for applied in self._applied.values():
            applied.refuse_if_covered()
        self._row_wise.refuse_if_covered()
        self._row_wise.revert()
        reverted = self._applied
        for applied in reverted.values():
            applied.revert()
        self._applied, self._left, self._leaves_rows = {}, {}, False
        return reverted

    def restore(self, reverted: dict[str, AppliedPatches]) -> None:
        """Apply again what `revert` has returned."""
        for applied in reverted.values():
            applied.apply()
        self._applied = reverted
        self._leaves_rows = any(applied.leaves_rows for applied in reverted.values())
        if self._leaves_rows:
            self._row_wise.extend()

    @property
    def region(self) -> str:
        """Whether layers leave their rows unfinished, and the figures behind it; empty before the first call."""
        return "; ".join(dict.fromkeys(filter(None, (applied.region for applied in self._applied.values()))))

    def status(self) -> list[PatchStatus]:
        """Return the status of each patch."""
        applied = [status for applied in self._applied.values() for status in applied.status()]
        return [*applied, *self._row_wise.status()]

    def states(self, settings: Settings) -> dict[str, str]:
        """Return the state of each wanted framework, in words, by its name in COC_FRAMEWORKS."""
        return {framework.name: self._state(framework) for framework in wanted(settings)}

    def _state(self, framework: FrameworkPatch) -> str:
        if framework.name in self._applied:
            return self._applied[framework.name].state()
        if framework.name in self._left:
            return f"left as it is: {self._left[framework.name]}"
        if framework.imported:
            return f"not applied: {framework.title}'s layers are untouched"
        what = framework.module.rpartition(".")[0] if framework.of_torch else framework.title
        return f"waiting for the import of {what}{'' if framework.installed else ', which is not installed'}"

    def summary(self, settings: Settings) -> str:
        """Return the states in a sentence: the patched frameworks', or else the others'."""
        states = self.states(settings)
        told = [name for name in states if name in self._applied or name in self._left]
        told = told or [
            framework.name for framework in wanted(settings) if framework.imported or framework.imported_by_apply
        ]
        return "; ".join(states[name] for name in told or states)

    def why_idle(self) -> Iterator[str]:
        """Yield the reason of each patched framework why none of its layers ran with overlap."""
        yield from (applied.why_idle() for applied in self._applied.values())
        yield from (f"left as it is: {reason}" for reason in self._left.values())
