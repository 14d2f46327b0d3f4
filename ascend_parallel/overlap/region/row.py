"""A row-parallel layer with sequence parallelism whose chunks are sent on demand; its backward is that of `row_linear`.

All chunks of a row layer that are sent at once fill the link: the all-gather of the first rows, which the next layer
waits for, would wait behind the reduce-scatters of the last.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_parallel.ops.operators import rows_of, scattered_shape, shaped
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.forward_wrapper import Products
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.exchange import AHEAD, Reduced, chunk_bounds, recorded_call
from ascend_parallel.overlap.region.rows import LazyRows, PendingRows


class ChunkSender:
    """Multiplies and sends the chunks of a row-parallel layer, in order: x_r [r, m, K], w [K, N]."""

    def __init__(
        self, reduced: Reduced, x_r: torch.Tensor, w: torch.Tensor, sizes: Sizes, label: str, source: LazyRows | None
    ) -> None:
        """Send nothing yet; `source` finishes the rows of x_r, None: they are finished."""
        self._reduced, self._x_r, self._w, self._source = reduced, x_r, w, source
        self._bounds, self._label, self._sent = chunk_bounds(sizes), label, 0

    def send(self, count: int) -> None:
        """Multiply and send up to the first `count` chunks."""
        for start, stop in self._bounds[self._sent : count]:
            if self._source is not None:
                self._source.up_to(stop)
            with torch.no_grad():
                multiply = self._reduced.multiply
                y_r = compute(MATMUL, self._label, multiply, self._sent, self._x_r[:, start:stop], self._w)
            self._reduced.send(self._sent, y_r)
            self._sent += 1


def send_rows_on_demand(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, cut: RegionCut, rows: PendingRows
) -> Products:
    """Return the unfinished y of a row-parallel layer, for `row_linear`'s wrapper: x [S, ..., K], weight [N, K].

    y [S / R, ..., N] in the chunks of `cut`; `rows` multiplies and sends a chunk when its rows are asked for.
    """
    x_m, w = rows_of(x), weight.t()
    x_r = x_m.view(group.size(), -1, x_m.shape[1])
    reduced = Reduced(x_m.new_empty(x_r.shape[1], w.shape[1]), cut.sizes, group, sequence_parallel=True)
    send = ChunkSender(reduced, x_r, w, cut.sizes, "proj", None).send
    with recorded_call(group, cut, w, sequence_parallel=True), reduced.pending.launching():
        send(1 + AHEAD)
    y_m = rows.take_unsent(reduced.pending, send, AHEAD)
    return shaped(y_m, scattered_shape(x.shape, group.size(), w.shape[1])), None
