"""Process groups in words, and their time limits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def describe(group: dist.ProcessGroup) -> str:
    """Return a group in words: its description and its global ranks."""
    name = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    return f"group {name!r} of ranks {listed(dist.get_process_group_ranks(group))}"


def listed(ranks: list[int]) -> str:
    """Return ranks separated by commas."""
    return ", ".join(map(str, ranks))


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the shorter of the time limits of the group and of its store (Megatron's groups have half an hour)."""
    store: Any = c10d._get_process_group_store(group)
    limit: timedelta = store.timeout
    return min(limit, group_timeout(group) or limit)


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's operations; None if its backend does not tell."""
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # torch_npu's transfer_to_npu reads "cuda" as "npu", for which a gloo group has no backend
            continue
        return getattr(getattr(backend, "options", None), "_timeout", None)
    return None
