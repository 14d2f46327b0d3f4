"""As if a CUDA or NPU graph were captured, on CPUs: what a capture forbids raises."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from ascend_parallel.process_groups import consistency

# Where the host reads what a device has computed, or waits for it.
READS = ("item", "tolist", "cpu", "numpy", "is_nonzero", "__bool__", "__int__", "__float__")


class ForbiddenInCaptureError(RuntimeError):
    """The host has waited for a device, or asked it, while a graph is captured."""


def _forbidden(name):
    def run(*_, **__):
        raise ForbiddenInCaptureError(name)

    return run


@contextlib.contextmanager
def captured():
    """Answer that a graph is captured; raise `ForbiddenInCaptureError` where the host reads from a device or waits."""
    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, _forbidden(name), create=True))
        for owner, name in ((torch, "equal"), (torch.accelerator, "synchronize"), (dist.Work, "is_completed")):
            stack.enter_context(mock.patch.object(owner, name, _forbidden(name)))
        stack.enter_context(mock.patch.object(consistency, "is_capturing", lambda: True))
        yield
