"""Attention of a sequence that ranks share: dispatch, attention and combine in overlapped groups, with autograd.

`run_attention` is one autograd function over queries, keys and values. Inside of it the attention of each group of
heads builds its own autograd graph (`InnerGraph`), so that backward can run group by group between the all-to-alls.

    forward    dispatch 0, 1 -> attention 0 -> combine 0, dispatch 2 -> attention 1 -> ... -> combine of the last group
    backward   the same, with gradients

Hidden are the all-to-alls of every group but the first (dispatch) and the last (combine): 1 / groups stays exposed.
Each head's attention is computed on whole sequences, by the function that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ascend_parallel.ops.head_exchange import HeadGroup, head_groups, repeats_of
from ascend_parallel.ops.operators import log_once
from ascend_parallel.ops.part_exchange import Rows, part_exchange
from ascend_parallel.ops.problem import HEAD_EXCHANGE, Problem, heads_problem
from ascend_parallel.ops.record import recorded_pass
from ascend_parallel.ops.registry import Choice, choose
from ascend_parallel.overlap.inner_graph import InnerGraph, SavedTensors, TensorLike
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import DisagreementError, exchange
from ascend_parallel.settings import Settings

Attention = Callable[[HeadGroup, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attention(heads, q, k, v)`` of whole sequences, [S, B, n, D] each, with the tokens in the order of the ranks.

It returns o [S, B, n, D], must be a function of its operands, and may use autograd as it likes, but no collective of
the same ranks. The heads of q are a multiple of those of k and v; head i of q reads head i // multiple of k.
"""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The options of `run_attention` that are no tensors."""

    attention: Attention
    groups: Sequence[HeadGroup]
    group: dist.ProcessGroup
    choice: Choice
    graded: bool


def run_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention: Attention,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
) -> torch.Tensor:
    """Return the attention of this rank's tokens to the tokens of all ranks, [s, B, N, D].

    q      [s, B, N, D], this rank's tokens; every rank of `group` has as many
    k, v   [s, B, n, D], where N is a multiple of n

    A rank computes whole heads: outputs and gradients have the bits of one rank that has the whole sequence. Where the
    ranks do not share the heads of keys evenly, each head goes to several ranks, and its gradient is a sum of theirs.
    What requires gradients must be the same on all ranks. Raises `ValueError` if the ranks cannot share the heads,
    `DisagreementError` if their tensors differ in shape, `CollectiveError` if a rank fails.
    """
    settings.arithmetic.refuse(
        "context parallelism has no tree: weight gradients are summed over the ranks that share a sequence"
    )
    confirm_shapes(q, k, v, group)
    repeats = repeats_of(q.shape[2], k.shape[2], group.size())
    q, k, v = (as_autocast(x) for x in (q, k, v))
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    choice = attention_choice(q, k, v, group, settings)
    groups = head_groups(choice.sizes, [len(q)] * group.size(), group.rank())
    graded = torch.is_grad_enabled()
    call = AttentionCall(attention=attention, groups=groups, group=group, choice=choice, graded=graded)
    output: torch.Tensor = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return output


def attention_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> Problem:
    """Return the problem of an exchange of the heads of q, k and v, as `run_attention` takes them."""
    repeats = repeats_of(q.shape[2], k.shape[2], group.size())
    features = q.shape[2:].numel() + repeats * (k.shape[2:].numel() + v.shape[2:].numel())
    tokens = group.size() * q.shape[:2].numel()
    return heads_problem(k.shape[2] * repeats // group.size(), tokens, features, q, group)


def attention_choice(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, settings: Settings
) -> Choice:
    """Return in how many groups the heads of q, k and v are exchanged: the same on every rank."""
    choice = choose(attention_problem(q, k, v, group), settings)
    log_once(choice)
    return choice


def attention_in_turn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return what `run_attention` returns, by torch's own collectives and autograd in turn: one all-to-all each way."""
    repeats, ranks = repeats_of(q.shape[2], k.shape[2], group.size()), group.size()
    q, k, v = (as_autocast(x) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
    (heads,) = head_groups((k.shape[2] // ranks,), [len(q)] * ranks, group.rank())
    sizes = heads.received_sizes, heads.sent_sizes
    # The products wait for the rows.
    received = [all_to_all_single_autograd(heads.join(x), *sizes, group) * 1 for x in (q, k, v)]
    made = _checked(attention(heads, *received), received[0], received[2])
    back = all_to_all_single_autograd(made.contiguous(), *sizes[::-1], group) * 1
    by_rank = back.view(ranks, len(q), *back.shape[1:])  # [R, s, B, n, D]
    return by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3)


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype in which autocast would compute attention: cast before it is sent."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


_CONFIRMED: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def confirm_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, others: str = ""
) -> None:
    """Raise `ValueError` for operands that do not fit, `DisagreementError` if the ranks' operands differ.

    The ranks compare when one of them has not had such operands on this group before. others: what else must be alike.
    """
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[3] != k.shape[3]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"{HEAD_EXCHANGE}: {shapes} are not [s, B, N, D] and twice [s, B, n, D]")
    graded = torch.is_grad_enabled()
    kinds = [f"{list(x.shape)} {x.dtype}{' with gradient' if graded and x.requires_grad else ''}" for x in (q, k, v)]
    mine = "; ".join(filter(None, (f"q, k, v {', '.join(kinds)}", others)))
    confirmed = _CONFIRMED.setdefault(group, set())
    if mine in confirmed or group.size() == 1:
        return
    with hide_from_selective_checkpoint():
        by_rank = exchange(group, f"{HEAD_EXCHANGE} of {mine}", {"tensors": mine}, DisagreementError, topic="context")
    if any(value["tensors"] != mine for value in by_rank.values()):
        what = "; ".join(f"rank {rank}: {value['tensors']}" for rank, value in by_rank.items())
        raise DisagreementError(
            f"{HEAD_EXCHANGE}: ranks of {describe(group)} have other shares of the sequence ({what}): give every rank "
            "as many tokens, padded to a multiple of the ranks"
        )
    confirmed.add(mine)


