"""The norm of all gradients of the job: each gradient counts once, and every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
import torch.distributed as dist

from ascend_parallel.sharding.mesh import default_device


def global_norm(
    gradients: Iterable[tuple[torch.Tensor, int]], norm_type: float, group: dist.ProcessGroup | None
) -> float:
    """Return the norm of the gradients of all ranks of `group` (None: of this rank's).

    gradients
        This rank's gradients, each with the number of ranks of `group` that hold the same gradient.

    Sums run in fp64, over gradients in the given order and over ranks in rank order. The norm is inf or nan if any
    gradient contains it.
    """
    pairs = list(gradients)
    device = pairs[0][0].device if pairs else "cpu" if group is None else default_device(group)
    mine = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, copies in pairs:
        if norm_type == inf:
            mine = torch.maximum(mine, torch.linalg.vector_norm(gradient, inf).double())
        else:
            mine += torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) ** norm_type / copies
    parts = [mine]
    if group is not None:
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
    values = [float(part) for part in parts]
    if any(value != value for value in values):
        return float("nan")
    return max(values) if norm_type == inf else float(sum(values) ** (1 / norm_type))
