"""torch's fused optimizers beside slices of parameters.

The fused kernels on CPUs read a tensor's memory in a row, whatever its strides: parameters that are not contiguous get
wrong values without an error (torch 2.7 to 2.13). ZeRO's slices along a later dimension are such views.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def foreach_for_strided(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let groups with ``fused=True`` and a tensor that is not contiguous run the foreach kernels inside the context."""
    strided = [group for group in optimizer.param_groups if group.get("fused") and _has_strided(group)]
    kept = [(group["fused"], group.get("foreach")) for group in strided]
    for group in strided:
        group.update(fused=False, foreach=True)
    try:
        yield
    finally:
        for group, (fused, foreach) in zip(strided, kept, strict=True):
            group.update(fused=fused, foreach=foreach)


def _has_strided(group: dict[str, Any]) -> bool:
    tensors = [each for tensor in group["params"] for each in (tensor, tensor.grad) if each is not None]
    return not all(tensor.is_contiguous() for tensor in tensors)
