"""Linear layers of a region of a graph in chunks of rows, with the autograd graph that they have without chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_parallel.ops.operators import gathered_shape, scattered_shape, shaped
from ascend_parallel.overlap.forward_wrapper import Products
from ascend_parallel.overlap.region.deferred import Deferred
from ascend_parallel.overlap.region.exchange import AHEAD, GatheredRows, Reduced, Rows
from ascend_parallel.overlap.region.row import ChunkSender
from ascend_parallel.overlap.region.rows import LazyRows

Wrapped = tuple[Callable[[object], Products], Callable[[], LazyRows]]
"""The `forward_wrapper` of a layer, and after its forward the rows of its result."""


def deferred_row(deferred: Deferred, x: torch.Tensor, weight: torch.Tensor) -> Wrapped:
    """Defer a row-parallel layer: x [..., K], weight [N, K].

    All chunks are multiplied and sent at once; with sequence parallelism (x [S, ..., K]) as their rows are asked for,
    because the gathers of the next layer share the link.
    """
    found: list[LazyRows] = []

    def forward(_: object) -> Products:
        (x_m, source), group, ranks = deferred.matrix(x), deferred.group, 1
        shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        if deferred.sequence_parallel:
            ranks, shape = group.size(), torch.Size(scattered_shape(x.shape, group.size(), weight.shape[0]))
        x_r = x_m.view(ranks, -1, x_m.shape[1])
        y_m = x_m.new_empty(x_r.shape[1], weight.shape[0])
        reduced = Reduced(y_m, deferred.sizes, group, deferred.sequence_parallel)
        deferred.guard(reduced.pending)
        sender = ChunkSender(reduced, x_r, weight.t(), deferred.sizes, "matmul", source)
        sender.send(1 + AHEAD if deferred.sequence_parallel else len(deferred.sizes))

        def fill(index: int) -> None:
            sender.send(index + 1 + AHEAD)
            reduced.pending.wait_for(index)

        found.append(LazyRows(deferred.sizes, fill))
        return shaped(y_m, shape), None

    return forward, found.pop


def deferred_column(
    deferred: Deferred, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keep: bool
) -> Wrapped:
    """Defer a column-parallel layer: x [..., K], with sequence parallelism [S / R, ..., K]; weight [N, K], bias [N].

    keep: with sequence parallelism, also give the gathered input, unfinished too.
    """
    found: list[LazyRows] = []

    def forward(_: object) -> Products:
        (x_m, source), group, ranks = deferred.matrix(x), deferred.group, 1
        inputs: Rows | GatheredRows
        if deferred.sequence_parallel:
            ranks, inputs = group.size(), GatheredRows(x_m, deferred.sizes, group, source)
            deferred.guard(inputs.pending)
        else:
            inputs = Rows(x_m, deferred.sizes, source)
        y_r = x_m.new_empty(ranks, x_m.shape[0], weight.shape[0])

        def fill(index: int) -> None:
            start, stop = deferred.bounds[index]
            y_c = y_r[:, start:stop]
            with torch.no_grad():
                inputs.multiply(index, weight.t(), y_c, "matmul")
                if bias is not None:
                    y_c.add_(bias)

        found.append(LazyRows(deferred.sizes, fill))
        shape = gathered_shape(x.shape, ranks, weight.shape[0])
        gathered_m = None
        if keep and deferred.sequence_parallel:  # not a view: filling its rows must not count as a change
            gathered_m = shaped(inputs.x_r.flatten(0, 1), (ranks * x_m.shape[0], x_m.shape[1]))
        return shaped(y_r.flatten(0, 1), shape), gathered_m

    return forward, found.pop
