"""Switch overlap on and off: put settings in force, and apply or revert the patches.

The layers get their settings when they are patched and never read this module. A change of settings therefore reverts
the patches and applies them with the new settings.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import torch.distributed as dist
import wrapt

from ascend_parallel import consistency
from ascend_parallel.current import current_settings, put_in_force
from ascend_parallel.diagnostics.timeline.files import require_writable
from ascend_parallel.diagnostics.timeline.session import Variable
from ascend_parallel.diagnostics.verify import LEDGER, Verification
from ascend_parallel.environment import near_misses, read_settings
from ascend_parallel.logs import LogLevel
from ascend_parallel.ops import COUNTS, shm
from ascend_parallel.overlap.choices import overlap_in_words
from ascend_parallel.patches import megatron
from ascend_parallel.patches.applied import ON_TOP, AppliedPatches
from ascend_parallel.patches.base import PatchError, PatchStatus
from ascend_parallel.patches.megatron.built_classes import replaced_classes
from ascend_parallel.patches.mindspeed import has_file, take_over
from ascend_parallel.settings import KNOWN_VARIABLES, Settings, SettingsError
from ascend_parallel.version import __version__
from ascend_parallel_autoload import Refusal

log = logging.getLogger("ascend_parallel")


@dataclass(frozen=True)
class Status:
    """The settings, patches and counts of this process.

    state
        A sentence: off, waiting for Megatron-core, or applied.
    patches
        The status of each patch; empty before Megatron-core is imported.
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
        self._patches: AppliedPatches | None = None
        self._taken_over: dict[str, Any] = {}  # settings in MindSpeed's arguments
        self._overrides: dict[str, Any] = {}  # the arguments of the last `configure`
        self._variables: dict[str, str] = {}
        self._hooked = False
        self._takes_over = False
        # The error of the environment's settings; this package's command reports it instead of the import.
        self.refused: SettingsError | None = None
        self._verifies = False
        self._timeline = Variable()
        self._log_level = LogLevel()

    def configure(self, environ: Mapping[str, str], **overrides: Any) -> Settings:
        """Read the settings and put them in force; apply the patches at once or when Megatron-core is imported.

        After an error all previous settings stay in force, and ranks that wait for this rank learn of the error.
        """
        consistency.begin_configure()
        try:
            settings = read_settings(environ, **overrides)
            if settings.take_over and self._taken_over:
                settings = read_settings(environ, self._taken_over, **overrides)
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

    def _put_in_force(self, settings: Settings) -> None:
        """Change the log level, the patches and the recording; after an error restore all three."""
        before, patches = current_settings(), self._patches
        self.revert()
        put_in_force(settings)
        try:
            self._log_level.follow(settings.log_level)
            if settings.take_over:
                self._take_over_once_imported()
            if settings.enabled:
                self._apply_once_imported()
            self._timeline.follow(settings.timeline, settings.timeline_passes)
        except BaseException:
            self.revert()
            put_in_force(before)
            self._patches = patches
            self._log_level.follow(before.log_level)
            if patches is not None:
                patches.apply()
            self._timeline.follow(before.timeline, before.timeline_passes)
            raise

    def apply(self) -> None:
        """Apply the patches, importing Megatron-core's layers; a second call does nothing.

        Raises `SettingsError` if the settings are off, `PatchError` if Megatron-core is missing or not as expected.
        """
        if not current_settings().enabled:
            settings = current_settings()
            raise SettingsError(
                f"nothing to apply: COC_PARALLEL_NUM={settings.num_chunks}, "
                f"USE_COC_FUSED_KERNEL={int(settings.fused)} and COC_MODE={settings.mode} switch overlap off; "
                "export other values, or call configure(num_chunks=4)"
            )
        if "megatron.core" not in sys.modules and not _installed("megatron.core"):
            raise PatchError(
                f"megatron-core: expected a version {megatron.VERSIONS}, found none installed: the variables have "
                "nothing to overlap (column_linear, row_linear and the operators read none)"
            )
        importlib.import_module(megatron.LAYERS)  # the import hook may apply the patches
        if self._patches is None:
            self._patches = AppliedPatches(current_settings())
            if os.environ.get("RANK", "0") == "0":
                log.info("%s", self.status().state)

    def try_apply(self) -> str:
        """Apply the patches; return "", or why they do not fit what is installed."""
        try:
            self.apply()
        except PatchError as error:
            return str(error)
        return ""

    def revert(self) -> None:
        """Restore the original methods; does nothing if no patch is applied."""
        if self._patches is not None:
            self._patches.revert()
            self._patches = None

    def status(self) -> Status:
        """Return the settings, patches and counts of this process."""
        patches, region = (self._patches.status(), self._patches.region) if self._patches else ([], "")
        found = (patches, _kernels(), COUNTS.as_dict(), region, self._notes())
        return Status(__version__, self._state(patches), current_settings(), *found)

    def warn_if_idle(self) -> None:
        """Log on rank 0, at the end of a run with overlap, that no layer ran with it, and the reason."""
        failed = getattr(sys, "last_value", None) is not None
        if self._patches is None or COUNTS.as_dict() or failed or os.environ.get("RANK") != "0":
            return
        log.warning("overlap was on, but 0 linear layers ran with it: %s", self._why_idle())

    def verification(self) -> Verification:
        """Return the results of the checks in this process; if no call was checked, with a note of the reason."""
        result = LEDGER.summary(current_settings().verify_every)
        if result.layers:
            return result
        why = "verification is off: COC_VERIFY=0" if not result.every else f"nothing was checked: {self._why_idle()}"
        return replace(result, notes=[*result.notes, why])

    def log_verification(self) -> None:
        """Log on rank 0, at the end of a run with verification, its results."""
        if current_settings().verify_every and str(os.environ.get("RANK", LEDGER.rank)) == "0":
            log.warning("%s", self.verification())  # a warning, so that the requested result is visible by default

    def _why_idle(self) -> str:
        """Return the reason why no layer ran with overlap."""
        if self._patches is None:
            return self._state([])
        if others := replaced_classes(self._patches.layers):
            return others
        replaced = [patch for patch in self._patches.status() if not patch.applied]
        if replaced:
            return "; ".join(f"{patch.target} was {patch.reason}" for patch in replaced)
        if has_file("transformer_engine"):
            return "TransformerEngine's layers are not covered: use --transformer-impl local"
        reason = "no layer of megatron-core with a tensor-parallel group of several ranks was called"
        if current_settings().auto or current_settings().tune:
            return f"every matmul was kept whole, and Megatron-core's own layers ran; or {reason}"
        return reason

    def _apply_once_imported(self) -> None:
        if megatron.LAYERS in sys.modules:
            self.apply()
        if not self._hooked:
            self._hooked = True
            atexit.register(self.warn_if_idle)
            wrapt.register_post_import_hook(self._imported, megatron.LAYERS)
            for module in ON_TOP:
                wrapt.register_post_import_hook(self._imported_on_top, module)

    def _imported_on_top(self, module: ModuleType) -> None:
        if self._patches is not None:
            self._patches.extend(module)

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

    def _imported(self, _: ModuleType) -> None:
        if current_settings().enabled:
            try:
                self.apply()
            except PatchError as error:
                Refusal(error).install()
                raise

    def _state(self, patches: list[PatchStatus]) -> str:
        if not current_settings().enabled:
            return "off: Megatron-core's layers are untouched"
        if self._patches is None and megatron.LAYERS in sys.modules:
            return "not applied: Megatron-core's layers are untouched"
        if self._patches is None:
            where = "" if _installed("megatron.core") else ", which is not installed"
            return f"waiting for the import of megatron-core{where}"
        own = [patch.applied for patch in patches if patch.target.startswith(megatron.LAYERS)]
        text = f"{sum(own)} of {len(own)} methods of megatron-core {megatron.installed_version()} replaced"
        others = [patch.applied for patch in patches[len(own) :]]
        return f"{text}, and {sum(others)} of {len(others)} others" if others else text

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
    extension = shm.extension()
    return {
        "npu": "available" if _installed("torch_npu") else "torch_npu is not installed",
        "shm": extension if isinstance(extension, str) else "available",
        "chunked": "available",
        "reference": "available",
        "ordered": "available",
    }


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent is missing
        return False
