"""One call of an operator as plain numbers, checked: all that the choice of a kernel may depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

ALL_REDUCE = "matmul_all_reduce"
REDUCE_SCATTER = "matmul_reduce_scatter"
ALL_GATHER = "all_gather_matmul"
OPERATORS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on.

    m, k, n
        The matmul ``[m, k] x [k, n]`` this rank computes in all; m counts the gathered rows of
        all_gather_matmul and all rows, before they are scattered, of matmul_reduce_scatter.
    soc
        Name of the chip, for example ``"Ascend910B1"``, where a kernel depends on it; else empty.
    deterministic
        Whether sums over ranks have to be taken in rank order.
    antiquant, group_size
        The grain of the scales of an int8 weight, "tensor", "channel" or "group" (then of `group_size`
        elements of K), or an empty text for a weight of the operands' dtype.
    shm
        Why the group cannot share memory, or None if it can: one answer for all its ranks.
    """

    operator: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    device: str
    ranks: int
    soc: str = ""
    shm: str | None = "the group was not asked"
    deterministic: bool = False
    antiquant: str = ""
    group_size: int = 0

    @property
    def rows(self) -> int:
        """Rows that are cut: all of them, or those of one rank where rows are scattered or gathered."""
        return self.m if self.operator == ALL_REDUCE else self.m // self.ranks


def problem_of(operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Problem:
    """Check the operands of an operator and describe the call.

    x [..., K] and w [K, N] share a floating dtype and a device. Rows are scattered and gathered along
    the first dimension of x, which therefore is not the last one, and which matmul_reduce_scatter
    needs to be divisible by the number of ranks. Raises `ValueError` for anything else.
    """
    ranks = group.size()
    check_operands(operator, x, w)
    if operator != ALL_REDUCE and x.dim() < 2:
        raise ValueError(f"{operator}: x has shape {list(x.shape)}; rows need a dimension before the last")
    if operator == REDUCE_SCATTER and x.shape[0] % ranks:
        raise ValueError(
            f"{operator}: the first dimension of x, {x.shape[0]}, is not divisible by the {ranks} ranks of the group; "
            "pad the sequence to a multiple of it"
        )
    m = x.shape[:-1].numel() * (ranks if operator == ALL_GATHER else 1)
    return Problem(operator, m, w.shape[0], w.shape[1], x.dtype, x.device.type, ranks)


def check_operands(operator: str, x: torch.Tensor, w: torch.Tensor) -> None:
    """Raise `ValueError` unless x [..., K] and w [K, N] are of one floating dtype, on one device, and local."""
    if any(type(operand).__name__ == "DTensor" for operand in (x, w)):
        raise ValueError(f"{operator}: a DTensor is no rank's own operand; give its to_local()")
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"{operator}: x {list(x.shape)} times w {list(w.shape)} is no matmul of [..., K] and [K, N]")
    if x.dtype != w.dtype or not x.dtype.is_floating_point:
        raise ValueError(f"{operator}: x is {x.dtype} and w is {w.dtype}; both must be of one floating dtype")
    if x.device != w.device:
        raise ValueError(f"{operator}: x is on {x.device} and w on {w.device}; both must be on one device")
