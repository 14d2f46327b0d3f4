"""Checks inside a run: the original layer beside the patched one, on the same inputs.

compare   how far a result is from the one it should be
report    what was found so far, layer by layer

How a framework's layers are checked is the framework's business (patches/megatron/verification.py).
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
