"""What the ranks of a group tell each other about a call that is checked or tuned, through the group's store.

Not by a collective: ranks that came to different calls would then have one's collective meet one of the
run's own, which gives wrong numbers or a hang. The store tells them apart.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.agreement import wait_for_ranks
from ascend_parallel.groups import describe


def exchange(
    group: dist.ProcessGroup, what: str, value: dict[str, Any], error: type[RuntimeError]
) -> dict[int, dict[str, Any]]:
    """Give `value` to the other ranks of `group` and return every rank's, by global rank.

    Plain values only. All ranks call it alike. `error` is raised, naming `what` this rank waits at and the
    ranks that did not come within the time limit of the group or its store, the shorter.
    """
    me = dist.get_rank()
    if dist.get_backend(group) == "fake":  # ranks that do not exist have nothing to say
        return {me: value}
    store = c10d._get_process_group_store(group)
    # Counted in the store, so that the count outlives a change of settings.
    place = f"ascend_parallel/exchange/{error.__name__}"
    number = store.add(f"{place}/number/{me}", 1)
    keys = {rank: f"{place}/{number}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[me], json.dumps(value))
    wait_for_ranks(group, keys, error, functools.partial(_absence, group, what))
    told = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    # Every rank that has come this far has read the last exchange's, so nobody will read those before.
    store.delete_key(f"{place}/{number - 2}/{me}")
    return told


def _absence(group: dist.ProcessGroup, what: str, missing: list[int], seconds: float) -> str:
    ranks = ", ".join(map(str, missing))
    return (
        f"rank {ranks} of {describe(group)} has not come to {what} within {seconds:g} s: it has stopped, "
        "or called the layer another number of times (a layer has to be called alike on every rank of its group)"
    )
