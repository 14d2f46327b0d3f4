"""Switch overlap on and off: put settings in force, and apply or revert the patches.

The layers get their settings when they are patched and never read this module. A change of settings therefore reverts
the patches and applies them with the new settings.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import torch.distributed as dist
import wrapt

from ascend_parallel.diagnostics.timeline.files import require_writable
from ascend_parallel.diagnostics.timeline.session import Variable
from ascend_parallel.diagnostics.verify import LEDGER, Verification
from ascend_parallel.environment import near_misses, read_settings_of_rank, unread_plan
from ascend_parallel.logs import LogLevel
from ascend_parallel.ops import COUNTS, shm_extension
from ascend_parallel.ops.arithmetic import LIBRARY
from ascend_parallel.ops.registry import KERNELS
from ascend_parallel.overlap.choices import overlap_in_words
from ascend_parallel.patches import row_wise
from ascend_parallel.patches.applied import NOTHING, Patches, version_of, wanted
from ascend_parallel.patches.base import PatchError, PatchStatus
from ascend_parallel.patches.framework_patch import FrameworkPatch, is_installed
from ascend_parallel.patches.mindspeed import take_over
from ascend_parallel.patches.tuned import all_kept_whole
from ascend_parallel.process_groups import consistency
from ascend_parallel.settings import KNOWN_VARIABLES, Settings, SettingsError, current_settings, put_in_force
from ascend_parallel.version import __version__
from ascend_parallel_autoload.frameworks import Refusal

log = logging.getLogger("ascend_parallel")

# What the import of a framework raises that lacks a package, or was built for another torch.
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)


@dataclass(frozen=True)
class Status:
    """The settings, patches and counts of this process.

    state
        A sentence: off, waiting for the import of a framework, or applied.
    frameworks
        The state of each framework, by its name in COC_FRAMEWORKS.
    patches
        The status of each patch; empty before a framework is imported.
    kernels
        For each kernel "available" or the reason why it is not.
    counts
        Calls, chunks and collectives by operator so far.
    region
        Whether modules run as regions; what COC_REGION=auto decided, from which figures. Empty without patches.
    notes
        Notes for the user: variables that changed after they were read, misspelt variables.
    """

    version: str
    state: str
    settings: Settings
    frameworks: dict[str, str]
    patches: list[PatchStatus]
    kernels: dict[str, str]
    counts: dict[str, dict[str, int]]
    region: str
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "settings": self.settings.as_dict()}


class PatchControl:
    """Applies and reverts the patches of one process."""

    def __init__(self) -> None:
        """Start switched off."""
        self._patches = Patches()
        self._taken_over: dict[str, Any] = {}  # settings in MindSpeed's arguments
        self._overrides: dict[str, Any] = {}  # the arguments of the last `configure`
        self._variables: dict[str, str] = {}
        self._hooked: set[str] = set()  # the frameworks whose import is waited for
        self._awaits_functions = False  # those of others that work row by row
        self._warns = False
        self._takes_over = False
        self._configured = False
        # The error of the environment's settings; this package's command reports it instead of the import.
        self.refused: SettingsError | None = None
        self._verifies = self._reported = False
        self._timeline = Variable()
        self._log_level = LogLevel()

    def configure(self, environ: Mapping[str, str], **overrides: Any) -> Settings:
        """Read the settings and put them in force; apply the patches at once or when Megatron-core is imported.

        After an error all previous settings stay in force, and ranks that wait for this rank learn of the error.
        """
        self._configured = True
        consistency.begin_configure()
        try:
            settings = read_settings_of_rank(environ, None, overrides)
            if settings.take_over and self._taken_over:
                settings = read_settings_of_rank(environ, self._taken_over, overrides)
            if settings.timeline is not None:
                require_writable(settings.timeline)
            self._put_in_force(settings)
        except Exception as error:
            consistency.refuse(error)
            raise
        self.refused = None
        self._overrides = overrides
        Refusal.withdraw()
        self._variables = {name: environ[name] for name in KNOWN_VARIABLES if name in environ}
        if settings.verify_every and not self._verifies:
            self._verifies = True
            atexit.register(self.log_verification)
        return settings

    def configure_once(self, environ: Mapping[str, str]) -> None:
        """Read the settings of a command, unless they were read; keep their error for the command to report."""
        if self._configured:
            return
        try:
            self.configure(environ)
        except SettingsError as error:
            self.refused = error
        self.refused = self.refused or unread_plan(current_settings())

    def _put_in_force(self, settings: Settings) -> None:
        """Change the log level, the patches and the recording; after an error restore all three."""
        before, patches = current_settings(), self._patches.revert()
        put_in_force(settings)
        try:
            self._log_level.follow(settings.log_level)
            settings.arithmetic.put_in_force()
            if settings.take_over:
                self._take_over_once_imported()
            if settings.enabled:
                self._apply_once_imported()
            self._timeline.follow(settings.timeline, settings.timeline_passes)
        except BaseException:
            self.revert()
            put_in_force(before)
            self._log_level.follow(before.log_level)
            before.arithmetic.put_in_force()
            self._patches.restore(patches)
            self._timeline.follow(before.timeline, before.timeline_passes)
            raise

    def apply(self) -> None:
        """Patch the frameworks that COC_FRAMEWORKS names, or else Megatron-core and all that have been imported.

        A second call does nothing. Raises `SettingsError` if the settings are off, `PatchError` if a framework is
        missing or not as expected.
        """
        settings = current_settings()
        if not settings.enabled:
            raise SettingsError(
                f"nothing to apply: COC_PARALLEL_NUM={settings.num_chunks}, "
                f"USE_COC_FUSED_KERNEL={int(settings.fused)} and COC_MODE={settings.mode} switch overlap off; "
                "export other values, or call configure(num_chunks=4)"
            )
        settings.arithmetic.put_in_force()
        for framework in wanted(settings):
            if settings.frameworks is not None or (framework.imported_by_apply and framework.installed):
                self._patches.apply(framework, settings)
            elif framework.imported:
                self._patches.offer(framework, settings)
        if not self._patches:
            raise PatchError(f"{self._state()}: {NOTHING}")

    def try_apply(self) -> dict[str, str]:
        """Import and patch all installed frameworks; return why patches do not fit, by the framework's title."""
        errors, settings = {}, current_settings()
        with redirect_stdout(sys.stderr):  # where a framework logs as it is imported: vLLM would among a command's JSON
            for framework in wanted(settings):
                try:
                    if framework.installed or settings.frameworks is not None:
                        self._patches.apply(framework, settings)
                except PatchError as error:
                    errors[framework.title] = str(error)
                except BROKEN as error:
                    version, why = version_of(framework), f"{type(error).__name__}: {error}"
                    errors[framework.title] = (
                        f"{framework.title}: found version {version}, which cannot be imported and patched: {why}"
                    )
        return errors

    def revert(self) -> None:
        """Restore the original methods; does nothing if no patch is applied."""
        self._patches.revert()
        LIBRARY.put_in_force()

    def status(self) -> Status:
        """Return the settings, patches and counts of this process."""
        settings, patches = current_settings(), self._patches
        states = patches.states(settings) if settings.enabled else {}
        found = (states, patches.status(), _kernels(), COUNTS.as_dict(), patches.region, self._notes())
        return Status(__version__, self._state(), settings, *found)

    def warn_if_idle(self) -> None:
        """Log on rank 0, at the end of a run with overlap, that no layer ran with it, and the reason."""
        failed = getattr(sys, "last_value", None) is not None
        if not self._patches or COUNTS.as_dict() or failed or os.environ.get("RANK") != "0":
            return
        kept = all_kept_whole(current_settings())
        log.warning("%s", kept or f"overlap was on, but 0 linear layers ran with it: {self._why_idle()}")

    def verification(self) -> Verification:
        """Return the results of the checks in this process; if no call was checked, with a note of the reason."""
        result = LEDGER.summary(current_settings().verify_every)
        if result.layers:
            return result
        why = "verification is off: COC_VERIFY=0" if not result.every else f"nothing was checked: {self._why_idle()}"
        return replace(result, notes=[*result.notes, why])

    def log_verification(self) -> None:
        """Log on rank 0, at the end of a run with verification, its results."""
        if current_settings().verify_every and not self._reported and str(os.environ.get("RANK", LEDGER.rank)) == "0":
            log.warning("%s", self.verification())  # a warning, so that the requested result is visible by default

    def report_verification(self) -> Verification:
        """Return the results for a command that prints them: they are not logged."""
        self._reported = True
        return self.verification()

    def _why_idle(self) -> str:
        """Return the reason why no layer ran with overlap."""
        if not self._patches:
            return self._state()
        return all_kept_whole(current_settings()) or "; ".join(self._patches.why_idle())

    def _apply_once_imported(self) -> None:
        for framework in wanted(current_settings()):
            if framework.imported:
                self._patches.offer(framework, current_settings())
            if framework.name not in self._hooked:
                self._hooked.add(framework.name)
                for module in (framework.module, *framework.before):
                    wrapt.register_post_import_hook(functools.partial(self._imported, framework), module)
                for module in framework.on_top:
                    wrapt.register_post_import_hook(self._patches.extend, module)
        if current_settings().region and not self._awaits_functions:
            self._awaits_functions = True
            for module in row_wise.MODULES:
                wrapt.register_post_import_hook(self._patches.extend, module)
        if not self._warns:
            self._warns = True
            atexit.register(self.warn_if_idle)

    def _take_over_once_imported(self) -> None:
        take_over.refuse_late()
        if not self._takes_over:
            self._takes_over = True
            for module in take_over.MODULES:
                wrapt.register_post_import_hook(self._take_over_from, module)

    def _take_over_from(self, module: ModuleType) -> None:
        take_over.patch_set(module.__name__, self._take).apply("")

    def _take(self, arguments: dict[str, Any]) -> bool:
        """Take the place of MindSpeed's CoC with its arguments; called when MindSpeed is about to put it in."""
        if not current_settings().take_over:
            return False
        self._taken_over = arguments
        settings = self.configure(os.environ, **self._overrides)
        if os.environ.get("RANK", "0") == "0":
            log.warning("in place of MindSpeed's CoC, with its arguments: %s", overlap_in_words(settings))
        return True

    def _imported(self, framework: FrameworkPatch, module: ModuleType) -> None:
        settings = current_settings()
        known = module.__name__ == framework.module or framework.module not in sys.modules
        if settings.enabled and known and framework in wanted(settings):
            try:
                self._patches.offer(framework, settings)
            except PatchError as error:
                Refusal(error, framework.module).install()
                raise

    def _state(self) -> str:
        if not current_settings().enabled:
            return "off: every framework's layers are untouched"
        return self._patches.summary(current_settings())

    def _notes(self) -> list[str]:
        notes = [f"{name} is set, which nothing reads; {meant} is" for name, meant in near_misses(os.environ).items()]
        for name in KNOWN_VARIABLES:
            read, now = self._variables.get(name), os.environ.get(name)
            if read != now:
                notes.append(f"{name} was {read} when it was read and is {now} now; call configure() to read it again")
        if current_settings().enabled and not dist.is_initialized():
            notes.append("torch.distributed is not initialised in this process")
        return notes


