"""Verify layers inside a run: compare a patched layer with the original layer on the same inputs.

The framework's patches run the checks (patches/check.py).
"""

from ascend_parallel.diagnostics.verify.report import (
    LEDGER,
    Difference,
    LayerErrors,
    Verification,
    VerificationError,
    default_limit,
    difference,
    worst_place,
)

__all__ = [
    "LEDGER",
    "Difference",
    "LayerErrors",
    "Verification",
    "VerificationError",
    "default_limit",
    "difference",
    "worst_place",
]
