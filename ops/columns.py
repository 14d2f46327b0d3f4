"""matmul_all_reduce of an int8 weight, in chunks of columns.

Chunk i's collective runs under chunk i + 1's dequantisation and matmul. Chunks of columns have three advantages over
chunks of rows: each column is dequantised once, only one chunk of the weight is held dequantised at a time,
and a single row (a decoding step) can be cut.

Memory beyond the serial path: a chunk of columns is not contiguous in a result of several rows. It is therefore
reduced in a buffer, which `wait` copies into the result. A result of one row is reduced in place.
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
    """Start ``y_m = all_reduce(x_m @ w)``: x_m [M, K], w [K, N]; pending [M, N] on every rank. `sizes` are columns."""
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    stop = 0
    with pending.launching():
        for y_c in torch.split_with_sizes(y_m, sizes, 1):
            start, stop = stop, stop + y_c.shape[1]
            w_c = compute(BESIDE, "dequantise", w.dequantise, x_m.dtype, start, stop)
            y_part = y_c if x_m.shape[0] == 1 else y_c.new_empty(y_c.shape)
            compute(MATMUL, "matmul", torch.mm, x_m, w_c, out=y_part)
            del w_c  # freed before the next chunk is dequantised
            if y_part is y_c:
                pending.launch(dist.all_reduce, y_c, group=group, async_op=True)
            elif x_m.shape[0]:
                pending.launch(ReduceAndPlace, y_part, y_c, group)
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes) if x_m.shape[0] else 0)
    return pending


class ReduceAndPlace:
    """An all-reduce of a contiguous buffer [M, c], which `wait` copies into the columns of the result."""

    def __init__(self, y_part: torch.Tensor, y_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start the all-reduce of the buffer `y_part`; `y_c` is its view of the result."""
        self._y_part: torch.Tensor | None = y_part
        self._y_c = y_c
        self._works: list[Work | None] = [dist.all_reduce(y_part, group=group, async_op=True)]

    def record_end(self, watch: Watch) -> None:
        """Have `watch` record when the all-reduce is done."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Tell whether `wait` has copied the sum into the result."""
        return self._y_part is None

    def wait(self) -> None:
        """Wait for the sum and copy it into the result; a second call does nothing."""
        if self._y_part is not None:
            wait_all(self._works)
            self._y_c.copy_(self._y_part)
            self._y_part = None
