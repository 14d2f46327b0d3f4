"""The collectives of `column_linear` and `row_linear` around a matmul that the caller computes.

A program may put a function of its own in place of a layer's matmul, on one rank alone: a monitor, a quantiser, a mode.
The function gets and gives whole tensors, with gradients. Around it run the collectives of the overlapped layers, in
their number, order and sizes, so that ranks without such a function go on as always. A function may leave its product
to the collective (ops/deferred.py), which multiplies it in chunks, and its gradient under the gather of backward; no
other matmul overlaps here.

column  `enter` before the matmul: the identity, or with sequence parallelism the gather; backward sums dx
row     `leave` after the matmul: the sum over ranks; with sequence parallelism backward gathers dy

Fused kernels see whether their operands are alike on all ranks: there a function on one rank alone is an error.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE
from ascend_parallel.ops.deferred import DeferredProduct, GatheredGradient
from ascend_parallel.ops.operators import (
    decided,
    gather_sizes,
    gathered_shape,
    run_all_gather_matmul,
    shaped,
    start_gather_rows,
    start_matmul_all_reduce,
)
from ascend_parallel.ops.probing import ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.unfinished import finished
from ascend_parallel.overlap.choices import cast_by_autocast
from ascend_parallel.overlap.layer import ParallelLinear, in_forward, layer_backward
from ascend_parallel.overlap.layer_shape import BACKWARD
from ascend_parallel.overlap.linear import row_forward
from ascend_parallel.overlap.sequence_backward import start_column_backward


def enter_column(
    x: torch.Tensor,
    weight_shard_n: torch.Tensor,
    layer: ParallelLinear,
    products: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the whole input [..., K] of a column layer's matmul; its gradient is this rank's part of the sum.

    x               [..., K], the same on every rank; with sequence parallelism [S / R, ..., K], this rank's rows
    weight_shard_n  [N / R, K]: only shape, dtype and whether it requires a gradient count
    products        gets the product [..., N / R] of the gathered input and the weight, if there is a gather, without
                    gradients: it is multiplied under the gather
    """
    x, weight, weight_grad = cast_by_autocast(x), cast_by_autocast(weight_shard_n), weight_shard_n.requires_grad
    if x.requires_grad:  # else backward has to come here for the weight's sake
        weight = weight.detach()
    entered: torch.Tensor = _Enter.apply(x, weight, weight_grad, layer, products)  # type: ignore[no-untyped-call]
    return entered


def leave_row(
    product: torch.Tensor,
    x_shard_k: torch.Tensor,
    weight_shard_k: torch.Tensor,
    layer: ParallelLinear,
    batch_first: bool = False,
) -> torch.Tensor:
    """Return the sum over ranks of a row layer's product [..., N]; with sequence parallelism this rank's rows of it.

    x_shard_k       [..., K / R]: only shape, dtype and whether it requires a gradient count
    weight_shard_k  [N, K / R]: the same; of a product that is deferred, its weight
    batch_first     with sequence parallelism: the first two dimensions of the product alone are swapped
    """
    x, weight = cast_by_autocast(x_shard_k).detach(), cast_by_autocast(weight_shard_k).detach()
    input_grad = x_shard_k.requires_grad
    y: torch.Tensor = _Leave.apply(product.to(x.dtype), x, weight, input_grad, layer, batch_first)  # type: ignore[no-untyped-call]
    return y


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_grad: bool,
        layer: ParallelLinear,
        products: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return x, or its gathered rows."""
        with in_forward(ctx, "column", x):
            x = finished(x)
            ctx.layer, ctx.weight, ctx.shape = layer.kept_for_backward, weight.detach(), x.shape
            gathers = layer.sequence_parallel and layer.settings.recompute_all_gather and weight_grad
            ctx.save_for_backward(x if gathers else None)
            if not layer.sequence_parallel:
                return x.view_as(x)
            layer.about_to_communicate()
            group = layer.group
            multiplies, w = products is not None, weight.detach().t()
            decision = decided(
                ALL_GATHER, x, w, group, layer.settings, layer.known, layout=TRANSPOSED, parts=layer.parts
            )
            y_m, x_m = run_all_gather_matmul(x, w, group, decision, multiplies=multiplies)
            assert x_m is not None
            if products is not None:
                products.append(shaped(y_m, gathered_shape(x.shape, group.size(), w.shape[1])))
            return shaped(x_m, gathered_shape(x.shape, group.size(), x.shape[-1]))

    @staticmethod
    @layer_backward("column")
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[Any, ...]:
        """Return the sum of dx over ranks, or this rank's rows of it."""
        layer, (kept,) = ctx.layer.in_backward, ctx.saved_tensors
        if not (layer.sequence_parallel or layer.reduce_input_grad):
            return dx, None, None, None, None
        if isinstance(dx, DeferredProduct) and dx.multiply_kept() and dx.multiplied:  # by a hook
            dx = dx.finished().clone()  # the sum is not in what it keeps
        summed = _sum(layer, _product(dx), kept, ctx.weight, ctx.needs_input_grad[0])
        return None if summed is None else summed.view(ctx.shape), None, None, None, None


