"""A mixture of experts in inference, on Ascend A3: each product of the experts is fused with an all-to-all of its rows.

    rows [S, H]      sorted by expert: those of rank 0's first expert, ..., of rank 1's first
    npu_alltoallv_gmm     rows to their experts' ranks, times their first weight: [A, N], in the order [expert][source]
    between               what the experts do between their products, row by row: [A, K]
    npu_gmm_alltoallv     times their second weight, and back to the places of the rows: [S, H]

What does not depend on the rows decides first (`decided_fused_experts`), then the counts of all ranks, which each rank
has: the operators ask for 2 MB or more that every rank sends and gets. Where they do not apply the framework's own
experts run. Not run on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.ops import npu
from ascend_parallel.ops.call import Exchange
from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import Decision, Reason, because
from ascend_parallel.ops.expert_exchange import COUNT, RowCounts
from ascend_parallel.ops.npu_limits import supports_experts
from ascend_parallel.ops.operators import in_timeline, log_once
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.registry import UnmetRequestError
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.ops.soc import LEAST_EXPERT_BYTES, MOST_EXPERT_ROWS


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a rank's experts.

    first, second
        [E, H, N] and [E, K, H]; with `transposed` [E, N, H] and [E, H, K].
    between
        What the experts do between their products, row by row: [A, N] to [A, K].
    """

    first: torch.Tensor
    second: torch.Tensor
    transposed: bool
    between: Callable[[torch.Tensor], torch.Tensor]

    @property
    def inner(self) -> tuple[int, int]:
        """The features N and K."""
        n, k = (1, 2) if self.transposed else (2, 1)
        return self.first.shape[n], self.second.shape[k]


def decided_fused_experts(exchange: Exchange, settings: OperatorSettings) -> Decision:
    """Decide whether the fused operators run an exchange with `matmuls`, as far as no counts decide.

    Every rank decides alike. Else the decision is `original`. Raises `UnmetRequestError` for a request of strict
    settings that cannot be met.
    """
    exchange = npu.ask_experts(exchange) if exchange.device == "npu" else exchange
    refused = supports_experts(exchange)
    if refused is None and settings.deterministic:
        refused = f"no order of their sums is documented, which {settings.arithmetic.asked} asks for"
    if refused is None:
        decision = Decision(exchange, "npu", (exchange.parts,), False, (because("fused"),), given=True, step=1)
    else:
        decision = _left(exchange, because("experts_not_fused", refused=refused))
        if settings.strict:
            raise UnmetRequestError(f"COC_STRICT=1: {exchange.in_words}: {decision.reason}")
    log_once(decision)
    return decision


def _left(exchange: Exchange, reason: Reason) -> Decision:
    """Return the decision that the framework's own experts run."""
    return Decision(exchange, "reference", (exchange.parts,), True, (reason,), original=True, step=1)


def counts_of_all(to_send: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return how many rows each rank sends to each expert of each rank, [source, rank, expert], on the host.

    to_send  [R, E], of this rank

    An all-gather of R x R x E integers, and a synchronisation of the host. Raises `CollectiveError` if a rank fails.
    """
    gathered = to_send.new_empty(group.size(), to_send.numel())
    pending = Pending(gathered, COUNT, group)
    with pending.launching():
        pending.launch(all_gather_single, gathered, to_send.reshape(1, -1), group)
    return pending.wait().view(group.size(), *to_send.shape).cpu()


def with_counts(decision: Decision, counts: torch.Tensor) -> Decision:
    """Return the decision, or that the framework's own experts run these counts [source, rank, expert] of all ranks."""
    exchange = decision.call
    assert isinstance(exchange, Exchange)
    rows = torch.cat([counts.sum((1, 2)), counts.sum((0, 2))])  # what each rank sends, and what it gets
    enough = int(rows.min()) * exchange.features * exchange.dtype.itemsize >= LEAST_EXPERT_BYTES
    if decision.original or (enough and int(rows.max()) <= MOST_EXPERT_ROWS):
        return decision
    few = because("experts_few_bytes", least=LEAST_EXPERT_BYTES, most=MOST_EXPERT_ROWS)
    left = _left(exchange, few)
    log_once(left)
    return left


def run_fused_experts(
    rows: torch.Tensor, counts: torch.Tensor, weights: ExpertWeights, group: dist.ProcessGroup, decision: Decision
) -> torch.Tensor:
    """Return the experts' outputs [S, H] at the places of `rows`, for counts of all ranks; no gradient follows."""
    rank = group.rank()
    of_rank = RowCounts(sent=counts[rank].tolist(), received=counts[:, rank].tolist())
    of_rank.check(rows, group)
    with in_timeline(decision, group):
        given = of_rank.sent, of_rank.received, group
        made = npu.all_to_all_expert_matmul(rows, weights.first, *given, transposed=weights.transposed)
        made = weights.between(made)
        out = npu.expert_matmul_all_to_all(made, weights.second, *given, transposed=weights.transposed)
    COUNTS.add(decision.call.operator, 1, 2)
    return out
