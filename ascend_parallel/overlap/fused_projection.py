"""Attention's way back and its projection as one operator, where every rank of a group can and does the same.

A fused operator communicates. So the ranks agree before the first one of a kind: whether each of them knows the layer
that reads its output (a hook of a program may be on one rank alone), and whether its gradient comes through that layer.
They talk again when one of them has something that it has not had before.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops import npu
from ascend_parallel.ops.call import ALL_TO_ALL_MATMUL, HEAD_EXCHANGE, Exchange, ExchangedMatmul
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.exchanged_matmul import all_to_all_matmul, matmul_all_to_all
from ascend_parallel.ops.head_exchange import HeadGroup
from ascend_parallel.overlap.projected import Projection
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings

# By group: what this rank had, and whether all ranks had the same.
_AGREED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], bool]] = WeakKeyDictionary()

ONE_RANK_ALONE = (
    "one rank alone has changed what reads its attention's output, or how gradients reach it (a hook on its output "
    "projection?), which fused operators do not allow: do it on all ranks that share the sequence, or unset "
    "USE_COC_FUSED_KERNEL"
)


def with_projection(
    exchange: Exchange,
    output: tuple[int, torch.dtype],
    projection: Projection | None,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None,
) -> Exchange:
    """Return an exchange with the layer behind it, if settings ask for fused operators and all ranks have that layer.

    output: the features of attention's output on all ranks, and its dtype.
    """
    asked = settings.fused and settings.cuts and not (known is not None and known.alone)
    if not asked or exchange.operator != HEAD_EXCHANGE or exchange.device != "npu" or exchange.ranks == 1:
        return exchange
    assert exchange.tokens is not None
    matmul, (features, dtype) = None, output
    if projection is not None and projection.weight.shape[1] == features:
        rows, outputs = exchange.tokens // exchange.ranks, projection.weight.shape[0]
        matmul = ExchangedMatmul(ALL_TO_ALL_MATMUL, rows, features, outputs, dtype, exchange.device, exchange.ranks)
    mine = "no layer" if matmul is None or projection is None else f"{matmul.shape}, bias {projection.bias is not None}"
    if not all_have(group, f"the layer behind {exchange.in_words}", mine) or matmul is None:
        return exchange
    return replace(exchange, projection=npu.ask_exchanged(matmul, group))


def comes_through_alone(
    exchange: Exchange, d_output: torch.Tensor | None, d_y: torch.Tensor | None, group: dist.ProcessGroup
) -> bool:
    """Tell whether on every rank the output's whole gradient comes through the projection."""
    alone = d_y is not None and d_output is None
    return (
        all_have(group, f"the gradient of {exchange.in_words}", "through the layer" if alone else "otherwise") and alone
    )


def all_have(group: dist.ProcessGroup, what: str, mine: str) -> bool:
    """Tell whether all ranks have `mine` of `what`; they talk when one of them has not had it on this group before."""
    agreed = _AGREED.setdefault(group, {})
    if (what, mine) not in agreed:
        with hide_from_selective_checkpoint():
            by_rank = store_all_gather(
                group, what, {"mine": mine}, DisagreementError, topic="projection", hint=ONE_RANK_ALONE
            )
        agreed[what, mine] = all(value["mine"] == mine for value in by_rank.values())
    return agreed[what, mine]


def project_heads(
    o: torch.Tensor, heads: HeadGroup, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup,
    matmul: ExchangedMatmul, batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the projection [B s, F] and all heads [B s, N D] of this rank's tokens: o [S, B, n, D] of its heads.

    batch_first: else the rows are those of [s, B].
    """
    x_heads = heads.by_rank(o, batch_first).flatten(0, 1).flatten(1)
    return all_to_all_matmul(x_heads, weight.t(), bias, group, matmul)


def exchanged_gradient(
    d_y: torch.Tensor, weight: torch.Tensor, batch: int, width: int, group: dist.ProcessGroup,
    matmul: ExchangedMatmul, batch_first: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of this rank's heads of all tokens, [S, B, n, D]: d_y [B s, F], weight [F, N D].

    batch_first: else the rows of d_y are those of [s, B].
    """
    d_heads = matmul_all_to_all(d_y, weight, group, matmul.backward)
    heads = d_heads.shape[1] // width, width
    if not batch_first:
        return d_heads.view(-1, batch, *heads)
    return d_heads.view(group.size(), batch, -1, *heads).transpose(1, 2).flatten(0, 1)
