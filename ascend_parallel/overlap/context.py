"""Attention of a sequence that ranks share: an exchange around groups of heads, overlapped, with autograd.

`run_attention` is one autograd function over queries, keys and values. Inside of it the attention of each group of
heads builds its own autograd graph (`InnerGraph`), so that backward can run group by group between the all-to-alls.

    forward    dispatch 0, 1 -> attention 0 -> combine 0, dispatch 2 -> attention 1 -> ... -> combine of the last group
    backward   the same, with gradients

Hidden are the all-to-alls of every group but the first (dispatch) and the last (combine): 1 / groups stays exposed.
Each head's attention is computed on whole sequences, by the function that the caller gives.

Where the heads do not suffice for the ranks, keys and values are gathered (`GATHER`): each rank attends from its own
tokens. Forward has no combine, and backward no dispatch.

    forward    gather 0, 1 -> attention 0 -> gather 2 -> attention 1 -> ... -> attention of the last group
    backward   attention 0 -> sum of dk, dv 0 -> attention 1 -> ... -> sum of the last group

Where causal rows are not balanced, ranks lend each other half of their queries (`borrower`): these go with the gathers,
and their results come back as combines.

Queries, keys and values may be heads to come (overlap/projected_heads.py): a group's are projected before its dispatch,
under that of another. A `Projection` that reads the output is multiplied here too (overlap/projected.py). Where heads
are exchanged, the last group's heads come back in pieces of rows, and rows are multiplied as they come; the weight
gradient, which is not cut, runs in backward while the last gradients of q, k and v come back.

    forward    q, k, v 0 -> dispatch 0, q, k, v 1 -> dispatch 1 -> attention 0 -> ...
               ... -> combine of the last group: rows 0 -> product of rows 0, rows 1 -> ... -> product of the last rows
    backward   columns of heads 0 -> dispatch 0, columns of heads 1 -> ... -> combine of the last group, weight gradient

In one group an operator of torch_npu may run the way back with the projection, and in backward the projection's product
with the dispatch (overlap/fused_projection.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ascend_parallel.ops.call import HEAD_EXCHANGE, KEY_GATHER, Exchange, ExchangedMatmul, heads_exchange
from ascend_parallel.ops.decision import Decision, Known
from ascend_parallel.ops.head_exchange import HeadGroup, HeadRows, repeats_of
from ascend_parallel.ops.key_gather import (
    GATHER,
    HEADS,
    KeyGroup,
    LentKeyGroup,
    LentRows,
    cut_heads,
    in_sequence,
    kept_rows,
    keys_before,
    pieces_of,
)
from ascend_parallel.ops.lazy_rows import LazyRows
from ascend_parallel.ops.lazy_rows import Rows as LyingRows
from ascend_parallel.ops.operators import decided_exchange
from ascend_parallel.ops.part_exchange import Route, Rows, own_route, part_exchange
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.record import MATMUL, compute, recorded_pass
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.ops.unfinished import UnfinishedTensor, finished
from ascend_parallel.ops.unfinished_heads import UnfinishedHeads, heads_of_product
from ascend_parallel.overlap.fused_projection import (
    comes_through_alone,
    exchanged_gradient,
    project_heads,
    with_projection,
)
from ascend_parallel.overlap.inner_graph import InnerGraph, InnerSavedTensors, TensorLike
from ascend_parallel.overlap.projected import ProjectedTensor, Projection, project, projection_gradients
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.overlap.weight_gradient import Begin, WeightGradient
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings

Heads = HeadGroup | KeyGroup
Attention = Callable[[Heads, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attention(heads, q, k, v)`` of whole sequences, [S, B, n, D] each, with the tokens in the order of the ranks.

With `GATHER` only k and v are of whole sequences; q [s, B, n, D] has this rank's tokens. It returns o like q, must be a
function of its operands, and may use autograd as it likes, but no collective of the same ranks. The heads of q are a
multiple of those of k and v; head i of q reads head i // multiple of k.
"""

