"""The backward passes of linear layers with sequence parallelism: a gather, an input gradient and a weight gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from ascend_parallel.ops import chunk_loop
from ascend_parallel.ops.call import ALL_GATHER, REDUCE_SCATTER
from ascend_parallel.ops.loop_operators import (
    Gradients,
    run_all_gather,
    run_column_sequence_gradients,
    run_row_sequence_gradients,
)
from ascend_parallel.ops.operators import (
    decided,
    gather_sizes,
    rows_of,
    run_all_gather_matmul,
    start_gather_rows,
    start_matmul_reduce_scatter,
)
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.unfinished import UnfinishedTensor, postponed, unfinished
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.overlap.layer_shape import BACKWARD

Gathered = Callable[[], torch.Tensor]
"""Returns the whole input of a layer, once its rows are gathered."""


def column_sequence_backward(
    dy: torch.Tensor,
    kept: torch.Tensor | None,
    weight: torch.Tensor | None,
    layer: ParallelLinear,
    layout: str,
    *,
    bias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return ``dx_shard_m = reduce_scatter(dy @ weight)``, ``dw = dy.t() @ all_gather(x_shard_m)``, and None or db.

    The reduce-scatter runs under the weight gradient's matmul. bias: loops in C++, if they run it, return db too.
    """
    if kept is not None and weight is not None and layer.multiplies_gradient:
        found = _in_loops(dy, kept, weight, layer, layout, bias)
        if found is not None:
            return found
    with ExitStack() as running:
        pending_dx, gathered = start_column_backward(running, dy, kept, weight, layer, layout)
        if pending_dx is None:
            return None, weight_gradient_of(layer, kept, dy, gathered), None
        dx, dw = gradients_under(layer, pending_dx, dy, kept, gathered)
        running.pop_all()  # rows that are left are waited for where they are read
    return dx, dw, None


def _in_loops(
    dy: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, layer: ParallelLinear, layout: str, bias: bool
) -> Gradients | None:
    """Return the gradients by loops in C++, the gather first; None: no loops run it."""
    group, settings = layer.group, layer.settings
    if isinstance(chunk_loop.LOOP, str) or not settings.recompute_all_gather or settings.order == "compute_first":
        return None
    known = layer.known_for(BACKWARD, dy, weight) if layer.leaves_rows else layer.known
    decision = decided(REDUCE_SCATTER, dy, weight, group, settings, known, layout=layout, parts=layer.parts)
    gather_rows = gather_sizes(kept, dy.shape[-1], group, settings, layer.known)
    return run_column_sequence_gradients(dy, weight, kept, group, decision, gather_rows, bias=bias)


def start_column_backward(
    running: ExitStack,
    dy: torch.Tensor,
    kept: torch.Tensor | None,
    weight: torch.Tensor | None,
    layer: ParallelLinear,
    layout: str,
    product: torch.Tensor | None = None,
) -> tuple[Pending | None, Gathered | None]:
    """Start the gather of `kept` and the input gradient ``reduce_scatter(dy @ weight)``, which `running` ends.

    They are independent, so either can start first. With the gather first (the default) the gather runs under the input
    gradient's matmul. `product`: dy @ weight, if it has been multiplied; of dy only the shape counts then. The second
    result is None where `kept` is whole, or nobody needs it.
    """
    group, settings = layer.group, layer.settings

    def start_gather() -> Pending | None:
        if kept is None or not settings.recompute_all_gather:
            return None
        return running.push(
            start_gather_rows(kept, group, gather_sizes(kept, dy.shape[-1], group, settings, layer.known))
        )

    def start_input_gradient(after: Pending | None) -> Pending | None:
        if weight is None:
            return None
        known = layer.known_for(BACKWARD, dy, weight)
        decision = decided(REDUCE_SCATTER, dy, weight, group, settings, known, layout=layout, parts=layer.parts)
        return running.push(start_matmul_reduce_scatter(dy, weight, group, decision, after, product=product))

    if settings.order == "compute_first":
        pending_dx, pending_x = start_input_gradient(None), start_gather()
    else:
        pending_x = start_gather()
        pending_dx = start_input_gradient(pending_x)
    return pending_dx, None if pending_x is None else pending_x.wait


