"""Products of groups of rows, each with its expert's weight."""

from typing import Any

import torch

from .fused import FLOATS, collective, generation
from .table import kernel, library

Tensor = torch.Tensor


def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], groups: Any, kind: int, counts: bool, outs: list[Tensor]
) -> None:
    """Multiply each group of rows (kind 0), or of the contracted dimension (kind 2), which is cut by `groups`."""
    if groups is None or not len(groups):
        for out, a, b in zip(outs, x, weight, strict=True):
            out.copy_(a @ b)
        return
    numbers = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    sizes = numbers if counts else [after - before for before, after in zip([0, *numbers], numbers, strict=False)]
    at = 0
    for i, size in enumerate(sizes):
        rows = slice(at, at + size)
        at += size
        if kind == 2:
            outs[0][i].copy_(x[0][:, rows] @ weight[0][rows])
        else:
            outs[0][rows].copy_(x[0][rows] @ (weight[0][i] if len(weight) == 1 else weight[i]))


def version_5(x: Any, weight: Any, bias: Any, *given: Any) -> None:
    """Run the arguments of GroupedMatmulV4 and V5, of which quantities of quantisation are none."""
    groups, kind, list_type, outs = given[5], given[10], given[11], given[-3]
    grouped_matmul(x, weight, groups, kind, list_type == 1, outs)


def permuted(tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens sorted by expert, and where each choice of a token went."""
    order = torch.argsort(experts.reshape(-1), stable=True)
    chosen = experts.shape[1] if experts.dim() == 2 else 1
    return tokens[order // chosen], torch.argsort(order, stable=True)


def permute(tokens: Tensor, experts: Tensor, rows: int, padded: bool, out: Tensor, places: Tensor) -> None:
    """Write the tokens sorted by expert, and where each choice of a token went."""
    values, went = permuted(tokens, experts)
    out.copy_(values[: out.shape[0]])
    places.copy_(went)


def permute_grad(grad: Tensor, places: Tensor, chosen: int, padded: bool, out: Tensor) -> None:
    """Write the sum of the gradients of a token's choices."""
    out.copy_(chosen_rows(grad, places).reshape(-1, chosen, grad.shape[-1]).float().sum(1))


def chosen_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows at `places`; zeros for tokens that were dropped."""
    whole = rows.new_zeros(max(len(places), len(rows)), rows.shape[-1])
    whole[: len(rows)] = rows
    return whole[places.long()]


def unpermute(rows: Tensor, places: Tensor, weights: Any, padded: bool, shape: Any, out: Tensor) -> None:
    """Write each token's choices, weighted and summed."""
    chosen = 1 if weights is None else weights.shape[1]
    values = chosen_rows(rows, places).reshape(-1, chosen, rows.shape[-1]).float()
    out.copy_((values if weights is None else values * weights.float().unsqueeze(-1)).sum(1))


def unpermute_grad(
    rows: Any, grad: Tensor, places: Tensor, weights: Any, padded: bool, shape: Any, out: Tensor, weights_out: Any
) -> None:
    """Write the gradients of the rows and of the weights."""
    chosen = 1 if weights is None else weights.shape[1]
    each = grad.float().unsqueeze(1).expand(-1, chosen, -1)
    flat = (each if weights is None else each * weights.float().unsqueeze(-1)).reshape(-1, grad.shape[-1])
    whole = torch.zeros_like(flat)
    whole[places.long()] = flat
    out.copy_(whole[: len(out)])
    if weights is not None and weights_out is not None:
        values = chosen_rows(rows, places).reshape(-1, chosen, grad.shape[-1]).float()
        weights_out.copy_((values * each).sum(-1))


kernel("MoeTokenPermute", "ttibtt", permute)
kernel("MoeTokenPermuteGrad", "ttibt", permute_grad)
kernel("MoeTokenUnpermute", "ttobpt", unpermute)
kernel("MoeTokenUnpermuteGrad", "ottobpto", unpermute_grad)
kernel("GroupedMatmul", "LLpppppp iL", lambda x, w, *given: grouped_matmul(x, w, given[5], 0, False, given[-1]))
kernel("GroupedMatmulV4", "LLpppppppppp iiii L pp", version_5)
kernel("GroupedMatmulV5", "LLpppppppppp iiii p L pp", version_5)


LEAST_BYTES = 2 * 2**20  # of what a rank sends, and of what it gets


def rows_of_ranks(
    name: str, x: Tensor, weight: Tensor, group: str, ranks: int, sent: Any, received: Any, transposed: bool
) -> tuple[list[list[int]], list[Tensor]]:
    """Check the arguments as their pages say; return the counts and the rows that each rank sends."""
    known, experts = library().emulated_ranks(group.encode()), weight.shape[0]
    if generation() != "A3" or known != ranks or ranks not in (8, 16, 32, 64):
        raise ValueError(f"{name}: {ranks} ranks of {known} on {generation()}; allowed are 8, 16, 32 and 64 on A3")
    if experts > 32 or experts * ranks > 256 or len(sent) != experts * ranks or len(received) != experts * ranks:
        raise ValueError(f"{name}: {experts} experts, {len(sent)} and {len(received)} counts")
    contracted = weight.shape[2] if transposed else weight.shape[1]
    if x.dtype not in FLOATS or weight.dtype != x.dtype or x.shape[1] != contracted:
        raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)} by {weight.dtype} {tuple(weight.shape)}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"{name}: strides {x.stride()} and {weight.stride()}")
    if x.shape[0] != sum(sent) or not all(0 < size < 65536 for size in weight.shape[1:]):
        raise ValueError(f"{name}: {x.shape[0]} rows, {sum(sent)} to send; weight {tuple(weight.shape)}")
    counts = torch.empty(ranks, len(sent), dtype=torch.int64)
    collective("all-gather", group, torch.tensor(sent, dtype=torch.int64), counts, len(sent))
    most = int(counts.sum(1).max())
    padded = x.new_zeros(most, x.shape[1])
    padded[: len(x)] = x
    whole = x.new_empty(ranks, most, x.shape[1])
    collective("all-gather", group, padded, whole, padded.numel())
    return counts.tolist(), [rows[: sum(each)] for rows, each in zip(whole, counts.tolist(), strict=True)]