PieceAttention = Callable[[slice, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attention(rows, q, k, v)`` of the queries at the places `rows` of the sequence, to its first keys."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The options of `run_attention` that are no tensors."""

    attention: Attention
    groups: Sequence[Heads]
    group: dist.ProcessGroup
    decision: Decision
    graded: bool
    by_rows: bool
    batch_first: bool
    weight_gradient: WeightGradient

    @property
    def gathers(self) -> bool:
        """Whether keys and values are gathered."""
        return self.decision.call.operator == KEY_GATHER

    @property
    def projection(self) -> ExchangedMatmul | None:
        """What a fused operator runs of the way back and the projection; None: nothing."""
        exchange = self.decision.call
        return exchange.projection if self.decision.kernel == "npu" and isinstance(exchange, Exchange) else None

    @property
    def unfused(self) -> Decision:
        """The decision on what a fused operator leaves of the exchange."""
        return self.decision if self.projection is None else replace(self.decision, kernel="reference")

    @property
    def lends(self) -> bool:
        """Whether ranks lend each other half of their queries."""
        return isinstance(self.groups[0], LentKeyGroup)


def run_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention: Attention,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None = None,
    exchange: str = HEADS,
    borrower: int | None = None,
    projection: Projection | None = None,
    by_rows: bool = False,
    batch_first: bool = True,
    begin: Begin | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's tokens to the tokens of all ranks, [s, B, N, D].

    q      [s, B, N, D], this rank's tokens; every rank of `group` has as many
    k, v   [s, B, n, D], where N is a multiple of n

    `HEADS`: a rank computes whole heads: outputs and gradients have the bits of one rank that has the whole sequence.
    Where the ranks do not share the heads of keys evenly, each head goes to several ranks, and its gradient is a sum of
    theirs. `GATHER`: a rank computes the rows of its tokens; gradients of k and v are sums over the ranks, in their
    order. In any number of groups the bits are the same.

    known: what decides the groups beside the settings; None: their plan alone.

    borrower: with `GATHER`, the rank of `group` with which this one exchanges the second half of its queries, and of
    their results: `attention` then gets the rows that stay, and those of the borrower. None: all rows stay.

    projection: the linear layer that reads the output, which is then a `ProjectedTensor`, in memory [B, s, N, D].
    by_rows: heads come back as for a projection, also without one: the same on all ranks, whatever a rank has around
    its layer. batch_first: else the memory is [s, B, N, D]; which rows the projection multiplies in which order.
    begin: observes the start of the backward.

    What requires gradients must be the same on all ranks. Raises `ValueError` if the ranks cannot share the heads,
    `DisagreementError` if their tensors or exchanges differ, `CollectiveError` if a rank fails.
    """
    settings.arithmetic.refuse(
        "context parallelism has no tree: weight gradients are summed over the ranks that share a sequence"
    )
    by_rows = by_rows or projection is not None
    back = ("results in rows" if batch_first else "results in rows of tokens") if by_rows else ""
    confirm_shapes(q, k, v, group, back, KEY_GATHER if exchange == GATHER else HEAD_EXCHANGE)
    q, k, v = _spread(q, k, v, group, exchange)
    decision = attention_decision(q, k, v, group, settings, known, exchange, projection)
    lengths = [len(q)] * group.size()
    kind: type[Heads] = KeyGroup if exchange == GATHER else HeadGroup
    groups: Sequence[Heads] = kind.cut(decision.sizes, lengths, group.rank())
    if borrower is not None:
        groups = [LentKeyGroup(each.heads, each.of, each.lengths, each.rank, borrower) for each in groups]
    graded = torch.is_grad_enabled()
    call = AttentionCall(
        attention=attention,
        groups=groups,
        group=group,
        decision=decision,
        graded=graded,
        by_rows=by_rows,
        batch_first=by_rows and batch_first,
        weight_gradient=(WeightGradient if projection is None else projection.weight_gradient)(begin),
    )
    layer = (None, None) if projection is None else projection.operands()
    output, y = _Attention.apply(q, k, v, *layer, call)  # type: ignore[no-untyped-call]
    if projection is not None:
        output = ProjectedTensor.of(output, y, projection)
    o: torch.Tensor = output.transpose(0, 1) if call.batch_first else output
    return o


def _spread(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, exchange: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as they are sent: with the heads of keys repeated until every rank gets as many."""
    q, k, v = (as_autocast(x) for x in (q, k, v))
    repeats = repeats_of(q.shape[2], k.shape[2], 1 if exchange == GATHER else group.size())
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    return q, k, v


def attention_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, exchange: str = HEADS
) -> Exchange:
    """Return the exchange of q, k and v, as `run_attention` takes them."""
    heads = cut_heads(q.shape[2], k.shape[2], group.size(), exchange)
    of_keys = k.shape[2:].numel() + v.shape[2:].numel()
    if exchange == GATHER:
        return heads_exchange(KEY_GATHER, heads, group.size() * k.shape[:2].numel(), of_keys, q, group)
    features = q.shape[2:].numel() + heads * group.size() // k.shape[2] * of_keys
    return heads_exchange(HEAD_EXCHANGE, heads, group.size() * q.shape[:2].numel(), features, q, group)


def attention_decision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None = None,
    exchange: str = HEADS,
    projection: Projection | None = None,
) -> Decision:
    """Decide in how many groups q, k and v are exchanged: the same on every rank.

    projection: as of `run_attention`.
    """
    call = attention_call(q, k, v, group, exchange)
    output = q.shape[2] * v.shape[3], as_autocast(q).dtype
    call = with_projection(call, output, projection, group, settings, known)
    return decided_exchange(call, group, settings, known)