class _Attention(torch.autograd.Function):
    """The autograd function of `run_attention`."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        ctx.call, ctx.saved, ctx.graphs = call, SavedTensors(), []
        ctx.likes = [TensorLike(x) for x in (q, k, v)]
        with hide_from_selective_checkpoint(), recorded_pass(ctx, "attention", "forward", q.device.type):
            output = _forward(ctx, (q, k, v))
        # The empty tensor makes a checkpoint stop, and compute again, at the same point on every rank.
        ctx.save_for_backward(q.new_empty(0), *ctx.saved.give())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, *saved = ctx.saved_tensors  # a checkpoint computes the forward again here
        with ctx.saved.given(saved), recorded_pass(ctx, "attention", "backward", d_output.device.type):
            return _backward(ctx, d_output)


def _forward(ctx: Any, operands: Rows) -> torch.Tensor:
    """Exchange q, k and v; return the attention of this rank's tokens."""
    call: AttentionCall = ctx.call
    q, _, v = operands
    needs = [call.graded and need for need in ctx.needs_input_grad[:3]]
    output = q.new_empty(*q.shape[:3], v.shape[3])

    def attend(_: int, heads: HeadGroup, received: Rows) -> Rows:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _checked(call.attention(heads, q, k, v), q, v)

        graph = InnerGraph(ctx.saved, call.graded, whole_backward=False)
        ctx.graphs.append(graph)
        return [graph.run(run, received, needs)]

    part_exchange(operands, call.groups, attend, [output], call.group, call.choice)
    return output


def _backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Exchange d_output: what comes back are the gradients of q, k and v."""
    call: AttentionCall = ctx.call
    gradients = [like.empty() if need else None for like, need in zip(ctx.likes, ctx.needs_input_grad, strict=False)]

    def attend(index: int, _: HeadGroup, received: Rows) -> Rows:
        found = ctx.graphs[index].gradients(received[0], range(3))
        return [d_x for d_x, wanted in zip(found, gradients, strict=True) if wanted is not None]

    wanted = [d_x for d_x in gradients if d_x is not None]
    part_exchange([d_output], call.groups, attend, wanted, call.group, call.choice)
    return *gradients, None


def _checked(o: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention's output; raise `ValueError` unless it is like the queries, with the values' features."""
    shape = (*q.shape[:3], v.shape[3])
    if (o.shape, o.dtype) != (shape, q.dtype):
        raise ValueError(
            f"{HEAD_EXCHANGE}: attention made {list(o.shape)} {o.dtype}, and must make {list(shape)} {q.dtype}"
        )
    return o
