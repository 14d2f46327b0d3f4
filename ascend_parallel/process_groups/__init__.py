"""Process groups in words, and their time limits; `consistency` compares what their ranks were given."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.process_groups.backend import Backend, backend_of

DESTROYED = (
    "the process group of this layer was destroyed (torch.distributed.destroy_process_group, or Megatron-core's "
    "destroy_model_parallel): make the model anew, on groups that exist"
)


def describe(group: dist.ProcessGroup) -> str:
    """Return a group in words: its description, or its name, and its global ranks.

    A group that is written in Python may have neither itself; torch's own table has its name.
    """
    name = group.group_desc if group.group_desc not in ("", "undefined") else c10d._get_process_group_name(group)
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:
        raise RuntimeError(DESTROYED) from None
    return f"group {name!r} of ranks {listed(ranks)}"


def listed(ranks: list[int]) -> str:
    """Return ranks separated by commas."""
    return ", ".join(map(str, ranks))


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the shorter of the time limits of the group and of its store (Megatron's groups have half an hour)."""
    try:
        store: Any = c10d._get_process_group_store(group)
    except KeyError:
        raise RuntimeError(DESTROYED) from None
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


# Stands for the limit of a wait that has not been read.
UNREAD = timedelta()


def wait_limit(group: dist.ProcessGroup, device: torch.device, backend: Backend | None = None) -> timedelta | None:
    """Return the time for which `wait_within` waits for works of `group` on tensors of `device`; None: the backend's.

    backend: that of the group, if the caller has looked it up.
    gloo keeps to the group's own limit: half an hour in the groups that Megatron and torch's DeviceMesh make, whatever
    the program gave to init_process_group. A backend that does not block the host watches its collectives itself, and
    such a wait would stop the host.
    """
    if not (backend or backend_of(group, device)).blocks_host:
        return None
    try:
        store: Any = c10d._get_process_group_store(group)
    except KeyError:
        raise RuntimeError(DESTROYED) from None
    limit: timedelta = store.timeout
    return min(limit, getattr(getattr(group._get_backend(device), "options", None), "_timeout", None) or limit)


def wait_within(limit: timedelta | None, group: dist.ProcessGroup, *works: Any) -> None:
    """Wait for works of `group`; raise `RuntimeError` after `limit`, and close the group's connections, as gloo does.

    A work that is a wrapper of this package has limits for the works inside.
    """
    for work in works:
        if limit is None or not isinstance(work, dist.Work):
            work.wait()
            continue
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise_failed_wait(limit, group, work, error)


def raise_failed_wait(limit: timedelta | None, group: dist.ProcessGroup, work: Any, error: RuntimeError) -> NoReturn:
    """Raise the error of a wait for a work of `group`; if it ran out of `limit`, close the group's connections."""
    if limit is None or not isinstance(work, dist.Work) or work.is_completed():  # it failed by itself
        raise error
    _close_connections(group)
    raise RuntimeError(f"no answer within {limit.total_seconds():g} s") from error


class LimitedWork:
    """A started collective, send or receive, whose `wait` is `wait_within`."""

    def __init__(self, work: dist.Work, group: dist.ProcessGroup, limit: timedelta | None) -> None:
        """Hold a work of `group`."""
        self._work, self._group, self._limit = work, group, limit
        self.is_completed, self.get_future = work.is_completed, work.get_future

    def wait(self) -> None:
        """Wait for the work, no longer than the limit."""
        wait_within(self._limit, self._group, self._work)


def _close_connections(group: dist.ProcessGroup) -> None:
    """End what gloo still runs on `group`; a thread that goes on waiting would keep the process from ending."""
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):  # gloo closes all connections of a group when a receive runs out of time
        receive = dist.irecv(torch.empty(1), group=group, group_src=peer)
        assert receive is not None, "this rank is not a member of the group"
        receive.wait(timedelta(milliseconds=1))
