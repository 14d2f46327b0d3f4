"""An MLP in chunks of rows: fc1, activation and fc2 of a chunk, then its all-reduce under the next chunks' work.

y = all_reduce(a @ w2_shard_k.t()), a = activate(x @ w1_shard_n.t(), b1)
w1_shard_n [F / R, K], b1 [F / R], w2_shard_k [N, F' / R]; F' is F, or F / 2 with a gated activation

Backward runs chunk by chunk too: fc2's input gradient, the activation's, fc1's, then its all-reduce. The weight and
bias gradients are computed whole, under what is left of the all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import multiply
from ascend_parallel.ops.operators import recorded, rows_of, shaped
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_REDUCE, Problem, check_operands
from ascend_parallel.ops.record import BESIDE, MATMUL, RECORDING, compute, recorded_layer
from ascend_parallel.ops.registry import choose
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.rows import LazyRows
from ascend_parallel.overlap.selective_checkpoint import hidden_from_selective_checkpoint
from ascend_parallel.overlap.weight_gradient import WeightGradient

Activate = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``activate(h [m, F], bias [F] or None)`` returns a [m, F'], row by row; the bias is added to h first."""


@dataclass(frozen=True, kw_only=True)
class ChunkedMlp:
    """How an MLP runs.

    cut
        The chunks, and the settings that give its all-reduces these chunks.
    activate
        The activation, built from operators of autograd.
    source
        Finishes the rows of the input; None: they are finished.
    fc1_gradient, fc2_gradient
        Where the weight gradients go.
    before_communicating
        Called before each pass's first collective.
    finish
        Returns the rows of the forward's all-reduce; waits for them, unless it hands them to a consumer that does.
    """

    group: dist.ProcessGroup
    cut: RegionCut
    activate: Activate
    source: LazyRows | None = None
    fc1_gradient: WeightGradient
    fc2_gradient: WeightGradient
    before_communicating: Callable[[], None]
    finish: Callable[[Pending], torch.Tensor] = Pending.wait


def chunked_mlp(
    x: torch.Tensor,
    w1_shard_n: torch.Tensor,
    b1_shard_n: torch.Tensor | None,
    w2_shard_k: torch.Tensor,
    mlp: ChunkedMlp,
) -> torch.Tensor:
    """Run an MLP, without the bias of fc2, on one rank of its group: x [..., K], the result [..., N].

    The result is the same on every rank, as x is. Raises `ValueError` for operands that do not fit, `CollectiveError`
    if a rank fails.
    """
    y: torch.Tensor = _ChunkedMlp.apply(x, w1_shard_n, b1_shard_n, w2_shard_k, mlp)  # type: ignore[no-untyped-call]
    return y


class _ChunkedMlp(torch.autograd.Function):
    @staticmethod
    @hidden_from_selective_checkpoint
    @recorded_layer("mlp", "forward")
    def forward(
        ctx: Any, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor, mlp: ChunkedMlp
    ) -> torch.Tensor:
        check_operands("chunked_mlp", x, w1.t())
        mlp.before_communicating()
        needs_x, needs_w1, needs_b1, needs_w2, _ = ctx.needs_input_grad
        x_m, graphs = rows_of(x), []
        y_m = x_m.new_empty(x_m.shape[0], w2.shape[0])
        a_m = x_m.new_empty(x_m.shape[0], w2.shape[1]) if needs_w2 else None  # whole, for fc2's weight gradient
        bias, graphed = None if b1 is None else b1.detach(), needs_x or needs_w1 or needs_b1
        with _reducing(y_m, w2.shape[1], mlp) as pending:
            for start, stop in _chunks(mlp):
                if mlp.source is not None:
                    mlp.source.up_to(stop)
                h_c = x_m.new_empty(stop - start, w1.shape[0])
                compute(MATMUL, "fc1", multiply, x_m[start:stop], w1.t(), h_c)
                a_c, graph = compute(BESIDE, "activation", _activate, mlp.activate, h_c, bias, graphed)
                graphs.append(graph)
                compute(MATMUL, "fc2", multiply, a_c, w2.t(), y_m[start:stop])
                pending.launch(dist.all_reduce, y_m[start:stop], group=mlp.group, async_op=True)
                if a_m is not None:
                    a_m[start:stop].copy_(a_c)
        ctx.save_for_backward(
            x if needs_w1 else None, w1 if needs_x else None, w2 if graphed else None, a_m if needs_w2 else None
        )
        ctx.mlp, ctx.graphs, ctx.x_shape, ctx.hidden = mlp, graphs, x.shape, w1.shape[0]
        return shaped(mlp.finish(pending), (*x.shape[:-1], w2.shape[0]))

    @staticmethod
    @once_differentiable
    @recorded_layer("mlp", "backward")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, w1, w2, a_m = ctx.saved_tensors
        mlp: ChunkedMlp = ctx.mlp
        needs_x, needs_w1, needs_b1, _, _ = ctx.needs_input_grad
        mlp.fc2_gradient.begin(a_m, w2)
        mlp.fc1_gradient.begin(x, w1)
        dy_m = rows_of(dy.contiguous())
        dh_m = dy_m.new_empty(dy_m.shape[0], ctx.hidden) if needs_w1 or needs_b1 else None
        if not needs_x:
            for _ in _hidden_gradients(ctx, dy_m, w2, dh_m):
                pass
            return None, *_parameter_gradients(ctx, dy_m, x, a_m, dh_m), None
        mlp.before_communicating()
        dx_m = dy_m.new_empty(dy_m.shape[0], w1.shape[1])
        with _reducing(dx_m, w1.shape[0], mlp) as pending:
            for start, stop, dh_c in _hidden_gradients(ctx, dy_m, w2, dh_m):
                compute(MATMUL, "fc1", multiply, dh_c, w1, dx_m[start:stop])
                pending.launch(dist.all_reduce, dx_m[start:stop], group=mlp.group, async_op=True)
            dw1, db1, dw2 = _parameter_gradients(ctx, dy_m, x, a_m, dh_m)
        return pending.wait().view(ctx.x_shape), dw1, db1, dw2, None


