"""The operators that multiply and communicate, with the limits that op-plugin's pages name (of November 2026).

Each checks its arguments as documented: the real meta kernels check nothing, so a mistake of a caller shows here.
"""

import ctypes
import os
from typing import Any

import torch

from .table import kernel, library

Tensor = torch.Tensor
HCCL_TYPES = {torch.float32: 4, torch.float16: 3, torch.bfloat16: 11, torch.int32: 2, torch.int64: 5, torch.int8: 0}
FLOATS = (torch.float16, torch.bfloat16)
# Numbers of ranks by operator: of A2, of A3 (no all-reduce), and of 950.
RANKS = {
    "MatmulAllReduce": {"A2": (1, 2, 4, 8), "A3": (), "950": (1, 2, 4, 8, 16, 32, 64)},
    "MatmulReduceScatter": {"A2": (2, 4, 8), "A3": (2, 4, 8, 16), "950": (2, 4, 8, 16, 32, 64)},
    "AllGatherMatmul": {"A2": (2, 4, 8), "A3": (2, 4, 8, 16), "950": (2, 4, 8, 16, 32, 64)},
}
AIV_BUFFER = 200  # MB


def generation() -> str:
    """Return the generation of the emulated chip."""
    name = os.environ.get("EMULATED_ASCEND_SOC") or "Ascend910B1"
    return "950" if "950" in name else "A3" if "910_93" in name else "A2"


def needs_buffer(operator: str) -> None:
    """Refuse a communication buffer that is too small for an engine of vector cores."""
    size = int(os.environ.get("HCCL_BUFFSIZE") or AIV_BUFFER)
    if size < AIV_BUFFER:
        raise ValueError(f"{operator}: a communication buffer of {size} MB; at least {AIV_BUFFER} are needed for aiv")


def collective(name: str, group: str, x: Tensor, out: Tensor, count: int) -> None:
    """Run a collective of the operator's group on the kernel's thread."""
    error = ctypes.create_string_buffer(2000)
    failed = library().emulated_fused(
        name.encode(), group.encode(), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_uint64(count), HCCL_TYPES[x.dtype], error, ctypes.c_size_t(2000),
    )  # fmt: skip
    if failed:
        raise RuntimeError(error.value.decode())


def ranks_of(operator: str, group: str) -> int:
    """Return the ranks of a group by its HCCL name; only some numbers are documented."""
    ranks = library().emulated_ranks(group.encode())
    if not ranks:
        raise ValueError(f"{operator}: no group has the HCCL name {group!r}")
    if ranks not in (allowed := RANKS[operator][generation()]):
        raise ValueError(f"{operator}: {ranks} ranks; allowed are {allowed}")
    return ranks


def check(operator: str, x1: Tensor, x2: Tensor, bias: Any, reduction: str, turn: int, adds_bias: bool = False) -> None:
    """Refuse what the pages exclude; adds_bias: a version of the operator that takes a bias."""
    ranked = x1.dim() == 2 or (operator == "MatmulAllReduce" and x1.dim() == 3)
    if not ranked or x2.dim() != 2 or x1.shape[-1] != x2.shape[0]:
        raise ValueError(f"{operator}: x1 {tuple(x1.shape)}, x2 {tuple(x2.shape)}")
    if x1.dtype not in FLOATS or x2.dtype != x1.dtype:
        raise ValueError(f"{operator}: x1 {x1.dtype}, x2 {x2.dtype}; allowed are fp16 and bf16, both alike")
    if not x1.is_contiguous():
        raise ValueError(f"{operator}: x1 has strides {x1.stride()}; it must not be transposed")
    if not (x2.is_contiguous() or x2.t().is_contiguous()):
        raise ValueError(f"{operator}: x2 has strides {x2.stride()}")
    if reduction != "sum" or turn:
        raise ValueError(f"{operator}: reduce_op {reduction!r}, comm_turn {turn}; allowed are 'sum' and 0")
    k = x1.shape[-1]
    if operator != "MatmulAllReduce" and not 256 <= k < 65535:
        raise ValueError(f"{operator}: K is {k}; allowed is 256 to 65534")
    if bias is not None and bias.numel():
        if operator != "MatmulAllReduce" and not adds_bias:
            raise ValueError(f"{operator}: a bias is not supported")
        if bias.dim() != 1 or bias.dtype != x1.dtype:
            raise ValueError(f"{operator}: a bias of {bias.dim()} dimensions in {bias.dtype}; it has to have one")


def product(x1: Tensor, x2: Tensor) -> Tensor:
    """Multiply in fp32, round once."""
    return (x1.float() @ x2.float()).to(x1.dtype).contiguous()


def matmul_all_reduce(
    x1: Tensor, x2: Tensor, bias: Any, group: str, reduction: str, turn: int, mode: int, out: Tensor
) -> None:
    """Write sum_r(x1 @ x2 + bias)."""
    matmul_all_reduce_added(x1, x2, bias, None, group, reduction, turn, mode, out)


def matmul_all_reduce_added(
    x1: Tensor, x2: Tensor, bias: Any, x3: Any, group: str, reduction: str, turn: int, mode: int, out: Tensor
) -> None:
    """Write sum_r(x1 @ x2 + bias + x3)."""
    check("MatmulAllReduce", x1, x2, bias, reduction, turn)
    ranks_of("MatmulAllReduce", group)
    y = product(x1, x2)
    for added in (bias, x3):
        if added is not None and added.numel():
            y = (y + added).contiguous()
    collective("all-reduce", group, y, y, y.numel())
    out.copy_(y)


def matmul_reduce_scatter(
    x1: Tensor, x2: Tensor, bias: Any, group: str, reduction: str, turn: int, mode: int, out: Tensor
) -> None:
    """Write this rank's rows of sum_r(x1 @ x2)."""
    check("MatmulReduceScatter", x1, x2, bias, reduction, turn)
    scattered(x1, x2, bias, group, out)


def scattered(x1: Tensor, x2: Tensor, bias: Any, group: str, out: Tensor) -> None:
    """Write this rank's rows of sum_r(x1 @ x2 + bias)."""
    ranks = ranks_of("MatmulReduceScatter", group)
    if x1.shape[0] % ranks:
        raise ValueError(f"MatmulReduceScatter: {x1.shape[0]} rows are not divisible by {ranks} ranks")
    y = product(x1, x2)
    if bias is not None and bias.numel():
        y = (y + bias).contiguous()
    own = torch.empty(out.shape, dtype=out.dtype)
    collective("reduce-scatter", group, y, own, own.numel())
    out.copy_(own)


def all_gather_matmul(
    x1: Tensor, x2: Tensor, bias: Any, group: str, index: int, turn: int, mode: int, out: Tensor, gathered: Any
) -> None:
    """Write gather(x1) @ x2, and the gathered rows."""
    check("AllGatherMatmul", x1, x2, bias, "sum", turn)
    ranks = ranks_of("AllGatherMatmul", group)
    if index:
        raise ValueError(f"AllGatherMatmul: gather_index {index}; allowed is 0")
    rows = torch.empty((x1.shape[0] * ranks, x1.shape[1]), dtype=x1.dtype)
    collective("all-gather", group, x1, rows, x1.numel())
    out.copy_(product(rows, x2))
    if gathered is not None and gathered.numel():
        gathered.copy_(rows)


kernel("MatmulAllReduce", "ttoccii t", matmul_all_reduce)
kernel("MatmulAllReduceV2", "ttooccii t", matmul_all_reduce_added)
kernel("MatmulReduceScatter", "ttoccii t", matmul_reduce_scatter)
kernel("AllGatherMatmul", "ttociii to", all_gather_matmul)
