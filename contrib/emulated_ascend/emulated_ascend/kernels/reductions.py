"""Sums, extremes, softmax, scans, sorts, and creation by a range."""

from typing import Any

import torch

from .table import ShapedTensor, kernel, result, results

aten = torch.ops.aten

kernel("ReduceSum", "tIbit", lambda x, dims, keep, dtype, out: out.copy_(torch.sum(x, dims, keep, dtype=out.dtype)))
kernel("Mean", "tIbit", lambda x, dims, keep, dtype, out: out.copy_(torch.mean(x, dims, keep, dtype=out.dtype)))
result("Prod", "tit", lambda x, dtype: torch.prod(x))
result("ProdDim", "tibit", lambda x, dim, keep, dtype: torch.prod(x, dim, keep))
result("Max", "tt", torch.max)
result("Min", "tt", torch.min)
result("Amax", "tIbt", torch.amax)
result("Amin", "tIbt", torch.amin)
results("MaxDim", "tibtt", 2, lambda x, dim, keep: torch.max(x, dim, keep))
results("MinDim", "tibtt", 2, lambda x, dim, keep: torch.min(x, dim, keep))
result("ArgMax", "tibt", lambda x, dim, keep: torch.argmax(x, dim, keep))
result("ArgMin", "tibt", lambda x, dim, keep: torch.argmin(x, dim, keep))
result("LogSumExp", "tIbt", torch.logsumexp)
result(
    "VarCorrection", "tpibt", lambda x, dims, correction, keep: torch.var(x, dims, correction=correction, keepdim=keep)
)
result("Std", "tpibt", lambda x, dims, correction, keep: torch.std(x, dims, correction=correction, keepdim=keep))
results(
    "VarMean", "tIibtt", 2,
    lambda x, dims, correction, keep: torch.var_mean(x, dims or None, correction=correction, keepdim=keep),
)  # fmt: skip
results("AminmaxAll", "ttt", 2, torch.aminmax)
results("AminmaxDim", "tibtt", 2, lambda x, dim, keep: torch.aminmax(x, dim=dim, keepdim=keep))
results(
    "Aminmax", "tIbtt", 2, lambda x, dims, keep: (torch.amin(x, dims, keepdim=keep), torch.amax(x, dims, keepdim=keep))
)
result("ReduceNansum", "tIbit", lambda x, dims, keep, dtype: torch.nansum(x, dims or None, keep))
result("Median", "tt", torch.median)
results("MedianDim", "tibtt", 2, lambda x, dim, keep: torch.median(x, dim, keep))
kernel("Equal", "ttt", lambda a, b, out: out.fill_(torch.equal(a, b)))


def over(reduce: Any, x: torch.Tensor, dims: tuple[int, ...], keep: bool) -> torch.Tensor:
    """Reduce bools over some dimensions; over all of them if none is named."""
    values = x.bool()
    for dim in sorted((dim % max(1, x.dim()) for dim in dims or range(x.dim())), reverse=True):
        values = reduce(values, dim, keep) if x.dim() else values
    return values


result("All", "tIbt", lambda x, dims, keep: over(torch.all, x, dims, keep))
result("Any", "tIbt", lambda x, dims, keep: over(torch.any, x, dims, keep))

kernel("Softmax", "tit", lambda x, dim, out: out.copy_(torch.softmax(x, dim, dtype=out.dtype)))
kernel("LogSoftmax", "tit", lambda x, dim, out: out.copy_(torch.log_softmax(x, dim, dtype=out.dtype)))
result("SoftmaxBackward", "ttit", lambda grad, y, dim: aten._softmax_backward_data(grad, y, dim, y.dtype))
result("LogSoftmaxBackward", "ttit", lambda grad, y, dim: aten._log_softmax_backward_data(grad, y, dim, y.dtype))


def scaled_masked_softmax(x: torch.Tensor, mask: torch.Tensor, scale: float, triangle: bool) -> torch.Tensor:
    """Softmax over the last dimension of scaled scores, of which true in the mask leaves none."""
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1) if triangle else mask.bool()
    return (x.float() * scale).masked_fill(hidden, -10000.0).softmax(-1)


def scaled_masked_softmax_grad(
    grad: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, scale: float, triangle: bool
) -> torch.Tensor:
    """Return the gradient of the scores before they were scaled."""
    hidden = torch.ones(y.shape[-2:], dtype=torch.bool).triu(1) if triangle else mask.bool()
    g, p = grad.float(), y.float()
    return (p * (g - (p * g).sum(-1, keepdim=True)) * scale).masked_fill(hidden, 0.0)


result("ScaledMaskedSoftmax", "todbt", scaled_masked_softmax)
result("ScaledMaskedSoftmaxBackward", "ttodbt", scaled_masked_softmax_grad)

result("Cumsum", "tiit", lambda x, dim, dtype: torch.cumsum(x, dim))
result("Cumprod", "tsit", lambda x, dim, dtype: torch.cumprod(x, int(dim)))
results("Cummax", "titt", 2, lambda x, dim: torch.cummax(x, dim))
results(
    "Sort", "tbibtt", 2, lambda x, stable, dim, descending: torch.sort(x, dim=dim, descending=descending, stable=True)
)
results("Topk", "tiibbtt", 2, lambda x, k, dim, largest, ordered: torch.topk(x, k, dim, largest, True))
results("TopkV2", "tiibbitt", 2, lambda x, k, dim, largest, ordered, kind: torch.topk(x, k, dim, largest, True))
result("Histc", "tisst", lambda x, bins, low, high: torch.histc(x.float(), bins, low, high))
result("Bincount", "toit", lambda x, weights, least: torch.bincount(x, weights, least))
result(
    "SearchSorted",
    "ttbbot",
    lambda edges, x, short, right, order: torch.searchsorted(edges, x, right=right, sorter=order),
)
result("Bucketize", "ttbbt", lambda x, edges, short, right: torch.bucketize(x, edges, right=right))
result("LinalgVectorNorm", "tsIbit", lambda x, p, dims, keep, dtype: torch.linalg.vector_norm(x, p, dims or None, keep))
result("Norm", "tsIbt", lambda x, p, dims, keep: torch.linalg.vector_norm(x, p, dims or None, keep))


def unique(x: torch.Tensor, ordered: bool, inverse: bool, counts: bool, *outs: Any) -> None:
    """Write the values that occur, where each element's is, and how often each occurs."""
    values, places, numbers = torch.unique(x, return_inverse=True, return_counts=True)
    outs[0].tell(values)
    if inverse:
        outs[1].tensor.copy_(places) if isinstance(outs[1], ShapedTensor) else outs[1].copy_(places)
    if counts:
        outs[2].tell(numbers)


kernel("Unique2", "tbbbrtr", unique)

kernel("Arange", "ssst", lambda start, end, step, out: out.copy_(torch.arange(start, end, step)[: out.numel()]))
kernel("Range", "ssst", lambda start, end, step, out: out.copy_(torch.arange(start, end + step, step)[: out.numel()]))
result("Eye", "iit", torch.eye)
result("Linspace", "ssit", lambda start, end, steps: torch.linspace(start, end, steps))
