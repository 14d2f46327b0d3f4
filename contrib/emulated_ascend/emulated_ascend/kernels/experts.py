"""Products of groups of rows, each with its expert's weight."""

from typing import Any

import torch

from .table import kernel

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