def _kernels() -> dict[str, str]:
    states = dict.fromkeys(KERNELS, "available")
    if not is_installed("torch_npu"):
        states["npu"] = "torch_npu is not installed"
    if isinstance(missing := shm_extension.extension(), str):
        states["shm"] = missing
    return states


CONTROL = PatchControl()


def configure(**settings: Any) -> Settings:
    """Read the environment, override it by `settings` (fields of `Settings`), and put the result in force.

    All ranks must call this alike and between steps, not between a forward and its backward. Raises `SettingsError`
    for a value that is not allowed, `PatchError`, or `OSError` if a recording that ends cannot be written. After an
    error all previous settings stay in force, and ranks that wait for this rank raise `DisagreementError`.
    """
    return CONTROL.configure(os.environ, **settings)


def apply() -> None:
    """Import Megatron-core and patch it; a second call does nothing.

    Raises `SettingsError` if overlap is off, `PatchError` if Megatron-core is not as expected.
    """
    CONTROL.apply()


def revert() -> None:
    """Restore Megatron-core's own methods; raises `PatchError` if another patch was put on top."""
    CONTROL.revert()


def status() -> Status:
    """Return this process's settings, patches, counts, and notes for the user."""
    return CONTROL.status()


def verification() -> Verification:
    """Return the results of COC_VERIFY's checks in this process so far: the largest errors of each layer."""
    return CONTROL.verification()


def register_symm_mem() -> tuple[str, ...]:
    """Run torch's async tensor-parallel operators (``torch.ops.symm_mem``) on CPUs and NPUs by this package's.

    Registers kernels of ``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter`` where torch has none, and lets
    torch.compile's micro-pipeline pass use them. Returns the operators with their dispatch keys; a second call changes
    nothing. Call it on every rank before torch.compile runs. See docs/symm_mem.md.
    """
    # Imports torch's private library of these operators, which no other program needs.
    from ascend_parallel.patches.symm_mem.registration import REGISTRATION

    return REGISTRATION.register()


def unregister_symm_mem() -> None:
    """Take back what `register_symm_mem` did; raises `PatchError` if another patch was put on top.

    Programs that were compiled with the kernels have to be compiled again (``torch._dynamo.reset()``).
    """
    from ascend_parallel.patches.symm_mem.registration import REGISTRATION

    REGISTRATION.unregister()