def attention_in_turn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention: Attention,
    *,
    group: dist.ProcessGroup,
    exchange: str = HEADS,
) -> torch.Tensor:
    """Return what `run_attention` returns, by torch's own collectives and autograd in turn: one all-to-all each way.

    To gather, each rank sends every other the same rows: their gradients come back, and autograd sums them.
    """
    ranks = group.size()
    q, k, v = _spread(q, k, v, group, exchange)
    if exchange == GATHER:
        (keys,), each = KeyGroup.cut((k.shape[2],), [len(q)] * ranks, group.rank()), [len(q)] * ranks
        gathered = [all_to_all_single_autograd(x.repeat(ranks, 1, 1, 1), each, each, group) * 1 for x in (k, v)]
        return _checked(attention(keys, q, *gathered), q, v)
    (heads,) = HeadGroup.cut((k.shape[2] // ranks,), [len(q)] * ranks, group.rank())
    sizes = heads.received_sizes, heads.sent_sizes
    # The products wait for the rows.
    received = [all_to_all_single_autograd(heads.join(x), *sizes, group) * 1 for x in (q, k, v)]
    made = _checked(attention(heads, *received), received[0], received[2])
    back = all_to_all_single_autograd(made.contiguous(), *sizes[::-1], group) * 1
    by_rank = back.view(ranks, len(q), *back.shape[1:])  # [R, s, B, n, D]
    return by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3)


def attend_pieces(
    attention: PieceAttention, keys: KeyGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> torch.Tensor:
    """Return the attention of a rank's two pieces of a sequence (`pieces_of`), [s, B, N, D].

    q      [s, B, N, D], the rank's tokens
    k, v   [S, B, n, D], in the order of the ranks, as they are gathered

    Causal rows get the keys before them, in whole blocks: the caller masks the rest.
    """
    k, v = (in_sequence(x, len(keys.lengths)) for x in (k, v))
    return attend_rows(attention, pieces_of(keys.rank, len(keys.lengths), len(q)), q, k, v, causal=causal)


def attend_rows(
    attention: PieceAttention,
    pieces: Sequence[slice],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """Return the attention of queries that lie at the places `pieces` of a sequence, [s, B, N, D].

    q      [s, B, N, D], of the first piece, then of the next
    k, v   [S, B, n, D], in the order of the sequence
    """
    outputs = []
    for rows, q_rows in zip(pieces, q.split_with_sizes([rows.stop - rows.start for rows in pieces]), strict=True):
        seen = keys_before(rows.stop, len(k)) if causal else len(k)
        outputs.append(attention(rows, q_rows, k[:seen], v[:seen]))
    return torch.cat(outputs)


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype in which autocast would compute attention: cast before it is sent."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


_CONFIRMED: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def confirm_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    others: str = "",
    operator: str = HEAD_EXCHANGE,
) -> None:
    """Raise `ValueError` for operands that do not fit, `DisagreementError` if the ranks' operands differ.

    The ranks compare when one of them has not had such operands on this group before. operator: that they will run.
    others: what else must be alike. A rank that computes no gradients here, as in an evaluation, runs the collectives
    of a forward like the others; `confirm_gradients` compares again where backward runs.
    """
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[3] != k.shape[3]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"{operator}: {shapes} are not [s, B, N, D] and twice [s, B, n, D]")
    kinds = [f"{list(x.shape)} {x.dtype}" for x in (q, k, v)]
    mine = "; ".join(filter(None, (f"{operator} of q, k, v {', '.join(kinds)}", others)))
    confirmed = _CONFIRMED.setdefault(group, set())
    if mine in confirmed or group.size() == 1:
        return
    graded = _graded_names(x.requires_grad for x in (q, k, v)) if torch.is_grad_enabled() else ""
    with hide_from_selective_checkpoint():
        by_rank = store_all_gather(group, mine, {"tensors": mine, "graded": graded}, DisagreementError, topic="context")
    asked = {value["graded"] for value in by_rank.values()} - {""}
    if any(value["tensors"] != mine for value in by_rank.values()) or len(asked) > 1:
        words = {rank: "; ".join(filter(None, value.values())) for rank, value in by_rank.items()}
        what = "; ".join(f"rank {rank}: {text}" for rank, text in words.items())
        raise DisagreementError(
            f"{operator}: ranks of {describe(group)} have other shares of the sequence ({what}): give every rank "
            "as many tokens, padded to a multiple of the ranks, and ask for the same exchange and gradients"
        )
    confirmed.add(mine)


def confirm_gradients(needed: Sequence[bool], group: dist.ProcessGroup, operator: str) -> None:
    """Raise `DisagreementError` if a backward makes other gradients of q, k and v on other ranks: each is collective.

    The ranks compare when one of them has not made such gradients on this group before.
    """
    mine = f"{operator}: {_graded_names(needed)}"
    confirmed = _CONFIRMED.setdefault(group, set())
    if mine in confirmed or group.size() == 1:
        return
    by_rank = store_all_gather(
        group, f"backward of {mine}", {"graded": mine}, DisagreementError, topic="context backward"
    )
    if any(value["graded"] != mine for value in by_rank.values()):
        what = "; ".join(f"rank {rank}: {value['graded']}" for rank, value in by_rank.items())
        raise DisagreementError(
            f"{operator}: ranks of {describe(group)} compute other gradients ({what}): freeze the same parameters, and "
            "require the same gradients, on all ranks that share a sequence"
        )
    confirmed.add(mine)


def _graded_names(needed: Iterable[bool]) -> str:
    return f"gradients of {', '.join(name for name, need in zip('qkv', needed, strict=False) if need) or 'none'}"


class _Attention(torch.autograd.Function):
    """The autograd function of `run_attention`.

    weight, bias    of the projection, or None
    returns         o [s, B, N, D], `batch_first` [B, s, N, D]; and y in the same order, or None without a projection
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        call: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.call, ctx.saved, ctx.graphs = call, InnerSavedTensors(), []
        ctx.likes = [TensorLike(x) for x in (q, k, v)]
        ctx.set_materialize_grads(False)
        with hide_from_selective_checkpoint(), recorded_pass(ctx, "attention", "forward", q.device.type):
            output, y = _forward(ctx, (q, k, v), weight, bias)
        rows = output if ctx.needs_input_grad[3] else None
        # The empty tensor makes a checkpoint stop, and compute again, at the same point on every rank.
        ctx.save_for_backward(q.new_empty(0), rows, weight, *ctx.saved.give())
        return output, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor | None, d_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _, rows, weight, *saved = ctx.saved_tensors  # a checkpoint computes the forward again here
        confirm_gradients(ctx.needs_input_grad[:3], ctx.call.group, ctx.call.decision.call.operator)
        device = ctx.likes[0].device.type
        if ctx.call.weight_gradient.begin is not None:
            ctx.call.weight_gradient.begin(None, None)
        with ctx.saved.given(saved), recorded_pass(ctx, "attention", "backward", device):
            return _backward(ctx, d_output, d_y, rows, weight)


def _forward(
    ctx: Any, operands: Rows, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exchange q, k and v; return the attention of this rank's tokens, and its projection."""
    call: AttentionCall = ctx.call
    q, _, v = operands
    needs = [call.graded and need for need in ctx.needs_input_grad[:3]]
    (tokens, batch, heads), width = q.shape[:3], v.shape[3]
    order = (batch, tokens) if call.batch_first else (tokens, batch)
    whole = q.new_empty(*order, heads, width)
    output, rows = whole.transpose(0, 1) if call.batch_first else whole, whole.view(batch * tokens, heads * width)
    pieces = _pieces(call, batch * tokens)
    y: torch.Tensor | None = None

    def project_rows(pending: Pending | None) -> None:
        nonlocal y
        if weight is None:
            return
        if pending is None:
            y = compute(MATMUL, "projection", project, rows, weight, bias)
        else:
            arriving = LyingRows(LazyRows(pending.sizes, pending.wait_for), 1, 1)
            y = finished(project(UnfinishedTensor(rows, arriving), weight, bias))

    def attended(heads: Heads, given: Rows) -> torch.Tensor:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _checked(call.attention(heads, q, k, v), q, v)

        graph = InnerGraph(ctx.saved, call.graded, whole_backward=False)
        ctx.graphs.append(graph)
        return graph.run(run, given, needs)

    made: list[torch.Tensor] = []

    def attend(_: int, heads: Heads, received: Rows) -> Rows:
        if not isinstance(heads, KeyGroup):
            o = attended(heads, received)
            if call.projection is not None:
                made.append(o)
                return []
            return [heads.by_rank(o, call.batch_first) if pieces and heads is call.groups[-1] else o]
        if isinstance(heads, LentKeyGroup):
            borrowed, *received = received
            own = attended(heads, [_with_borrowed(heads, operands[0], borrowed), *received])
            return _keep(heads, own, output)
        heads.heads_of(output).copy_(attended(heads, [heads.heads_of(operands[0]), *received]))
        return []

    if call.gathers:
        operands = [finished(x) for x in operands]
    if call.lends:
        sent, lent = [_lent(operands[0]), *operands[1:]], [_lent(output)]
        routes: list[Route[Heads]] = [_lent_route, own_route, own_route]
        part_exchange(
            sent, call.groups, attend, lent, call.group, call.decision, routes=routes, routes_back=[_lent_route]
        )
    elif call.gathers:
        part_exchange(operands[1:], call.groups, attend, [], call.group, call.decision)
    elif call.projection is not None:
        (all_heads,) = call.groups
        assert weight is not None and isinstance(all_heads, HeadGroup)
        part_exchange(operands, call.groups, attend, [], call.group, call.unfused)
        fused = call.group, call.projection, call.batch_first
        y, rows = project_heads(made.pop(), all_heads, weight, bias, *fused)
        return rows.view(*order, heads, width), y.view(*order, -1)
    else:
        exchanged = [_made_in_groups(x, call.groups) for x in operands]
        how: dict[str, Any] = {"last_pieces": pieces, "as_pieces_come": project_rows if pieces else None}
        part_exchange(exchanged, call.groups, attend, [output], call.group, call.decision, prepare=_make_heads, **how)
    if not pieces:
        project_rows(None)
    return whole, None if y is None else y.view(*order, -1)


def _pieces(call: AttentionCall, rows: int) -> list[HeadRows]:
    """Return in which rows the last group's heads come back; none: in one collective."""
    last = call.groups[-1]
    if not call.by_rows or not isinstance(last, HeadGroup) or len(call.groups) == 1:
        return []
    return HeadRows.cut_rows(last, split_rows(rows, len(call.groups)), call.batch_first)


def _backward(
    ctx: Any,
    d_output: torch.Tensor | None,
    d_y: torch.Tensor | None,
    rows: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Exchange d_output: what comes back are the gradients of q, k and v; of gathered k and v the ranks' summands.

    d_y, rows, weight: of the projection, of which d_output has a part.
    """
    call: AttentionCall = ctx.call
    d_weight = d_bias = None

    def project_back() -> None:
        nonlocal d_weight, d_bias
        if d_y is not None:
            d_weight, d_bias = projection_gradients(call.weight_gradient, d_y, rows, ctx.needs_input_grad[4])

    if d_y is not None:
        d_y = d_y.reshape(-1, d_y.shape[-1])
    if not any(ctx.needs_input_grad[:3]):
        project_back()
        return None, None, None, d_weight, d_bias, None
    d_heads = _exchanged_gradient(call, ctx.likes[0].shape, d_output, d_y, weight)
    d_o = _d_output(call, ctx.likes[0].shape, d_output, d_y, weight) if d_heads is None else d_heads
    gradients = [like.empty() if need else None for like, need in zip(ctx.likes, ctx.needs_input_grad, strict=False)]

    def attend(index: int, heads: Heads, received: Rows) -> Rows:
        if not isinstance(heads, KeyGroup):
            found = ctx.graphs[index].gradients(received[0] if received else d_o, range(3))
            return [d_x for d_x, wanted in zip(found, gradients, strict=True) if wanted is not None]
        given = heads.heads_of(d_o)
        back: list[torch.Tensor] = []
        if isinstance(heads, LentKeyGroup):
            given = _with_borrowed(heads, d_o, received[0])
        d_q, *found = ctx.graphs[index].gradients(given, range(3))
        if gradients[0] is not None and isinstance(heads, LentKeyGroup):
            back = _keep(heads, d_q, gradients[0])
        elif gradients[0] is not None:
            heads.heads_of(gradients[0]).copy_(d_q)
        return [*back, *(d_x for d_x, wanted in zip(found, gradients[1:], strict=True) if wanted is not None)]

    def exchange(sent: Rows, results: Rows, **routes: Any) -> None:
        part_exchange(sent, call.groups, attend, results, call.group, call.unfused, under_last=project_back, **routes)

    if call.lends:
        d_lent = [] if gradients[0] is None else [_lent(gradients[0])]
        sums = [d_x for d_x in gradients[1:] if d_x is not None]
        results, lent = [*d_lent, *sums], [_lent_route] * len(d_lent)
        routes: list[Route[Heads]] = [*lent, *([own_route] * len(sums))]
        exchange([_lent(d_o)], results, routes=[_lent_route], routes_back=routes)
    elif not call.gathers:
        sent = [d_o] if d_heads is None else []
        exchange(sent, [d_x for d_x in gradients if d_x is not None], prepare=_make_heads)
    elif sums := [d_x for d_x in gradients[1:] if d_x is not None]:
        exchange([], sums)
    else:  # frozen keys and values: nothing comes back
        for index, keys in enumerate(call.groups):
            attend(index, keys, [])
        project_back()
    return *gradients, d_weight, d_bias, None


def _exchanged_gradient(
    call: AttentionCall,
    shape: Sequence[int],
    d_output: torch.Tensor | None,
    d_y: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the gradient of this rank's heads, if a fused operator runs the projection's product and its dispatch."""
    matmul, exchange = call.projection, call.decision.call
    if matmul is None or not isinstance(exchange, Exchange):
        return None
    if not comes_through_alone(exchange, d_output, d_y, call.group):
        return None
    assert d_y is not None and weight is not None
    width = weight.shape[1] // shape[2]
    return exchanged_gradient(d_y, weight, shape[1], width, call.group, matmul, call.batch_first)


def _d_output(
    call: AttentionCall,
    shape: Sequence[int],
    d_output: torch.Tensor | None,
    d_y: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of the output, [s, B, N, D]: what is given, and what comes through the projection."""
    if d_output is not None and call.batch_first:
        d_output = d_output.transpose(0, 1)
    if d_y is None:
        assert d_output is not None
        return d_output
    assert weight is not None
    tokens, batch, heads = shape[:3]
    d_rows = heads_of_product(d_y, weight, None, weight.shape[1] // heads, "projection")
    if call.batch_first:
        d_projected = d_rows.view(batch, tokens, heads, -1).transpose(0, 1)
    else:
        d_projected = d_rows.view(tokens, batch, heads, -1)
    if d_output is not None:
        return d_output + finished(d_projected)
    return finished(d_projected) if call.gathers else _made_in_groups(d_projected, call.groups)


def _made_in_groups(x: torch.Tensor, groups: Sequence[Heads]) -> torch.Tensor:
    """Return heads x [s, B, N, D] that can be made group by group; if they cannot, or are there, a plain tensor."""
    places = [heads.places(x.shape[2]) for heads in groups if isinstance(heads, HeadGroup)]
    return x.finished_unless_cut(2, places) if isinstance(x, UnfinishedHeads) else x


def _make_heads(x: torch.Tensor, heads: HeadGroup) -> None:
    """Make a group's heads of x, if they are still to be made."""
    if isinstance(x, UnfinishedHeads):
        x.some(2, heads.places(x.shape[2]))


def _lent(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of x [s, B, N, D] that a rank lends, a view."""
    return x[kept_rows(len(x)) :]


def _lent_route(keys: Heads) -> LentRows:
    assert isinstance(keys, LentKeyGroup)
    return keys.lent


def _with_borrowed(keys: LentKeyGroup, x: torch.Tensor, borrowed: torch.Tensor) -> torch.Tensor:
    """Return the group's heads of the rows of x that stay, and of those of the borrower."""
    return torch.cat([keys.heads_of(x)[: kept_rows(len(x))], borrowed])


def _keep(keys: LentKeyGroup, made: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Write what was made of the rows that stay to x; return what goes back to the borrower."""
    kept = kept_rows(len(x))
    keys.heads_of(x)[:kept].copy_(made[:kept])
    return [made[kept:]]


def _checked(o: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention's output; raise `ValueError` unless it is like the queries, with the values' features."""
    shape = (*q.shape[:3], v.shape[3])
    if (o.shape, o.dtype) != (shape, q.dtype):
        raise ValueError(
            f"a shared sequence: attention made {list(o.shape)} {o.dtype}, and must make {list(shape)} {q.dtype}"
        )
    return o
