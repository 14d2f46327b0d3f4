"""What a read of unfinished rows runs on the host: functions of this package, counted without a clock.

On a device a wait takes no time, and an operator of torch some microseconds: every function beside is a cost.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import as_backend
from counted_functions import functions_of, in_words
from pool import on_ranks

from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.unfinished import finished, is_unfinished, unfinished
from ascend_parallel.ops.unfinished_modules import by_rows

ROWS, WIDTH = 128, 32


class Module(torch.nn.Module):
    """A module that works row by row."""

    def forward(self, x):
        return x * 2


MODULE = Module()
RESIDUAL, WEIGHT = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)

# What is done with unfinished rows -> the most functions in 2 and in 4 chunks, with the read of the result.
MOST = {
    "add": (lambda x: x + RESIDUAL, 24, 30),
    "scale": (lambda x: x * 2.0, 25, 31),
    "activation": (F.silu, 24, 30),
    "layer norm": (lambda x: F.layer_norm(x, (WIDTH,), WEIGHT[0]), 31, 37),
    "rms norm": (lambda x: F.rms_norm(x, (WIDTH,), WEIGHT[0]), 119, 159),  # on CPUs six operators
    "linear": (lambda x: F.linear(x, WEIGHT, WEIGHT[0]), 25, 31),
    "module": (lambda x: by_rows(MODULE, MODULE, x), 42, 50),
    "view": (lambda x: x.view(2, ROWS // 2, WIDTH).transpose(0, 1), 24, 24),
    "whole read": (lambda x: x, 7, 7),
    "reader": (lambda x: x.cumsum(0), 9, 9),  # with the question whether its result is finished
}


def arrived(group, chunks):
    """Return rows of sums over the ranks, which have come, and which nobody has waited for."""
    memory, sizes = torch.ones(ROWS, WIDTH), (ROWS // chunks,) * chunks
    pending = Pending(memory, "a test", group, chunks, sizes)
    for rows in memory.split(sizes):
        pending.launch(dist.all_reduce, rows, group=group, async_op=True)
    return unfinished(pending, 1)


@on_ranks(2)
def test_a_read_runs_few_functions_of_this_package(group):
    for backend in ("gloo", "nccl"):
        with as_backend(backend, group) if backend == "nccl" else nullcontext(), torch.no_grad():
            for name, (use, *most) in MOST.items():
                for chunks, limit in zip((2, 4), most, strict=True):
                    for _ in range(3):
                        finished(use(arrived(group, chunks)))
                    x = arrived(group, chunks)
                    y, called = functions_of(lambda x=x, use=use: finished(use(x)))
                    assert 0 < sum(called.values()) <= limit, (backend, name, chunks, in_words(called))
                    assert torch.equal(y, use(torch.full((ROWS, WIDTH), 2.0))), (backend, name)


@on_ranks(2)
def test_what_was_read_is_read_again_by_few_functions(group):
    x = arrived(group, 4)
    finished(x[:40])
    assert is_unfinished(x)
    finished(x)
    _, called = functions_of(lambda: finished(x))
    assert sum(called.values()) <= 3, in_words(called)
