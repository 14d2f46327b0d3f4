"""Collectives that happen when they are waited for; their rows are NaN until then.

A reader of unfinished rows then computes NaN, on every machine and in every run.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist


class DelayedWork:
    """A collective that runs inside `wait`; every rank has to wait in the same order."""

    unfinished = 0

    def __init__(self, run):
        self._run = run
        DelayedWork.unfinished += 1

    def is_completed(self):
        return self._run is None

    def wait(self):
        if self._run is not None:
            run, self._run = self._run, None
            DelayedWork.unfinished -= 1
            run()


@contextlib.contextmanager
def delayed_collectives():
    """Delay asynchronous all-reduces and what is received to their wait, and start every new buffer of rows as NaN.

    The package gathers by sends on gloo; its own reduce-scatter there writes its result in its wait already.
    """
    reduce, receive = dist.all_reduce, dist.irecv
    empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not async_op:
            return reduce(tensor, op, group)
        kept = tensor.clone()
        tensor.fill_(torch.nan)

        def run():
            tensor.copy_(kept)
            reduce(tensor, op, group)

        return DelayedWork(run)

    def irecv(place, *args, **options):
        received = empty_like(place)
        work = receive(received, *args, **options)

        def run():
            work.wait()
            place.copy_(received)

        return DelayedWork(run)

    def poisoned(make):
        def run(*args, **options):
            made = make(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return run

    DelayedWork.unfinished = 0
    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "irecv", irecv),
        mock.patch.object(torch.Tensor, "new_empty", poisoned(empty)),
        mock.patch.object(torch, "empty_like", poisoned(empty_like)),
    ):
        yield
