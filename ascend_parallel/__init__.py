"""Tensor-parallel linear layers that overlap their matmul with their collective.

Importing this package reads COC_PARALLEL_NUM, USE_COC_FUSED_KERNEL and the other COC_ variables. If they
switch overlap on, Megatron-core's ColumnParallelLinear and RowParallelLinear are patched, at once or
right after Megatron-core is imported. Otherwise the import patches nothing. See docs/settings.md.
"""

import os as _os
import sys as _sys
from dataclasses import replace as _replace
from pathlib import Path as _Path
from typing import Any as _Any

from ascend_parallel import ops
from ascend_parallel.diagnostics import timeline
from ascend_parallel.diagnostics.verify import Verification, VerificationError
from ascend_parallel.ops import CollectiveError, DegreeError, Explanation, Problem, UnmetRequestError
from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.quantised import QuantisedWeight, quantise_weight
from ascend_parallel.ops.registry import explain as _explain
from ascend_parallel.overlap.choices import explain_region as _explain_region
from ascend_parallel.overlap.int8_linear import int8_column_linear, int8_row_linear
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.overlap.quantised import quantise_row_parallel, quantised_row_linear
from ascend_parallel.overlap.weight_gradient import WeightGradient
from ascend_parallel.patch_control import PatchControl as _PatchControl
from ascend_parallel.patch_control import Status as _Status
from ascend_parallel.patches.base import ConflictError, PatchError
from ascend_parallel.patches.coverage import Coverage, coverage
from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.settings import Settings, SettingsError
from ascend_parallel.version import __version__

__all__ = [
    "CollectiveError",
    "CommScales",
    "ConflictError",
    "Coverage",
    "DegreeError",
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
    "int8_column_linear",
    "int8_row_linear",
    "ops",
    "quantise_row_parallel",
    "quantise_weight",
    "quantised_row_linear",
    "register_symm_mem",
    "revert",
    "row_linear",
    "status",
    "timeline",
    "unregister_symm_mem",
    "verification",
]

_control = _PatchControl()


def configure(**settings: _Any) -> Settings:
    """Read the environment, override it by `settings` (fields of `Settings`), and put the result in force.

    All ranks must call this alike and between steps, not between a forward and its backward. Raises `SettingsError`
    for a value that is not allowed, `PatchError`, or `OSError` if a recording that ends cannot be written. After an
    error all previous settings stay in force, and ranks that wait for this rank raise `DisagreementError`.
    """
    return _control.configure(_os.environ, **settings)


def apply() -> None:
    """Import Megatron-core and patch it; a second call does nothing.

    Raises `SettingsError` if overlap is off, `PatchError` if Megatron-core is not as expected.
    """
    _control.apply()


def revert() -> None:
    """Restore Megatron-core's own methods; raises `PatchError` if another patch was put on top."""
    _control.revert()


def status() -> _Status:
    """Return this process's settings, patches, counts, and notes for the user."""
    return _control.status()


def register_symm_mem() -> tuple[str, ...]:
    """Run torch's async tensor-parallel operators (``torch.ops.symm_mem``) on CPUs and NPUs by this package's.

    Registers kernels of ``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter`` where torch has none, and lets
    torch.compile's micro-pipeline pass use them. Returns the operators with their dispatch keys; a second call changes
    nothing. Call it on every rank before torch.compile runs. See docs/symm_mem.md.
    """
    # Imports torch's private library of these operators, which no other program needs.
    from ascend_parallel.patches.symm_mem.registration import register

    return register()


def unregister_symm_mem() -> None:
    """Take back what `register_symm_mem` did; raises `PatchError` if another patch was put on top.

    Programs that were compiled with the kernels have to be compiled again (``torch._dynamo.reset()``).
    """
    from ascend_parallel.patches.symm_mem.registration import unregister

    unregister()


def verification() -> Verification:
    """Return the results of COC_VERIFY's checks in this process so far: the largest errors of each layer."""
    return _control.verification()


def explain(problem: Problem, settings: Settings | None = None) -> Explanation:
    """Return the kernel and chunks that would run `problem`, with the reason against each other kernel; print it.

    `settings` None: the settings in force. Whether a group can share memory is known only for a real group, so set
    ``shm`` in a problem described by hand (``shm=None``: it can).
    """
    given = _control.status().settings if settings is None else settings
    explanation = _explain(problem, given)
    return _replace(explanation, region=_explain_region(explanation.choice, given))


def _is_the_command() -> bool:
    """Tell whether the program is this package's own command, which reports a bad setting without a traceback."""
    words = _sys.orig_argv
    module = any(words[i : i + 2] == ["-m", "ascend_parallel"] for i in range(len(words)))
    return module or _Path(_sys.argv[0]).name == "ascend-parallel"


try:
    configure()
except SettingsError as _error:
    if not _is_the_command():
        raise
    _control.refused = _error
