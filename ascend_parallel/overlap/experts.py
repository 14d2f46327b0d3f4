"""A rank's experts in a mixture of experts: dispatch, experts and combine in overlapped groups, with autograd.

`run_experts` is one autograd function over the rows and their probabilities. Inside of it each group of experts builds
its own autograd graph (`InnerGraph`), so that backward can run group by group between the all-to-alls. What these
graphs keep for backward goes through the function's own ``save_for_backward``: activation checkpoints, hooks on saved
tensors and ``retain_graph`` act as on any function, and start at the same point on every rank.

    forward    dispatch 0, 1 -> [shared expert, first part] -> experts 0 -> combine 0, dispatch 2 -> experts 1 -> ...
               -> combine of the last group -> [shared expert, last part]
    backward   the same, with gradients: the shared expert's last part under the first all-to-all, and the weight
               gradients of the last group and the shared expert's first part under the last one

Hidden are the all-to-alls of every group but the first (dispatch) and the last (combine), and those too where the layer
has a shared expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ascend_parallel.ops.call import experts_exchange
from ascend_parallel.ops.decision import Decision, Known
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts, expert_exchange
from ascend_parallel.ops.operators import decided_exchange
from ascend_parallel.ops.part_exchange import Rows
from ascend_parallel.ops.record import MATMUL, compute, recorded_pass
from ascend_parallel.overlap.inner_graph import (
    InnerGraph,
    InnerSavedTensors,
    ReadersApart,
    TensorLike,
    backward_together,
    leaves_of_several,
)
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.settings import Settings

Tensors = Sequence[torch.Tensor]
RunGroup = Callable[[ExpertGroup, torch.Tensor, torch.Tensor | None, Tensors], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """The experts of a rank.

    run
        ``run(group, rows, probs, weights)`` returns the experts' outputs, in the shape and dtype of `rows` [n, H]. The
        rows are in the order [source][expert]: ``group.received[source][expert]`` rows for each of ``group.experts``.
        `probs` are those of the same rows, or None. It is called for every group, with zero rows too, and may use
        autograd as it likes, but no collective of the same ranks.
    weights
        Tensors [E, ...] with a part for each expert; `run` gets the group's parts, and autograd their gradients. They
        must be all that `run` reads of what requires a gradient. Empty: `run` reads parameters by itself; these get
        their gradients inside backward, with the hooks that are on them.
    parameters
        The parameters that `run` reads by itself, for experts without `weights`.
    weight_gradients
        Computes what `run` has put off in backward, under the last all-to-alls; for experts without `weights`.
    whole_backward
        `run` computes the gradients of rows and `weights` in one piece, as an autograd function in Python does: the
        last group's weight gradients are not put off, which would compute both twice.
    runs_once
        Backward of `run`, or of the shared expert, adds gradients to memory of its own: no part of it may run again.
    """

    run: RunGroup
    weights: Tensors = ()
    parameters: Tensors = ()
    weight_gradients: Callable[[], None] | None = None
    whole_backward: bool = False
    runs_once: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """An expert of all of a rank's own rows, computed under all-to-alls that no other expert can hide.

    x
        What it is called with; `ReadersApart`: the gradients of its readers are added one by one.
    parts
        Functions of one tensor, called in turn: the first on `x`, under the first dispatch, the others, on the result
        before them, under the last combine.
    parameters
        What they read: these get their gradients inside backward, with the hooks that are on them.
    """

    x: torch.Tensor | ReadersApart
    parts: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    parameters: Tensors


@dataclass(frozen=True, kw_only=True)
class ExpertsCall:
    """The options of `run_experts` that are no tensors."""

    experts: LocalExperts
    counts: RowCounts
    group: dist.ProcessGroup
    decision: Decision
    parts: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    readers: ReadersApart | None
    graded: bool


def run_experts(
    rows: torch.Tensor,
    counts: RowCounts,
    experts: LocalExperts,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None = None,
    probs: torch.Tensor | None = None,
    shared: SharedExpert | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Send rows to the ranks of their experts, run the experts, and return their outputs for each row, in its place.

    rows     [S, H], sorted by the global number of their expert: first those of rank 0's experts
    probs    [S, ...] or None: sent with the rows
    returns  [S, H], and the result of the shared expert, or None

    known: what decides the groups beside the settings; None: their plan alone.

    Each expert gets its rows in the order of their source ranks, as without groups, so that outputs and gradients keep
    their bits. Whether tensors require gradients, and which of probs and shared there are, must be the same on all
    ranks; the counts need not be. Raises `ValueError` if the counts do not fit, `CollectiveError` if a rank fails.
    """
    counts.check(rows, group)
    call = ExpertsCall(
        experts=experts,
        counts=counts,
        group=group,
        decision=decided_exchange(experts_exchange(rows, counts.experts, group), group, settings, known),
        parts=() if shared is None else tuple(shared.parts),
        readers=shared.x if shared is not None and isinstance(shared.x, ReadersApart) else None,
        graded=torch.is_grad_enabled(),
    )
    parameters = [*experts.parameters, *(() if shared is None else shared.parameters)]
    reads = any(parameter.requires_grad for parameter in parameters)  # backward runs for them, too
    anchor = torch.empty(0, device=rows.device, requires_grad=reads)
    x = None if shared is None else shared.x.x if isinstance(shared.x, ReadersApart) else shared.x
    out, shared_out = _Experts.apply(anchor, rows, probs, x, call, *experts.weights)  # type: ignore[no-untyped-call]
    return out, shared_out


