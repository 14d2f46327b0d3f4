"""The norm of all gradients of the job, each counted once, with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
import torch.distributed as dist


def global_norm(
    gradients: Iterable[tuple[torch.Tensor, int]], norm_type: float, group: dist.ProcessGroup | None
) -> float:
    """Return the norm of the gradients of all ranks of `group` (None: of this rank's).

    gradients
        This rank's, each with the number of ranks of `group` that give the same.

    Sums are taken in fp64, here in the order given and over ranks in theirs. inf or nan if any gradient has one.
    """
    given = list(gradients)
    device = given[0][0].device if given else _device(group)
    mine = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, copies in given:
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


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group's collectives take."""
    if group is None:
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    types = [device.type for device in group._device_types]
    return found if found is not None and found.type in types else torch.device("cpu")
