"""All-reduces that happen when they are waited for; their rows are NaN until then.

A reader of unfinished rows then computes NaN, on every machine and in every run.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist


class LateWork:
    """An all-reduce that runs inside `wait`; every rank has to wait in the same order."""

    unfinished = 0

    def __init__(self, start, tensor, group):
        self._start, self._tensor, self._group = start, tensor, group
        self._kept = tensor.clone()
        tensor.fill_(torch.nan)
        LateWork.unfinished += 1

    def is_completed(self):
        return self._kept is None

    def wait(self):
        if self._kept is not None:
            self._tensor.copy_(self._kept)
            self._kept = None
            LateWork.unfinished -= 1
            self._start(self._tensor, group=self._group)


@contextlib.contextmanager
def late_all_reduces():
    """Delay asynchronous all-reduces to their wait, and start every new buffer of rows as NaN."""
    start, empty, empty_like = dist.all_reduce, torch.Tensor.new_empty, torch.empty_like

    def all_reduce(tensor, *args, group=None, async_op=False, **options):
        if not async_op:
            return start(tensor, *args, group=group, **options)
        return LateWork(start, tensor, group)

    def poisoned(make):
        def run(*args, **options):
            made = make(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return run

    LateWork.unfinished = 0
    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(torch.Tensor, "new_empty", poisoned(empty)),
        mock.patch.object(torch, "empty_like", poisoned(empty_like)),
    ):
        yield