def _activate(
    activate: Activate, h_c: torch.Tensor, bias: torch.Tensor | None, graphed: bool
) -> tuple[torch.Tensor, tuple[GradientEdge, GradientEdge] | None]:
    """Return the activation of a chunk, and the edges of its graph: the activation's and that of h_c.

    The graph holds what the activation saves for backward, and not h_c or the result.
    """
    if not graphed:
        return activate(h_c, bias), None
    with torch.enable_grad():
        leaf: torch.Tensor = _Edge.apply(torch.empty(0, requires_grad=True), h_c)  # type: ignore[no-untyped-call]
        a_c = activate(leaf, bias)
        return a_c.detach(), (get_gradient_edge(a_c), get_gradient_edge(leaf))


class _Edge(torch.autograd.Function):
    """Gives a tensor an edge in the graph at which its gradient is taken; unlike a leaf, the edge does not hold it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return h.detach()

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[None, None]:
        return None, None


def _hidden_gradients(
    ctx: Any, dy_m: torch.Tensor, w2: torch.Tensor | None, dh_m: torch.Tensor | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield start, stop and the gradient of fc1's output of each chunk, and write it to dh_m; nothing if not needed."""
    if w2 is None:
        return
    # A second backward of a retained graph needs the activations' graphs again; else they are freed chunk by chunk.
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    for index, (start, stop) in enumerate(_chunks(ctx.mlp)):
        da_c = compute(MATMUL, "fc2", torch.mm, dy_m[start:stop], w2)
        a_edge, h_edge = ctx.graphs[index]
        (dh_c,) = compute(BESIDE, "activation", torch.autograd.grad, [a_edge], [h_edge], [da_c], retain_graph=kept)
        if not kept:
            ctx.graphs[index] = None
        del a_edge, h_edge
        if dh_m is not None:
            dh_m[start:stop].copy_(dh_c)
        yield start, stop, dh_c


def _parameter_gradients(
    ctx: Any, dy_m: torch.Tensor, x: torch.Tensor | None, a_m: torch.Tensor | None, dh_m: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of w1, b1 and w2, None where not needed; fc2's is computed first, as without regions."""
    mlp: ChunkedMlp = ctx.mlp
    dw1 = db1 = dw2 = None
    if a_m is not None:
        dw2 = compute(MATMUL, "weight gradient", mlp.fc2_gradient.compute, a_m, dy_m)
    if dh_m is not None and ctx.needs_input_grad[2]:
        db1 = dh_m.sum(dim=0)
    if dh_m is not None and x is not None:
        dw1 = compute(MATMUL, "weight gradient", mlp.fc1_gradient.compute, rows_of(x.contiguous()), dh_m)
    return dw1, db1, dw2


def _chunks(mlp: ChunkedMlp) -> Iterator[tuple[int, int]]:
    """Yield the first row of each chunk, and the first row behind it."""
    return pairwise(accumulate(mlp.cut.sizes, initial=0))


@contextmanager
def _reducing(y_m: torch.Tensor, k: int, mlp: ChunkedMlp) -> Iterator[Pending]:
    """Yield the all-reduces of y_m [M, N], to be launched; if the loop fails, wait for those that have started.

    k is the contraction of the matmul that makes y_m.
    """
    group, cut = mlp.group, mlp.cut
    with ExitStack() as stack:
        if (recorder := RECORDING.recorder) is not None:
            problem = Problem(ALL_REDUCE, y_m.shape[0], k, y_m.shape[1], y_m.dtype, y_m.device.type, group.size())
            call = recorded(choose(problem, cut.settings))
            stack.enter_context(recorder.call(call, problem.device, group, fused=False))
        pending = Pending(y_m, ALL_REDUCE, group, len(cut.sizes))
        with pending.launching():
            yield pending
    COUNTS.add(ALL_REDUCE, len(cut.sizes), len(cut.sizes))
