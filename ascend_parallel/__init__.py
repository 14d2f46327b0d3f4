"""Tensor-parallel linear layers that overlap their matmul with their collective.

Importing this package reads COC_PARALLEL_NUM, USE_COC_FUSED_KERNEL and the other COC_ variables. If they
switch overlap on, Megatron-core's ColumnParallelLinear and RowParallelLinear are patched, at once or
right after Megatron-core is imported. Otherwise the import patches nothing. See docs/settings.md.

The package's own command is the exception: it reads the variables when a command runs, so that its help needs no torch.
"""

from __future__ import annotations

import sys as _sys
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ascend_parallel.version import __version__

if _TYPE_CHECKING:
    from ascend_parallel import ops
    from ascend_parallel.diagnostics import timeline
    from ascend_parallel.diagnostics.verify import Verification, VerificationError
    from ascend_parallel.ops import CollectiveError, DegreeError, Explanation, Matmul, UnmetRequestError
    from ascend_parallel.ops.comm_scales import CommScales
    from ascend_parallel.ops.quantised import QuantisedWeight, quantise_weight
    from ascend_parallel.overlap.choices import explain
    from ascend_parallel.overlap.int8_linear import int8_column_linear, int8_row_linear
    from ascend_parallel.overlap.linear import column_linear, row_linear
    from ascend_parallel.overlap.logprobs import logprobs
    from ascend_parallel.overlap.quantised import quantise_row_parallel, quantised_row_linear
    from ascend_parallel.overlap.weight_gradient import WeightGradient
    from ascend_parallel.patch_control import (
        apply,
        configure,
        register_symm_mem,
        revert,
        status,
        unregister_symm_mem,
        verification,
    )
    from ascend_parallel.patches.base import ConflictError, PatchError
    from ascend_parallel.patches.coverage import Coverage, coverage
    from ascend_parallel.patches.weight_digests import weight_digests
    from ascend_parallel.process_groups.consistency import DisagreementError
    from ascend_parallel.settings import Settings, SettingsError

__all__ = [
    "CollectiveError",
    "CommScales",
    "ConflictError",
    "Coverage",
    "DegreeError",
    "DisagreementError",
    "Explanation",
    "Matmul",
    "PatchError",
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
    "logprobs",
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
    "weight_digests",
]

# What the block above imports, for `__getattr__`: the public names by the module that they come from.
_MODULES = {"ops": "ascend_parallel.ops", "timeline": "ascend_parallel.diagnostics.timeline"}
_NAMES = {
    "diagnostics.verify": ("Verification", "VerificationError"),
    "ops": ("CollectiveError", "DegreeError", "Explanation", "Matmul", "UnmetRequestError"),
    "ops.comm_scales": ("CommScales",),
    "ops.quantised": ("QuantisedWeight", "quantise_weight"),
    "overlap.choices": ("explain",),
    "overlap.int8_linear": ("int8_column_linear", "int8_row_linear"),
    "overlap.linear": ("column_linear", "row_linear"),
    "overlap.logprobs": ("logprobs",),
    "overlap.quantised": ("quantise_row_parallel", "quantised_row_linear"),
    "overlap.weight_gradient": ("WeightGradient",),
    "patch_control": (
        "apply",
        "configure",
        "register_symm_mem",
        "revert",
        "status",
        "unregister_symm_mem",
        "verification",
    ),
    "patches.base": ("ConflictError", "PatchError"),
    "patches.coverage": ("Coverage", "coverage"),
    "patches.weight_digests": ("weight_digests",),
    "process_groups.consistency": ("DisagreementError",),
    "settings": ("Settings", "SettingsError"),
}


def _is_the_command() -> bool:
    """Tell whether the program is this package's own command: the script `ascend-parallel`, or ``-m ascend_parallel``.

    While Python locates the module of ``-m``, which imports this package, the program's name is "-m".
    """
    if _sys.argv[0] == "-m":
        return _sys.orig_argv[-len(_sys.argv)] in ("ascend_parallel", "-mascend_parallel")
    return _Path(_sys.argv[0]).name == "ascend-parallel"


if not _TYPE_CHECKING:  # of a module with `__getattr__`, type checkers believe every name

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name in _MODULES:
            value = _import_module(_MODULES[name])
        else:
            home = next((home for home, names in _NAMES.items() if name in names), None)
            if home is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            value = getattr(_import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value

    if not _is_the_command():
        for _name in (*_MODULES, *(name for names in _NAMES.values() for name in names)):
            __getattr__(_name)
        configure()
