"""The operators of torch's ``symm_mem`` library, and the dispatch keys for which this package has kernels."""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory  # defines the operators

GATHER = "fused_all_gather_matmul"
SCATTER = "fused_matmul_reduce_scatter"
SCALED_GATHER = "fused_all_gather_scaled_matmul"
SCALED_SCATTER = "fused_scaled_matmul_reduce_scatter"
KEYS = ("CPU", "PrivateUse1")


def has_kernel(operator: str, key: str) -> bool:
    """Tell whether ``symm_mem::<operator>`` has a kernel for a dispatch key, of whatever origin."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{operator}", key)


def key_of(device: torch.device) -> str | None:
    """Return the one of `KEYS` that serves tensors on `device`; None: torch's own kernels or none serve them."""
    own = {"cpu": "CPU", torch._C._get_privateuse1_backend_name(): "PrivateUse1"}
    return own.get(device.type)
