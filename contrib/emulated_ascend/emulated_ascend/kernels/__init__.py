"""Kernels of the emulated CANN, computed with torch on the CPU."""

import importlib

from .table import KERNELS, register

for name in (
    "attention", "elementwise", "exchanged", "experts", "foreach", "fused", "indexing", "matmul", "norms", "optimizers",
    "quantised", "random", "reductions",
):  # fmt: skip
    importlib.import_module(f"{__name__}.{name}")

__all__ = ["KERNELS", "register"]