def gradients_under(
    layer: ParallelLinear,
    pending_dx: Pending,
    dy: torch.Tensor,
    kept: torch.Tensor | None,
    gathered: Gathered | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dx and dw of a column layer, whose weight gradient runs under the collectives of dx.

    `kept` and `gathered` as of `weight_gradient_of`. If dx may be unfinished, dw is postponed: it then runs under the
    collectives that wait for rows of dx, too. If dw fails, the collectives of dx are waited for.
    """
    try:
        if not layer.may_leave(pending_dx):
            dw = weight_gradient_of(layer, kept, dy, gathered)
            return pending_dx.wait(), dw
        dx = unfinished(pending_dx, layer.leaves_rows, "region backward")
        return dx, postponed_weight_gradient(layer, kept, dy, gathered)
    except BaseException:
        pending_dx.drain()
        raise


def row_sequence_backward(
    dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, layer: ParallelLinear, layout: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``dx_shard_k = all_gather(dy_shard_m) @ weight`` and ``dw = all_gather(dy_shard_m).t() @ x``.

    With `split_weight_gradient` dw is summed chunk by chunk under the gather of the next chunks, if there are chunks.
    """
    group, settings = layer.group, layer.settings
    if x is None or not settings.split_weight_gradient:
        decision = decided(ALL_GATHER, dy, weight, group, settings, layer.known, layout=layout, parts=layer.parts)
        whole = None
        if x is None or not layer.multiplies_gradient:
            whole = run_all_gather(dy, weight, group, decision, x is not None)
        elif (found := run_row_sequence_gradients(dy, weight, x, group, decision)) is not None:
            return found
        dx, dy_m = run_all_gather_matmul(dy, weight, group, decision, x is not None) if whole is None else whole
        return dx, None if dy_m is None else postponed_weight_gradient(layer, x, dy_m)
    x_r, parts = rows_of(x.contiguous()).view(group.size(), -1, x.shape[-1]), layer.weight_gradient.parts()

    def add(rank: int, rows: slice, dy_c: torch.Tensor) -> None:
        parts.add(x_r[rank, rows], dy_c)

    decision = decided(ALL_GATHER, dy, weight, group, settings, layer.known, layout=layout)
    dx, dy_m = run_all_gather_matmul(dy, weight, group, decision, each=add)
    if parts.begun:
        return dx, parts.total()
    return dx, None if dy_m is None else postponed_weight_gradient(layer, x, dy_m)


def weight_gradient_of(
    layer: ParallelLinear,
    kept: torch.Tensor | None,
    dy: torch.Tensor,
    gathered: Gathered | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return dw from contiguous rows, or None if x was not kept: the weight then requires no gradient.

    kept: x, or with `gathered`, which returns whole x, its rows alone.
    """
    if kept is None:
        return None
    x_m, dy_m = _finished_rows(kept if gathered is None else gathered()), _finished_rows(dy)
    product = layer.arithmetic.weight_product(layer.kind, layer.group.size(), layer.parts)
    blocks = () if product is None else (product,)  # a program's own class may not take any
    return compute(MATMUL, "weight gradient", layer.weight_gradient.compute, x_m, dy_m, out, *blocks)


def _finished_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as contiguous rows [M, K], all of them there."""
    x = (x.finished() if isinstance(x, UnfinishedTensor) else x).contiguous()
    return x if x.ndim == 2 else x.view(x.shape[:-1].numel(), x.shape[-1])


def bias_gradient_of(layer: ParallelLinear, dy: torch.Tensor) -> torch.Tensor:
    """Return db [N] of a layer: dy [..., N]."""
    row_sum = layer.arithmetic.bias_sum(layer.group.size(), layer.parts)
    return layer.weight_gradient.bias(rows_of(dy.contiguous()), *(() if row_sum is None else (row_sum,)))


def postponed_weight_gradient(
    layer: ParallelLinear,
    kept: torch.Tensor | None,
    dy: torch.Tensor,
    gathered: Gathered | None = None,
) -> torch.Tensor | None:
    """Return dw, in a region postponed: it then runs under the next collectives that are waited for.

    `kept` and `gathered` as of `weight_gradient_of`.
    """
    if kept is None:
        return None
    if not layer.postpones_weight_gradient:
        return weight_gradient_of(layer, kept, dy, gathered)
    dy_m = _finished_rows(dy)
    dw = kept.new_empty(dy_m.shape[1], kept.shape[-1])

    def write() -> None:
        weight_gradient_of(layer, kept, dy_m, gathered, dw)

    return postponed(dw, write, (kept, dy_m), "a weight gradient")
