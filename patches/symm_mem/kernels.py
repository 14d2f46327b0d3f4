"""Kernels of torch's two async tensor-parallel operators, which run this package's overlapped operators.

A [..., K] is gathered or scattered along any of its dimensions. This package's operators do so along the first
dimension: the dimension in question is moved to the front, which copies nothing if A lies in memory like that, as
inductor's pass sees to. Strides of the results are those of torch's Meta kernels, on which compiled code relies.

Torch's operators have no gradients; these kernels have none either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.call import ALL_GATHER, REDUCE_SCATTER
from ascend_parallel.ops.operators import (
    decided,
    gather_sizes,
    rows_of,
    run_all_gather_matmul,
    start_gather_rows,
    start_matmul_reduce_scatter,
    without_autocast,
)
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.patches.symm_mem.devices import GATHER, SCATTER
from ascend_parallel.process_groups.consistency import SettingsAgreement
from ascend_parallel.settings import Settings, current_settings

REDUCE_OPS = ("sum", "avg")


class _Agreements:
    """The agreement on the settings in force: a new one after each `configure`, also to equal settings."""

    def __init__(self) -> None:
        self._settings: Settings | None = None

    def of(self, settings: Settings) -> SettingsAgreement:
        if settings is not self._settings:
            self._settings, self._agreement = settings, SettingsAgreement(settings.shared)
        return self._agreement


_agreements = _Agreements()


@without_autocast
@torch.no_grad()
def all_gather_matmul(
    a_shard: torch.Tensor, bs: Sequence[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return ``A = all_gather(a_shard, gather_dim)`` and ``[A @ b for b in bs]``.

    a_shard  [..., K], this rank's part of A; along the last dimension [..., K / R]
    bs       one or more matrices [K, N_i]; N_i the same on every rank
    returns  A, or None with return_A=False; the products [..., N_i]

    The gather runs under the product with the widest b; the others use the gathered rows. Along the last dimension
    nothing overlaps. Raises `ValueError` for an argument that is not allowed, `DisagreementError` if the ranks'
    settings differ, `CollectiveError` if a rank fails.
    """
    _check_dim(GATHER, "gather_dim", gather_dim, a_shard)
    if not bs:
        raise ValueError(f"symm_mem::{GATHER}: Bs=[] is not allowed: give one matrix or more")
    last = gather_dim == a_shard.ndim - 1
    group, settings = _group_and_settings(group_name)
    for index, b in enumerate(bs):
        _check_matrix(GATHER, f"Bs[{index}]", b, a_shard, a_shard.shape[-1] * (group.size() if last else 1))
    if last:
        a = _gather_columns(a_shard, bs[0], group, settings)
        return a if return_A else None, [_product(a, b) for b in bs]
    x = a_shard.movedim(gather_dim, 0)
    leading = (x.shape[0] * group.size(), *x.shape[1:-1])
    widest = max(range(len(bs)), key=lambda index: bs[index].shape[1])
    keep = return_A or len(bs) > 1
    decision = decided(ALL_GATHER, x, bs[widest], group, settings)
    y_m, a_m = run_all_gather_matmul(x, bs[widest], group, decision, keep)
    products = [y_m if i == widest else _product(a_m, b) for i, b in enumerate(bs)]
    outputs = [y.view(*leading, b.shape[1]).movedim(0, gather_dim) for y, b in zip(products, bs, strict=True)]
    if not return_A:
        return None, outputs
    if group.size() == 1:  # the rows may be a_shard's own; an operator must not return its input
        return a_shard.clone(memory_format=torch.contiguous_format), outputs
    assert a_m is not None
    return a_m.contiguous().view(*leading, x.shape[-1]).movedim(0, gather_dim), outputs


