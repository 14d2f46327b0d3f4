"""Tensor-parallel linear layers whose matmul and collective share their time.

Importing this package reads COC_PARALLEL_NUM, USE_COC_FUSED_KERNEL and the other COC_ variables. If they
switch overlap on, Megatron-core's ColumnParallelLinear and RowParallelLinear are patched, at once or
right after Megatron-core is imported; otherwise nothing is touched. See docs/settings.md.
"""

import os as _os
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

from ascend_parallel import ops
from ascend_parallel.consistency import DisagreementError
from ascend_parallel.diagnostics import timeline
from ascend_parallel.diagnostics.verify import Verification, VerificationError
from ascend_parallel.ops import CollectiveError, Explanation, Problem, UnmetRequestError
from ascend_parallel.ops.explain import explain as _explain
from ascend_parallel.ops.quantised import QuantisedWeight, quantise_weight
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.overlap.quantised import quantise_row_parallel, quantised_row_linear
from ascend_parallel.overlap.weight_gradient import WeightGradient
from ascend_parallel.patch_control import PatchControl as _PatchControl
from ascend_parallel.patch_control import Status as _Status
from ascend_parallel.patches.base import PatchError
from ascend_parallel.patches.megatron.conflicts import ConflictError
from ascend_parallel.patches.megatron.coverage import Coverage, coverage
from ascend_parallel.settings import Settings, SettingsError
from ascend_parallel.version import __version__

__all__ = [
    "CollectiveError",
    "ConflictError",
    "Coverage",
    "DisagreementError",
    "Explanation",
    "PatchError",
    "Problem",
    "QuantisedWeight",
    "Settings",
    "SettingsError",
    "UnmetRequestError",
    "Verification",
    "VerificationError",
    "WeightGradient",
    "__version__",
    "apply",
    "column_linear",
    "configure",
    "coverage",
    "explain",
    "ops",
    "quantise_row_parallel",
    "quantise_weight",
    "quantised_row_linear",
    "revert",
    "row_linear",
    "status",
    "timeline",
    "verification",
]

_control = _PatchControl()


def configure(**settings: _Any) -> Settings:
    """Read the environment again, let `settings` (fields of `Settings`) win over it, and put that in force.

    All ranks have to call it alike and between steps, not between a forward and its backward.
    Raises `SettingsError` for what is not allowed, `PatchError`, or `OSError` if a recording that
    ends cannot be written. What was in force then stays in force, wholly, and other ranks that wait for this one
    raise `DisagreementError`.
    """
    return _control.configure(_os.environ, **settings)


def apply() -> None:
    """Patch Megatron-core now, importing it if need be; a second call does nothing.

    Raises `SettingsError` if overlap is off, `PatchError` if Megatron-core is not as expected.
    """
    _control.apply()


def revert() -> None:
    """Put Megatron-core's own methods back; raises `PatchError` if somebody patched on top."""
    _control.revert()


def status() -> _Status:
    """Tell what is in force in this process: settings, patches, counts, and what a user should know."""
    return _control.status()


def verification() -> Verification:
    """Tell what the checks of COC_VERIFY have found in this process so far: the largest errors of each layer."""
    return _control.verification()


def explain(problem: Problem, settings: Settings | None = None) -> Explanation:
    """Tell which kernel would run `problem`, in how many chunks, and why no other; print it to read it.

    `settings` are those in force if None. Whether a group can share memory is asked of a real group,
    so a problem described by hand says so itself (``shm=None``: it can).
    """
    return _explain(problem, _control.status().settings if settings is None else settings)


def _is_the_command() -> bool:
    """Tell whether the program is this package's own command, which reports a bad setting in a line of its own."""
    words = _sys.orig_argv
    module = any(words[i : i + 2] == ["-m", "ascend_parallel"] for i in range(len(words)))
    return module or _Path(_sys.argv[0]).name == "ascend-parallel"


try:
    configure()
except SettingsError as _error:
    if not _is_the_command():
        raise
    _control.refused = _error
