"""The operators as custom ops ``torch.ops.ascend_parallel.*``, with fake kernels and gradients for tracing.

A group is passed as its ``group_name``, as in torch's functional collectives.
"""
# No `from __future__ import annotations`: torch.library reads the schema from the annotations.

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.operators import (
    decided,
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
    """Return settings for ``[number of chunks]``, or for the rows of each chunk in a longer list."""
    m, k = x.shape[:-1].numel() * ranks, x.shape[-1]
    return _cached_settings(tuple(chunks), (m, k, columns) if len(chunks) != 1 else None)


@lru_cache(maxsize=256)
def _cached_settings(chunks: tuple[int, ...], shape: tuple[int, int, int] | None) -> OperatorSettings:
    if shape is None:
        return OperatorSettings(num_chunks=chunks[0], mode=2)
    return OperatorSettings(customized_coc={shape: chunks}, mode=2)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return group


@torch.library.custom_op("ascend_parallel::matmul_all_reduce", mutates_args=())
def _matmul_all_reduce(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> torch.Tensor:
    group = _group(group_name)
    decision = decided(ALL_REDUCE, x, w, group, _settings(chunks, x, w.shape[-1]))
    pending = start_matmul_all_reduce(x, w, group, decision)
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
    group = _group(group_name)
    decision = decided(ALL_REDUCE, x, w, group, _settings(chunks, x, w.shape[-1]))
    pending = start_matmul_all_reduce(x, w, group, decision)
    return shaped(pending.wait(), (*x.shape[:-1], w.shape[1]))


@torch.library.custom_op("ascend_parallel::matmul_reduce_scatter", mutates_args=())
def _matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]) -> torch.Tensor:
    group = _group(group_name)
    decision = decided(REDUCE_SCATTER, x, w, group, _settings(chunks, x, w.shape[-1]))
    pending = start_matmul_reduce_scatter(x, w, group, decision)
    return shaped(pending.wait(), scattered_shape(x.shape, group.size(), w.shape[1]))


@torch.library.custom_op("ascend_parallel::all_gather_matmul", mutates_args=())
def _all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group_name: str, chunks: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    group = _group(group_name)
    decision = decided(ALL_GATHER, x, w, group, _settings(chunks, x, w.shape[-1], group.size()))
    y_m, gathered_m = run_all_gather_matmul(x, w, group, decision)
    assert gathered_m is not None
    if group.size() == 1:  # a custom op must not return its own input
        gathered_m = gathered_m.clone()
    return (
        shaped(y_m, gathered_shape(x.shape, group.size(), w.shape[1])),
        shaped(gathered_m.contiguous(), gathered_shape(x.shape, group.size(), x.shape[-1])),
    )


_matmul_all_reduce.register_fake(lambda x, w, group_name, chunks: x.new_empty(*x.shape[:-1], w.shape[1]))
_matmul_all_reduce_int8.register_fake(
    lambda x, values, scale, offset, group_size, group_name, chunks: x.new_empty(*x.shape[:-1], values.shape[1])
)
_matmul_reduce_scatter.register_fake(
    lambda x, w, group_name, chunks: x.new_empty(scattered_shape(x.shape, _group(group_name).size(), w.shape[1]))
)


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
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    return (dy @ w.t() if needs_dx else None), (_weight_gradient(x, dy) if needs_dw else None), None, None


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
    """Return ``y = all_reduce(x @ w)``: x [..., K], w [K, N] or an int8 weight, y [..., N] on every rank.

    group
        None: the default group.
    num_chunks
        A number of chunks, or the rows of each chunk: all but the last multiples of 16, their sum the rows that
        are cut (one rank's rows for reduce-scatter and all-gather; columns for an int8 w).

    Differentiable in x, and in w unless w is int8. y is replicated, so dy must be the same on every rank;
    dx and dw are those of the rank's own operands. Raises `ValueError` for operands that do not fit a matmul,
    `CollectiveError` if a rank fails.
    """
    custom_ops, name = torch.ops.ascend_parallel, _name(group)
    if isinstance(w, QuantisedWeight):
        w.refuse_gradients()
        y: torch.Tensor = custom_ops.matmul_all_reduce_int8(
            x, w.values, w.scale, w.offset, w.group_size, name, _chunk_list(num_chunks)
        )
        return y
    y = custom_ops.matmul_all_reduce(x, w, name, _chunk_list(num_chunks))
    return y


def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None, *, num_chunks: int | Sequence[int] = 1
) -> torch.Tensor:
    """Return ``y_shard = reduce_scatter(x @ w)``: x [S, ..., K], w [K, N], y_shard [S / R, ..., N].

    S must be divisible by the number of ranks R. Arguments and errors as in `matmul_all_reduce`.
    """
    y: torch.Tensor = torch.ops.ascend_parallel.matmul_reduce_scatter(x, w, _name(group), _chunk_list(num_chunks))
    return y


def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None, *, num_chunks: int | Sequence[int] = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y = all_gather(x) @ w`` and ``all_gather(x)``: x [S, ..., K], w [K, N], y [S R, ..., N].

    x is gathered along its first dimension. The gathered x [S R, ..., K] carries no gradient. Arguments and errors
    as in `matmul_all_reduce`.
    """
    y, gathered = torch.ops.ascend_parallel.all_gather_matmul(x, w, _name(group), _chunk_list(num_chunks))
    return y, gathered


def _chunk_list(num_chunks: int | Sequence[int]) -> list[int]:
    if isinstance(num_chunks, int):
        return [num_chunks]
    if len(num_chunks) < 2:
        raise ValueError(
            f"num_chunks={list(num_chunks)} is not allowed: give a number, or the rows of two or more chunks"
        )
    return list(num_chunks)


def _name(group: dist.ProcessGroup | None) -> str:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group=None means the default group: call torch.distributed.init_process_group first")
    name: str = group.group_name
    return name