@without_autocast
@torch.no_grad()
def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Return ``reduce_scatter(a @ b, reduce_op, scatter_dim)``: a [..., K], b [K, N].

    reduce_op "avg" divides the sum by the number of ranks. The size of the dimension must be divisible by it. Errors as
    in `all_gather_matmul`.
    """
    _check_dim(SCATTER, "scatter_dim", scatter_dim, a)
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"symm_mem::{SCATTER}: reduce_op={reduce_op!r} is not allowed: {' or '.join(REDUCE_OPS)}")
    _check_matrix(SCATTER, "B", b, a, a.shape[-1])
    group, settings = _group_and_settings(group_name)
    shape = [*a.shape[:-1], b.shape[1]]
    if shape[scatter_dim] % group.size():
        raise ValueError(
            f"symm_mem::{SCATTER}: scatter_dim={scatter_dim} of A @ B {shape} is not allowed: its size must be "
            f"divisible by the {group.size()} ranks of the group"
        )
    shape[scatter_dim] //= group.size()
    if scatter_dim == a.ndim - 1:  # the columns of a @ b are the rows of its transpose
        x, w = b.t(), rows_of(a).t()
        decision = decided(REDUCE_SCATTER, x, w, group, settings)
        y = start_matmul_reduce_scatter(x, w, group, decision).wait().t().reshape(shape)
    else:
        x = a.movedim(scatter_dim, 0)
        decision = decided(REDUCE_SCATTER, x, b, group, settings)
        y_m = start_matmul_reduce_scatter(x, b, group, decision).wait()
        y = y_m.view(shape[scatter_dim], *x.shape[1:-1], shape[-1]).movedim(0, scatter_dim)
    y = y.contiguous()
    return y.div_(group.size()) if reduce_op == "avg" else y


def _product(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    assert a is not None
    return compute(MATMUL, "matmul", torch.matmul, a, b)


def _gather_columns(
    a_shard: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup, settings: OperatorSettings
) -> torch.Tensor:
    """Return A [..., K] of a_shard [..., K / R], contiguous."""
    shape, ranks = a_shard.shape, group.size()
    sizes = gather_sizes(a_shard, b.shape[-1], group, settings)
    stacked = start_gather_rows(a_shard, group, sizes).wait().view(ranks, *shape)
    return compute(BESIDE, "copy", torch.cat, stacked.unbind(), -1)


def _check_dim(operator: str, name: str, dim: int, a: torch.Tensor) -> None:
    if a.ndim < 2:
        raise ValueError(f"symm_mem::{operator}: A of shape {list(a.shape)} is not allowed: two dimensions or more")
    if not 0 <= dim < a.ndim:
        raise ValueError(
            f"symm_mem::{operator}: {name}={dim} is not allowed for A of {a.ndim} dimensions: 0 to {a.ndim - 1}"
        )


def _check_matrix(operator: str, name: str, b: torch.Tensor, a: torch.Tensor, k: int) -> None:
    """Raise `ValueError` unless b is a matrix [k, N] of the floating dtype and the device of a."""
    if b.ndim != 2 or b.shape[0] != k:
        raise ValueError(f"symm_mem::{operator}: {name} of shape {list(b.shape)} is not allowed: [{k}, N]")
    if b.dtype != a.dtype or not a.dtype.is_floating_point:
        raise ValueError(
            f"symm_mem::{operator}: {name} of {b.dtype} is not allowed with A of {a.dtype}: both of one floating dtype"
        )
    if b.device != a.device:
        raise ValueError(f"symm_mem::{operator}: {name} on {b.device} is not allowed with A on {a.device}: one device")


def _group_and_settings(group_name: str) -> tuple[dist.ProcessGroup, OperatorSettings]:
    """Return the group and the settings in force; the ranks compare settings before the group's first collective."""
    group: dist.ProcessGroup = c10d._resolve_process_group(group_name)  # type: ignore[attr-defined,arg-type]
    settings = current_settings()
    if group.size() > 1:
        _agreements.of(settings).confirm(group)
    return group, settings.for_operators
