"""The way of another backend on gloo's ranks: its row in the place of gloo's."""

import contextlib
from functools import partial
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ascend_parallel.ops import collectives, registry
from ascend_parallel.ops.decision import OF_GROUPS
from ascend_parallel.process_groups import backend
from ascend_parallel.process_groups.backend import HCCL, NCCL

HERE = ("gloo", "cpu")
DEVICE_WAYS = {"nccl": {HERE: NCCL}, "hccl": {HERE: HCCL}, "unknown": {}}


class GroupedSends(dist.Work):
    """An all_to_all of lists as NCCL runs it: sends and receives of what is not empty, of any sizes."""

    started = 0

    def __init__(self, places, sent, group, async_op):
        assert async_op
        super().__init__()
        GroupedSends.started += 1
        peers = [peer for peer in range(group.size()) if places[peer].numel()]
        with _disable_current_modes():  # one call of the program
            self._works = [dist.irecv(places[peer], group=group, group_src=peer) for peer in peers]
            self._works += [dist.isend(sent[peer], group=group, group_dst=peer) for peer in peers]

    def is_completed(self):
        return not self._works

    def wait(self, limit=None):
        while self._works:
            self._works.pop().wait()


class Unseen(dist.Work):
    """A work whose wait is one call of the program: gloo's own reduce-scatter copies its result there."""

    def __init__(self, start, *args, **kwargs):
        super().__init__()
        self._work = start(*args, **kwargs)
        self.is_completed = self._work.is_completed

    def wait(self, limit=None):
        with _disable_current_modes():
            self._work.wait()


@contextlib.contextmanager
def as_backend(name, group):
    """Run what another backend gets, with gloo's collectives and the host's tensors; "unknown": one without a row."""

    def forget():
        OF_GROUPS.pop(group, None)
        registry._choose.cache_clear()
        backend.unknown.cache_clear()

    forget()
    try:
        others = {key: row for key, row in backend.ROWS.items() if key != HERE}
        row = mock.patch.dict(backend.ROWS, {**others, **DEVICE_WAYS[name]}, clear=True)
        scatter = mock.patch.object(collectives, "_reduce_scatter", partial(Unseen, collectives._reduce_scatter))
        with row, scatter, mock.patch.object(dist, "all_to_all", GroupedSends):  # gloo's own takes equal sizes alone
            yield
    finally:
        forget()
