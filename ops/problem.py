"""One call of an operator as plain numbers, checked, and the kernel that is to run it.

`choose` is a pure function of values that are the same on every rank of a group, so that all ranks
take the same kernel and the same chunks without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from ascend_parallel.ops.rows import ROW_TILE, Sizes, split_rows
from ascend_parallel.settings import Settings

ALL_REDUCE = "matmul_all_reduce"
REDUCE_SCATTER = "matmul_reduce_scatter"
ALL_GATHER = "all_gather_matmul"
OPERATORS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)

# K N of a 16-bit matmul below which cutting its rows was seen to change bits (256), with a margin.
SMALLEST_16_BIT_PRODUCT = 4096

# Chunks taken where a fused kernel was asked for, none exists, and COC_PARALLEL_NUM says nothing.
CHUNKS_INSTEAD_OF_FUSED = 4


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on.

    m, k, n
        The matmul ``[m, k] x [k, n]`` this rank computes in all; m counts the gathered rows of
        all_gather_matmul and all rows, before they are scattered, of matmul_reduce_scatter.
    soc
        Name of the chip, for example ``"Ascend910B1"``, where a kernel depends on it; else empty.
    """

    operator: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    device: str
    ranks: int
    soc: str = ""

    @property
    def rows(self) -> int:
        """Rows that are cut: all of them, or those of one rank where rows are scattered or gathered."""
        return self.m if self.operator == ALL_REDUCE else self.m // self.ranks


@dataclass(frozen=True)
class Choice:
    """How a problem is run, and why.

    sizes are the rows of each chunk; bit_exact tells whether the result is known to have the bits of
    a whole matmul and one collective.
    """

    problem: Problem
    kernel: str
    sizes: Sizes
    bit_exact: bool
    reason: str


@lru_cache(maxsize=4096)
def choose(problem: Problem, settings: Settings) -> Choice:
    """Choose kernel and chunks for `problem`; the same on every rank by construction."""
    asked, why = _asked_chunks(problem, settings)
    sizes = split_rows(problem.rows, asked)
    if len(sizes) < asked:
        why += f"; {problem.rows} rows allow {len(sizes)} (multiples of {ROW_TILE} rows)"
    if problem.ranks == 1:
        sizes, why = (problem.rows,), "one rank: nothing to communicate"
    kernel = "chunked" if len(sizes) > 1 else "reference"
    return Choice(problem, kernel, sizes, _bit_exact(problem, len(sizes)), why)


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


def _asked_chunks(problem: Problem, settings: Settings) -> tuple[int, str]:
    if settings.effective_mode == 1:
        return 1, "COC_MODE=1: no chunks"
    own = settings.customized_coc.get((problem.m, problem.k, problem.n))
    if own is not None:
        return own, f"customized_coc: {own} chunks for [{problem.m}, {problem.k}, {problem.n}]"
    chunks = usual_chunks(settings)
    if not settings.fused:
        return chunks, f"COC_PARALLEL_NUM={chunks}"
    return chunks, f"USE_COC_FUSED_KERNEL=1, but no fused kernel exists for {problem.device}: {chunks} chunks instead"


def usual_chunks(settings: Settings) -> int:
    """Return the chunks asked for where no shape has its own count."""
    if settings.effective_mode == 1:
        return 1
    return CHUNKS_INSTEAD_OF_FUSED if settings.fused and settings.num_chunks == 1 else settings.num_chunks


def _bit_exact(problem: Problem, chunks: int) -> bool:
    """Whether the bits are those of one matmul and one collective; shown on CPU with gloo only.

    Sums of two ranks have one order. With more, an all-reduce's order depends on the place in the
    buffer, and our reduce-scatter for gloo sums in rank order, which gloo's does not.
    """
    same_sums = problem.ranks <= 2 or problem.operator == ALL_GATHER
    # In 16 bits torch takes another routine for the smallest products, which a chunk may be and the whole not.
    same_routine = problem.dtype.itemsize > 2 or problem.k * problem.n >= SMALLEST_16_BIT_PRODUCT
    if chunks == 1:
        return same_sums or problem.operator == ALL_REDUCE or problem.device != "cpu"
    aligned = problem.operator == ALL_REDUCE or problem.rows % ROW_TILE == 0
    return problem.device == "cpu" and same_sums and aligned and same_routine