def _product(y: torch.Tensor) -> torch.Tensor:
    """Return the operand of a collective's sum: rows that lie in order, or a product that it multiplies itself."""
    return y.contiguous() if isinstance(y, DeferredProduct) and not y.multiplied else finished(y).contiguous()


def _sum(
    layer: ParallelLinear, dx: torch.Tensor, kept: torch.Tensor | None, weight: torch.Tensor, wanted: bool
) -> torch.Tensor | None:
    """Run the collectives of a column layer's backward."""
    dy = dx.new_empty(1).expand(*dx.shape[:-1], weight.shape[0])  # its shape counts
    if not layer.sequence_parallel:
        if not wanted:
            return None
        layer.about_to_communicate()
        group, known = layer.group, layer.known_for(BACKWARD, dy, weight)
        decision = decided(ALL_REDUCE, dy, weight, group, layer.settings, known, layout=ROW_MAJOR, parts=layer.parts)
        return start_matmul_all_reduce(dy, weight, group, decision, product=dx).wait()
    with ExitStack() as running:
        pending, gathered = start_column_backward(running, dy, kept, weight if wanted else None, layer, ROW_MAJOR, dx)
        if gathered is not None:  # the other ranks' weight gradients need this rank's rows
            gathered()
        return None if pending is None else pending.wait()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        input_grad: bool,
        layer: ParallelLinear,
        batch_first: bool,
    ) -> torch.Tensor:
        """Return the sum over ranks."""
        product = _swapped(product) if batch_first else product
        ctx.layer, ctx.weight, ctx.shape = layer.kept_for_backward, weight, product.shape
        ctx.input_grad, ctx.dtype, ctx.batch_first = input_grad, x.dtype, batch_first
        wanted = isinstance(product, DeferredProduct) and not product.multiplied and product.wants_dx
        ctx.multiplies = wanted and layer.sequence_parallel
        # `RowLinear` saves its operands as its forward returns, behind the collective. A checkpoint computes the
        # forward again where these are asked for, and ends where they are saved: so something is saved here too, and
        # all ranks come to the collective alike. Hooks may read what is saved.
        ctx.save_for_backward(x.new_zeros(1))
        with in_forward(ctx, "row", product):
            return row_forward(x, weight, layer, _product(product))

    @staticmethod
    @layer_backward("row")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Return dy, with sequence parallelism gathered: under the input gradient, of a product that was deferred."""
        _ = ctx.saved_tensors  # before this rank communicates: a checkpoint computes the forward again here
        layer, weight = ctx.layer.in_backward, ctx.weight
        dy = finished(dy).to(ctx.dtype)
        if not layer.sequence_parallel:
            return dy, *[None] * 5
        if not ctx.input_grad:
            sizes = gather_sizes(dy, weight.shape[1], layer.group, layer.settings, layer.known)
            rows = start_gather_rows(dy, layer.group, sizes).wait().view(ctx.shape)
            return (_swapped(rows) if ctx.batch_first else rows), *[None] * 5
        group, parts = layer.group, layer.parts
        decision = decided(ALL_GATHER, dy, weight, group, layer.settings, layer.known, layout=ROW_MAJOR, parts=parts)
        dx_m, rows_m = run_all_gather_matmul(dy, weight, group, decision, multiplies=ctx.multiplies)
        assert rows_m is not None
        rows = rows_m.view(ctx.shape)
        rows = _swapped(rows) if ctx.batch_first else rows
        if ctx.multiplies:
            dx = dx_m.view(*ctx.shape[:-1], -1)
            rows = GatheredGradient(rows, [_swapped(dx) if ctx.batch_first else dx])
        return rows, *[None] * 5


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, ...] as contiguous [S, B, ...], or back."""
    return x.transpose(0, 1).contiguous()
