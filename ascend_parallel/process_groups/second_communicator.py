"""A second communicator of a group, for small sums that would stand in line behind the group's large ones.

A backend runs the collectives of a group in the order of their starts, or a few at a time. So a sum that is started
after a layer's chunks comes after them, however small it is. A second communicator of the same ranks has connections
and a line of its own. It depends on nothing but the group: on the group's ranks, its store and its limit.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.process_groups import time_limit
from ascend_parallel.process_groups.backend import backend_of
from ascend_parallel.process_groups.rendezvous import store_key

_SECOND: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""The second communicator of each group that has one."""


def all_reduce_beside(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start the sum of `tensor` over the ranks of `group`, in place, beside the collectives that the group runs.

    Every rank starts the same of these sums in the same order. Their places among the group's other collectives may
    differ. At the first one the ranks connect. Where a second communicator is not cheap (`Backend.second`), the sum is
    one of the group's own collectives.
    """
    connect = backend_of(group, tensor.device).second
    if connect is None:
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
        return work
    second = _SECOND.get(group)
    if second is None:
        store = c10d.PrefixStore(store_key("second communicator"), c10d._get_process_group_store(group))
        second = _SECOND[group] = connect(store, group.rank(), group.size(), time_limit(group))
    started: dist.Work = second.allreduce([tensor], c10d.AllreduceOptions())
    return started
