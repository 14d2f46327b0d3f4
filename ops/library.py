"""The operators as ``torch.ops.ascend_parallel.*``: with fake kernels and gradients, so that they trace.

Groups are named by their ``group_name``, as torch's own functional collectives name them.
"""
# No `from __future__ import annotations`: torch.library reads the schema from the annotations.

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.operators import (
    gathered_shape,
    rows_of,
    run_all_gather_matmul,
    scattered_shape,
    shaped,
    start_matmul_all_reduce,
    start_matmul_reduce_scatter,
)
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.settings import OperatorSettings


def _settings(chunks: Sequence[int], x: torch.Tensor, columns: int, ranks: int = 1) -> OperatorSettings:
    """Return settings for a number of chunks, given as a list of one, or for the rows of each of several."""
    m, k = x.shape[:-1].numel() * ranks, x.shape[-1]
    return _made(tuple(chunks), (m, k, columns) if len(chunks) != 1 else None)


@lru_cache(maxsize=256)
def _made(chunks: tuple[int, ...], shape: tuple[int, int, int] | None) -> OperatorSettings:
    if shape is None:
        return OperatorSettings(num_chunks=chunks[0], mode=2)
    return OperatorSettings(customized_coc={shape: chunks}, mode=2)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return group


@torch.library.custom_op("ascend_parallel::matmul_all_reduce", mutates_args=())
def _matmul_all_reduce(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> torch.Tensor:
    pending = start_matmul_all_reduce(x, w, _group(group_name), _settings(chunks, x, w.shape[-1]))
    return shaped(pending.wait(), (*x.shape[:-1], w.shape[1]))


@torch.library.custom_op("ascend_parallel::matmul_all_reduce_int8", mutates_args=())
def _matmul_all_reduce_int8(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group_size: int,
    group_name: str,
    chunks: Sequence[int],
) -> torch.Tensor:
    w = QuantisedWeight(values, scale, offset, group_size)
    pending = start_matmul_all_reduce(x, w, _group(group_name), _settings(chunks, x, w.shape[-1]))
    return shaped(pending.wait(), (*x.shape[:-1], w.shape[1]))


@torch.library.custom_op("ascend_parallel::matmul_reduce_scatter", mutates_args=())
def _matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> torch.Tensor:
    group = _group(group_name)
    pending = start_matmul_reduce_scatter(x, w, group, _settings(chunks, x, w.shape[-1]))
    return shaped(pending.wait(), scattered_shape(x.shape, group.size(), w.shape[1]))


@torch.library.custom_op("ascend_parallel::all_gather_matmul", mutates_args=())
def _all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    group = _group(group_name)
    y_m, gathered_m = run_all_gather_matmul(x, w, group, _settings(chunks, x, w.shape[-1], group.size()))
    assert gathered_m is not None
    if group.size() == 1:  # an operator may not return its own input
        gathered_m = gathered_m.clone()
    return (
        shaped(y_m, gathered_shape(x.shape, group.size(), w.shape[1])),
        shaped(gathered_m.contiguous(), gathered_shape(x.shape, group.size(), x.shape[-1])),
    )


@_matmul_all_reduce.register_fake
def _(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


@_matmul_all_reduce_int8.register_fake
def _(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group_size: int,
    group_name: str,
    chunks: Sequence[int],
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[1])


@_matmul_reduce_scatter.register_fake
def _(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> torch.Tensor:
    return x.new_empty(scattered_shape(x.shape, _group(group_name).size(), w.shape[1]))


@_all_gather_matmul.register_fake
def _(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = _group(group_name).size()
    shapes = (gathered_shape(x.shape, ranks, w.shape[1]), gathered_shape(x.shape, ranks, x.shape[-1]))
    return x.new_empty(shapes[0]), x.new_empty(shapes[1])


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, ctx.group_name, ctx.chunks = inputs
    ctx.save_for_backward(x, w)


def _save_int8(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, values, scale, offset, ctx.group_size, _, _ = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(values, scale, offset)


def _save_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, w, ctx.group_name, ctx.chunks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], w)


def _weight_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return rows_of(x).t() @ rows_of(dy)


def _all_reduce_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return (dy @ w.t() if wanted[0] else None), (_weight_gradient(x, dy) if wanted[1] else None), None, None


def _all_reduce_int8_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    values, scale, offset = ctx.saved_tensors
    w = QuantisedWeight(values, scale, offset, ctx.group_size)
    return dy @ w.dequantise(ctx.x_dtype).t(), None, None, None, None, None, None


def _reduce_scatter_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    dx, gathered_dy = torch.ops.ascend_parallel.all_gather_matmul(dy.contiguous(), w.t(), ctx.group_name, ctx.chunks)
    return dx, (_weight_gradient(x, gathered_dy) if ctx.needs_input_grad[1] else None), None, None


def _all_gather_backward(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    gathered, w = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.ascend_parallel.matmul_reduce_scatter(dy.contiguous(), w.t(), ctx.group_name, ctx.chunks)
    return dx, (_weight_gradient(gathered, dy) if ctx.needs_input_grad[1] else None), None, None


_matmul_all_reduce.register_autograd(_all_reduce_backward, setup_context=_save_operands)
_matmul_all_reduce_int8.register_autograd(_all_reduce_int8_backward, setup_context=_save_int8)
_matmul_reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_save_operands)
_all_gather_matmul.register_autograd(_all_gather_backward, setup_context=_save_gathered)


def matmul_all_reduce(
    x: torch.Tensor, w: Weight, group: dist.ProcessGroup | None = None, *, num_chunks: int | Sequence[int] = 1
) -> torch.Tensor:
    """Sum ``x w`` over the ranks of `group`: x [..., K], w [K, N], perhaps in int8, give [..., N] on every rank.

    num_chunks is a number of chunks, or the rows of each: all but the last multiples of 16, together the
    rows that are cut (for reduce-scatter and all-gather those of one rank; columns for an int8 w).

    Differentiable in x and in a w that is not in int8: the result counts as replicated, so its gradient
    has to be the same on every rank, and each rank's dX and dW are those of its own operands. `group` is
    the default group if None. Raises `ValueError` for operands that are no matmul, `CollectiveError` if a rank fails.
    """
    kinds, name = torch.ops.ascend_parallel, _name(group)
    if isinstance(w, QuantisedWeight):
        w.refuse_gradients()
        y: torch.Tensor = kinds.matmul_all_reduce_int8(
            x, w.values, w.scale, w.offset, w.group_size, name, _listed(num_chunks)
        )
        return y
    y = kinds.matmul_all_reduce(x, w, name, _listed(num_chunks))
    return y


def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None, *, num_chunks: int | Sequence[int] = 1
) -> torch.Tensor:
    """Sum ``x w`` over ranks and keep this rank's rows: x [S, ..., K], w [K, N] give [S / R, ..., N].

    S, the first dimension, must be divisible by the number of ranks. Otherwise as `matmul_all_reduce`.
    """
    y: torch.Tensor = torch.ops.ascend_parallel.matmul_reduce_scatter(x, w, _name(group), _listed(num_chunks))
    return y


def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None, *, num_chunks: int | Sequence[int] = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather x along its first dimension, times w: x [S, ..., K], w [K, N] give [S R, ..., N].

    Also returns the gathered x, [S R, ..., K], which carries no gradient. Otherwise as `matmul_all_reduce`.
    """
    y, gathered = torch.ops.ascend_parallel.all_gather_matmul(x, w, _name(group), _listed(num_chunks))
    return y, gathered


def _listed(num_chunks: int | Sequence[int]) -> list[int]:
    if isinstance(num_chunks, int):
        return [num_chunks]
    if len(num_chunks) < 2:
        raise ValueError(
            f"num_chunks={list(num_chunks)} is not allowed: give a number, or the rows of two or more chunks"
        )
    return list(num_chunks)


def _name(group: dist.ProcessGroup | None) -> str:
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise ValueError("group=None means the default group: call torch.distributed.init_process_group first")
    name: str = chosen.group_name
    return name
