"""A matmul beside an all-to-all: the two operators around attention whose heads ranks exchange.

    all_to_all_matmul    the heads of this rank's tokens come back, and are multiplied by the output projection's weight
    matmul_all_to_all    the projection's gradient is multiplied, and of the product each rank gets its heads

    x_heads [R M, K / R]   this rank's heads, rank after rank the M rows of each rank's tokens
    all-to-all             [R, M, K / R]: from each rank its heads of this rank's tokens
    x_m [M, K]             the heads in their order, which is that of the ranks
    y_m [M, N]             x_m @ w + bias

    d_x_m [M, K]           d_y_m @ w.t(), the heads in their order
    all-to-all             d_x_heads [R M, K / R]: each rank gets its heads of the tokens of all ranks, rank after rank

The first contracts over the heads of all ranks: in groups of heads it would be a sum of sums, of other bits. Each has
two kernels: "npu", one operator of torch_npu (ops/npu.py; not run on an NPU by this project), and "reference", torch's
product and all-to-all in turn.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import torch.distributed as dist

from ascend_parallel.ops import npu
from ascend_parallel.ops.call import ExchangedMatmul
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.npu_limits import exchanged_engine, supports_exchanged
from ascend_parallel.ops.part_exchange import all_to_all
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.record import MATMUL, RECORDING, compute


def all_to_all_matmul(
    x_heads: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, matmul: ExchangedMatmul
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y_m [M, N] and x_m [M, K]: x_heads [R M, K / R], w [K, N], bias [N]. Every rank has the same `matmul`."""
    kernel = exchanged_kernel(matmul)
    with _in_timeline(matmul, kernel, group):
        COUNTS.add(matmul.operator, 1, 1)
        if kernel == "npu":
            return npu.all_to_all_matmul(x_heads, w, bias, group, comm_mode=exchanged_engine(matmul))
        by_rank = _exchanged(x_heads, group, matmul).view(group.size(), -1, x_heads.shape[1])
        x_m = by_rank.transpose(0, 1).flatten(1)
        y_m = compute(MATMUL, "matmul", torch.mm, x_m, w) if bias is None else torch.addmm(bias, x_m, w)
        return y_m, x_m


def matmul_all_to_all(
    d_y_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, matmul: ExchangedMatmul
) -> torch.Tensor:
    """Return d_x_heads [R M, N / R] of the products ``d_y_m @ w``: d_y_m [M, K], w [K, N]; as `all_to_all_matmul`."""
    kernel = exchanged_kernel(matmul)
    with _in_timeline(matmul, kernel, group):
        COUNTS.add(matmul.operator, 1, 1)
        if kernel == "npu":
            return npu.matmul_all_to_all(d_y_m, w, group, comm_mode=exchanged_engine(matmul))
        d_x_m = compute(MATMUL, "matmul", torch.mm, d_y_m, w)
        by_rank = d_x_m.view(len(d_x_m), group.size(), -1).transpose(0, 1)
        return _exchanged(by_rank.flatten(0, 1), group, matmul)


@lru_cache(maxsize=4096)
def exchanged_kernel(matmul: ExchangedMatmul) -> str:
    """Return the kernel that runs a matmul beside an all-to-all, "npu" or "reference"; the same on every rank."""
    return "npu" if supports_exchanged(matmul) is None else "reference"


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup, matmul: ExchangedMatmul) -> torch.Tensor:
    """Return the all-to-all of rows of which each rank gets as many."""
    out, sizes = torch.empty_like(x), [len(x) // group.size()] * group.size()
    pending = Pending(out, matmul.operator, group)
    with pending.launching():
        pending.launch(all_to_all, out, x, sizes, sizes, group)
    return pending.wait()


def _in_timeline(matmul: ExchangedMatmul, kernel: str, group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a context that records a call, if a recorder is active."""
    recorder = RECORDING.recorder
    if recorder is None:
        return nullcontext()
    shape = {"operator": matmul.operator, **dict(zip("mkn", matmul.shape, strict=True))}
    dtype = str(matmul.dtype).removeprefix("torch.")
    fields = {**shape, "dtype": dtype, "kernel": kernel, "chunks": 1}
    return recorder.call(fields, matmul.device, group, fused=kernel == "npu")
