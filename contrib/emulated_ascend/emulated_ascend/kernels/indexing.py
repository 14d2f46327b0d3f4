"""Gathers, scatters, joins, selections, shapes."""

from typing import Any

import torch
import torch.nn.functional as F

from .table import ShapedTensor, inplace, kernel, result, results, store

aten = torch.ops.aten
REDUCTIONS = {0: None, 1: "add", 2: "multiply"}

result("Cat", "Lit", torch.cat)
result("Stack", "Lit", torch.stack)
kernel("SplitWithSize", "tIiL", lambda x, sizes, dim, outs: store(outs, torch.split(x, sizes, dim)))
result("ChunkCat", "Liit", lambda tensors, dim, chunks: torch._chunk_cat(tensors, dim, chunks))
result("Repeat", "tIt", lambda x, times: x.repeat(times))
result("Flip", "tIt", torch.flip)
result("Roll", "tIIt", torch.roll)
result("Tril", "tit", torch.tril)
result("Triu", "tit", torch.triu)
inplace("InplaceTril", "ti", torch.tril)
inplace("InplaceTriu", "ti", torch.triu)
result("ConstantPadNd", "tIst", lambda x, sizes, value: F.pad(x, list(sizes), value=value))
result("OneHot", "tittit", lambda x, depth, on, off, axis: torch.where(F.one_hot(x.long(), depth).bool(), on, off))
result("RepeatInterleaveInt", "tiit", lambda x, times, size: torch.repeat_interleave(x, times))
result("RepeatInterleaveIntWithDim", "tiiit", lambda x, times, dim, size: torch.repeat_interleave(x, times, dim))
result("RepeatInterleave", "ttit", lambda x, times, size: torch.repeat_interleave(x, times.long()))
result("RepeatInterleaveWithDim", "ttiit", lambda x, times, dim, size: torch.repeat_interleave(x, times.long(), dim))
result("RepeatInterleaveTensor", "tit", lambda times, size: torch.repeat_interleave(times.long()))


def repeat_interleave_grad(grad: torch.Tensor, times: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over the copies of each slice."""
    counts = times.long().tolist()
    return torch.stack([part.sum(dim) for part in grad.float().split(counts, dim)], dim)


result("RepeatInterleaveGrad", "ttit", repeat_interleave_grad)


def indices(given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the index of each dimension; one without elements stands for all."""
    return [index if index.numel() else None for index in given]


result("Index", "tLt", lambda x, at: aten.index(x, indices(at)))
kernel("IndexPutImpl", "tLtbb", lambda x, at, values, adds, unsafe: aten.index_put_(x, indices(at), values, adds))
result("Gather", "titt", lambda x, dim, index: torch.gather(x, dim, index.long()))
result("IndexSelect", "titt", torch.index_select)
result("IndexAdd", "tittst", lambda x, dim, index, y, alpha: torch.index_add(x, dim, index, y, alpha=alpha))
result("IndexAddV2", "tittsit", lambda x, dim, index, y, alpha, mode: torch.index_add(x, dim, index, y, alpha=alpha))
result("IndexCopy", "tittt", torch.index_copy)
inplace("InplaceIndexCopy", "titt", torch.index_copy)
result("ScatterAdd", "tittt", lambda x, dim, index, y: torch.scatter_add(x, dim, index.long(), y))
result("Take", "ttt", torch.take)


def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, y: Any, reduction: int) -> torch.Tensor:
    """Scatter a tensor or a number; the reduction is a number of aclnn."""
    options = {"reduce": REDUCTIONS[reduction]} if reduction else {}
    return torch.scatter(x, dim, index.long(), y, **options)


result("Scatter", "tittit", scatter)
inplace("InplaceScatter", "titti", scatter)
result("ScatterValue", "titsit", scatter)
inplace("InplaceScatterValue", "titsi", scatter)
inplace("InplaceMaskedScatter", "ttt", lambda x, mask, source: torch.masked_scatter(x, mask.bool(), source))


def nonzero(x: torch.Tensor, out: ShapedTensor) -> None:
    """Write the indices of what is not zero."""
    out.tell(torch.nonzero(x))


result("IndexFill", "titst", lambda x, dim, index, value: x.index_fill(dim, index.long(), value))
kernel("Nonzero", "tr", nonzero)
kernel("NonzeroV2", "tr", lambda x, out: out.tell(torch.nonzero(x).t().contiguous()))
kernel("MaskedSelect", "ttr", lambda x, mask, out: out.tell(torch.masked_select(x, mask.bool())))

result("Embedding", "ttt", lambda weight, at: F.embedding(at.long(), weight))
result(
    "EmbeddingDenseBackward", "ttiibt",
    lambda grad, at, rows, padding, scaled: aten.embedding_dense_backward(grad, at.long(), rows, padding, scaled),
)  # fmt: skip
results(
    "NLLLoss", "ttoiitt", 2,
    lambda x, target, weight, reduction, ignored: aten.nll_loss_forward(x, target.long(), weight, reduction, ignored),
)  # fmt: skip
result(
    "NLLLossBackward", "tttoiitt",
    lambda grad, x, target, weight, reduction, ignored, total: aten.nll_loss_backward(
        grad, x, target.long(), weight, reduction, ignored, total
    ),
)  # fmt: skip
