"""A column-parallel layer that pulls its input chunk by chunk; its backward is that of `column_linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.ops.operators import rows_of, shaped
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.forward_wrapper import Products
from ascend_parallel.overlap.region.exchange import GatheredRows, Rows, chunk_bounds, draining
from ascend_parallel.overlap.region.rows import LazyRows


@dataclass(frozen=True)
class PulledColumn:
    """The forward of a column-parallel layer whose input rows `source` finishes; for `column_linear`'s wrapper.

    keep: also return the gathered input, with sequence parallelism.
    """

    group: dist.ProcessGroup
    sizes: Sizes
    source: LazyRows
    sequence_parallel: bool
    keep: bool

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Products:
        """Return y with the bias, and the gathered input or None: x [..., K], weight [N, K], bias [N]."""
        x_m, ranks = rows_of(x), self.group.size() if self.sequence_parallel else 1
        y_r = x_m.new_empty(ranks, x_m.shape[0], weight.shape[0])
        inputs: Rows | GatheredRows = Rows(x_m, self.sizes, self.source)
        if self.sequence_parallel:
            inputs = GatheredRows(x_m, self.sizes, self.group, self.source)
        with draining(*([inputs.pending] if isinstance(inputs, GatheredRows) else [])):
            for index, (start, stop) in enumerate(chunk_bounds(self.sizes)):
                inputs.multiply(index, weight.t(), y_r[:, start:stop], "matmul")
        gathered = inputs.wait() if self.sequence_parallel and self.keep else None
        y = shaped(y_r.flatten(0, 1), (ranks * x.shape[0], *x.shape[1:-1], weight.shape[0]))
        return y if bias is None else y.add_(bias), gathered