def experts_in_turn(
    rows: torch.Tensor,
    counts: RowCounts,
    experts: LocalExperts,
    *,
    group: dist.ProcessGroup,
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `run_experts` returns without a shared expert, by torch's own collectives and autograd in turn.

    As the frameworks' own layers run it: dispatch, all experts, combine. Measurements compare with it.
    """
    (whole,) = counts.groups((counts.experts,))
    there, back = (whole.received_sizes, whole.sent_sizes), (whole.sent_sizes, whole.received_sizes)
    received, *more = (
        all_to_all_single_autograd(x, *there, group) * 1  # the product waits for the rows
        for x in (rows, *(() if probs is None else (probs,)))
    )
    made = _checked(experts.run(whole, received, more[0] if more else None, experts.weights), received)
    returned: torch.Tensor = all_to_all_single_autograd(made.contiguous(), *back, group) * 1
    return returned


class _Experts(torch.autograd.Function):
    """The autograd function of `run_experts`. Its inputs from `FIRST_WEIGHT` on are the experts' weights."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        rows: torch.Tensor,
        probs: torch.Tensor | None,
        shared_x: torch.Tensor | None,
        call: ExpertsCall,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.call, ctx.saved, ctx.groups, ctx.shared, ctx.readers = call, InnerSavedTensors(), [], [], []
        ctx.sent = [TensorLike(rows)] if probs is None else [TensorLike(rows), TensorLike(probs)]
        ctx.weights = [TensorLike(weight) for weight in weights]
        with hide_from_selective_checkpoint(), recorded_pass(ctx, "experts", "forward", rows.device.type):
            outputs = _forward(ctx, [rows] if probs is None else [rows, probs], shared_x, weights)
        # The empty tensor makes a checkpoint stop, and compute again, at the same point on every rank.
        ctx.save_for_backward(rows.new_empty(0), *ctx.saved.give())
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_shared: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _, *saved = ctx.saved_tensors  # a checkpoint computes the forward again here
        with ctx.saved.given(saved), recorded_pass(ctx, "experts", "backward", d_out.device.type):
            return _backward(ctx, d_out, d_shared)


FIRST_WEIGHT = 5


def _forward(
    ctx: Any, sent: Tensors, shared_x: torch.Tensor | None, weights: Tensors
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exchange `sent`: the rows and, if there are any, their probabilities; return the outputs of all experts."""
    call: ExpertsCall = ctx.call
    needs = [call.graded and need for need in ctx.needs_input_grad]
    input_needs = [*needs[1 : 1 + len(sent)], *needs[FIRST_WEIGHT:]]
    out = torch.empty_like(sent[0], memory_format=torch.contiguous_format)

    def experts(_: int, group: ExpertGroup, received: Rows) -> Rows:
        def run(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            probs = more[0] if len(received) == 2 else None
            return _checked(call.experts.run(group, x, probs, more[len(received) - 1 :]), x)

        graph = InnerGraph(ctx.saved, call.graded, whole_backward=call.experts.whole_backward or not weights)
        ctx.groups.append(graph)
        return [graph.run(run, [*received, *(_part(weight, group) for weight in weights)], input_needs)]

    def run_shared(*indices: int) -> None:
        nonlocal shared_x
        for index in indices:
            graph = InnerGraph(ctx.saved, call.graded, whole_backward=True)
            need = needs[3] if index == 0 else ctx.shared[-1].needs_backward
            ctx.shared.append(graph)
            assert shared_x is not None
            shared_x = compute(MATMUL, "shared expert", graph.run, call.parts[index], [shared_x], [need])
            if index == 0 and call.readers is not None:
                ctx.readers = graph.readers_apart(0)

    expert_exchange(
        sent,
        call.counts,
        experts,
        [out],
        call.group,
        call.decision,
        under_first=functools.partial(run_shared, 0) if call.parts else None,
        under_last=functools.partial(run_shared, *range(1, len(call.parts))) if call.parts else None,
    )
    if call.graded:
        _leave_out_common_leaves(ctx, weights, call.experts.runs_once)
    return out, shared_x


def _leave_out_common_leaves(ctx: Any, weights: Tensors, runs_once: bool) -> None:
    """Have leaves that several graphs read, and those that no graph of groups with `weights` is asked for, come last.

    A leaf that got a part of its gradient from each group would call its hooks once for each. Raises `RuntimeError` if
    a leaf has hooks, and backward may run once only.
    """
    graphs = [*ctx.groups, *ctx.shared]
    common = leaves_of_several(graphs)
    if weights:
        common |= {key: leaf for graph in ctx.groups for key, leaf in graph.leaves().items()}
    if runs_once:
        _refuse_hooks(common)
        return
    for graph in graphs if common else ():
        graph.leave_out(common)


def _refuse_hooks(leaves: Mapping[int, torch.Tensor]) -> None:
    for leaf in leaves.values():
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"a parameter {list(leaf.shape)} that is not registered in its layer of experts is read by several "
                "groups of them, and has hooks on its gradient, which would see a part of it: register it in the "
                "layer, set gradient_accumulation_fusion=False, or COC_PARALLEL_NUM=1"
            )


def _backward(ctx: Any, d_out: torch.Tensor, d_shared: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Exchange d_out: what comes back are the gradients of the rows, and of their probabilities."""
    call, needs, count = ctx.call, ctx.needs_input_grad, len(ctx.sent)
    d_weights = [like.empty() if need else None for like, need in zip(ctx.weights, needs[FIRST_WEIGHT:], strict=True)]
    d_sent = [like.empty() if need else None for like, need in zip(ctx.sent, needs[1:], strict=False)]
    postponed = [call.experts.weight_gradients] if call.experts.weight_gradients is not None else []

    def keep(group: ExpertGroup, gradients: Sequence[torch.Tensor]) -> None:
        for d_weight, gradient in zip(d_weights, gradients, strict=True):
            if d_weight is not None:
                _part(d_weight, group).copy_(gradient)

    def experts(index: int, group: ExpertGroup, received: Rows) -> Rows:
        graph, (dy,) = ctx.groups[index], received
        if d_weights and index == len(ctx.groups) - 1 and not call.experts.whole_backward:
            gradients = graph.gradients(dy, range(count))
            postponed.append(lambda: keep(group, graph.gradients(dy, range(count, count + len(d_weights)))))
        else:
            gradients = graph.gradients(dy, range(count + len(d_weights)))
            keep(group, gradients[count:])
        return [gradient for gradient, whole in zip(gradients, d_sent, strict=False) if whole is not None]

    def run_shared(graphs: Sequence[InnerGraph]) -> None:
        nonlocal d_shared
        for graph in graphs:
            assert d_shared is not None
            d_shared = compute(MATMUL, "shared expert", graph.gradients, d_shared, range(1))[0]

    last = ctx.shared[:1] if len(ctx.shared) > 1 else []

    def under_last() -> None:
        for weight_gradients in postponed:
            compute(MATMUL, "weight gradients", weight_gradients)
        run_shared(last)

    expert_exchange(
        [d_out],
        call.counts,
        experts,
        [d_x for d_x in d_sent if d_x is not None],
        call.group,
        call.decision,
        under_first=functools.partial(run_shared, ctx.shared[len(last) :][::-1]) if ctx.shared else None,
        under_last=under_last,
    )
    if call.readers is not None:
        call.readers.gradients[:] = ctx.readers
    backward_together([*ctx.groups, *ctx.shared])
    ctx.readers.clear()
    d_rows, d_probs = d_sent if count == 2 else (d_sent[0], None)
    return None, d_rows, d_probs, d_shared if needs[3] else None, None, *d_weights


def _part(weight: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    """Return the part of a weight [E, ...] that belongs to the experts of a group."""
    return weight.narrow(0, group.experts.start, len(group.experts))


def _checked(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the experts' outputs; raise `ValueError` unless they are like the rows."""
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        given = f"{list(y.shape)} {y.dtype} of rows {list(x.shape)} {x.dtype}"
        raise ValueError(f"expert_exchange: the experts made {given}; both must be alike")
    return y
