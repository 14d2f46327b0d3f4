"""Process groups named for a person, and how long their ranks wait for one another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def describe(group: dist.ProcessGroup) -> str:
    """Name a group for a person: its description and its global ranks."""
    name = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    return f"group {name!r} of ranks {listed(dist.get_process_group_ranks(group))}"


def listed(ranks: list[int]) -> str:
    """Name ranks for a person."""
    return ", ".join(map(str, ranks))


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the shorter of the time limits of the group and of its store (Megatron gives groups half an hour)."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    store: Any = c10d._get_process_group_store(group)
    limit: timedelta = store.timeout
    return min(limit, getattr(options, "_timeout", None) or limit)
