"""matmul_all_reduce of an int8 weight, cut into chunks of columns.

Chunk i's collective runs under the dequantising and the matmul of chunk i + 1. Cut so, each column is
dequantised once, no more of the weight than one chunk is ever held dequantised, and a single row (a
decoding step) can be cut too, which chunks of rows cannot do.

Memory beyond the serial path: a chunk of columns is no contiguous part of a result of several rows, so
each is reduced by itself and copied to its place when waited for, and until then both are held. A
result of one row is reduced in place.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import wait_all
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_REDUCE
from ascend_parallel.ops.quantised import QuantisedWeight
from ascend_parallel.ops.record import BESIDE, MATMUL, Watch, compute
from ascend_parallel.ops.rows import Sizes


def matmul_all_reduce(x_m: torch.Tensor, w: QuantisedWeight, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks: [M, N] on every rank. `sizes` are columns."""
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    stop = 0
    with pending.launching():
        for y_c in torch.split_with_sizes(y_m, sizes, 1):
            start, stop = stop, stop + y_c.shape[1]
            w_c = compute(BESIDE, "dequantise", w.dequantise, x_m.dtype, start, stop)
            y_part = y_c if x_m.shape[0] == 1 else y_c.new_empty(y_c.shape)
            compute(MATMUL, "matmul", torch.mm, x_m, w_c, out=y_part)
            del w_c  # before the next chunk is dequantised
            if y_part is y_c:
                pending.launch(dist.all_reduce, y_c, group=group, async_op=True)
            elif x_m.shape[0]:
                pending.launch(ReduceAndPlace, y_part, y_c, group)
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes) if x_m.shape[0] else 0)
    return pending


class ReduceAndPlace:
    """An all-reduce of the contiguous ``[M, c]``, which `wait` copies to its columns of the result."""

    def __init__(self, y_part: torch.Tensor, y_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start the all-reduce of `y_part`; `y_c` is where it belongs."""
        self._y_part: torch.Tensor | None = y_part
        self._y_c = y_c
        self._works: list[Work | None] = [dist.all_reduce(y_part, group=group, async_op=True)]

    def watched(self, watch: Watch) -> None:
        """Have somebody watch when the all-reduce is done."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Say whether the sum is in its place, where `wait` puts it."""
        return self._y_part is None

    def wait(self) -> None:
        """Wait for the sum and copy it; the second call does nothing."""
        if self._y_part is not None:
            wait_all(self._works)
            self._y_c.copy_(self._y_part)
            self._y_part = None