def least(name: str, rows: int, width: int, x: Tensor) -> None:
    """Refuse so few bytes of a rank as the pages exclude."""
    if rows * width * x.element_size() < LEAST_BYTES:
        raise ValueError(f"{name}: {rows} rows of {width}; a rank's communication has 2 MB or more")


def of_experts(rows: Tensor, weight: Tensor, counts: list[int], transposed: bool) -> Tensor:
    """Multiply the rows of each expert, one after the other, by its weight."""
    parts = torch.split(rows.float(), counts)
    each = [part @ (w.t() if transposed else w) for part, w in zip(parts, weight.float(), strict=True)]
    return torch.cat(each).to(rows.dtype)


def all_to_all_matmul(
    x: Tensor, weight: Tensor, _: Any, __: Any, mm_x: Any, mm_weight: Any, group: str, ranks: int, sent: Any,
    received: Any, transposed: bool, mm_transposed: bool, shows: bool, out: Tensor, mm_out: Any, permuted_out: Any,
) -> None:  # fmt: skip
    """Send [rank][expert] rows to their experts, and multiply them in the order [expert][source]."""
    name, experts = "AlltoAllvGroupedMatMul", weight.shape[0]
    counts, rows = rows_of_ranks(name, x, weight, group, ranks, sent, received, transposed)
    least(name, len(x), x.shape[1], x)
    least(name, sum(received), x.shape[1], x)
    own = int(library().emulated_rank(group.encode()))
    expected = [count for each in counts for count in each[own * experts : (own + 1) * experts]]
    if list(received) != expected:
        raise ValueError(f"{name}: recv_counts {list(received)}; the ranks send {expected}")
    parts = [torch.split(each, of_rank) for each, of_rank in zip(rows, counts, strict=True)]
    came = torch.cat([part[own * experts + expert] for expert in range(experts) for part in parts])
    of_each = [sum(each[own * experts + expert] for each in counts) for expert in range(experts)]
    out.copy_(of_experts(came, weight, of_each, transposed))
    if shows:
        permuted_out.copy_(came)


def matmul_all_to_all(
    x: Tensor, weight: Tensor, _: Any, __: Any, mm_x: Any, mm_weight: Any, group: str, ranks: int, sent: Any,
    received: Any, transposed: bool, mm_transposed: bool, out: Tensor, mm_out: Any,
) -> None:  # fmt: skip
    """Multiply rows in the order [expert][source], and send them back to [rank][expert] rows of their sources."""
    name, experts = "GroupedMatMulAlltoAllv", weight.shape[0]
    of_each = [sum(sent[expert::experts]) for expert in range(experts)]
    made = of_experts(x, weight, of_each, transposed)
    counts, _ = rows_of_ranks(name, x, weight, group, ranks, sent, received, transposed)
    least(name, sum(sent), out.shape[1], x)
    least(name, sum(received), out.shape[1], x)
    own, most = int(library().emulated_rank(group.encode())), max(map(sum, counts))
    padded, whole = made.new_zeros(most, made.shape[1]), made.new_empty(ranks, most, made.shape[1])
    padded[: len(made)] = made
    collective("all-gather", group, padded, whole, padded.numel())
    back = []
    for results, of_rank in zip(whole, counts, strict=True):  # [expert][source] of each rank
        sizes = [of_rank[source * experts + expert] for expert in range(experts) for source in range(ranks)]
        parts = torch.split(results[: sum(sizes)], sizes)
        back += [parts[expert * ranks + own] for expert in range(experts)]
    out.copy_(torch.cat(back))


kernel("AlltoAllvGroupedMatMul", "ttoooociIIbbb too", all_to_all_matmul)
kernel("GroupedMatMulAlltoAllv", "ttoooociIIbb to", matmul_all_to_all)
