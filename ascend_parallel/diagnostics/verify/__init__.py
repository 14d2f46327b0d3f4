"""Verify layers inside a run: compare a patched layer with the original layer on the same inputs.

compare   the difference between a result and the expected result
report    the results so far, layer by layer

The framework's patches run the checks (patches/megatron/verification.py).
"""

from ascend_parallel.diagnostics.verify.compare import Difference, default_limit, difference, worst_place
from ascend_parallel.diagnostics.verify.report import LEDGER, LayerErrors, Verification, VerificationError

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
