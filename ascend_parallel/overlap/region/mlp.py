"""An MLP in chunks of rows: fc1, activation and fc2 of a chunk, then its all-reduce under the next chunks' work.

y = all_reduce(a @ w2_shard_k.t()), a = activate(x @ w1_shard_n.t(), b1)
y_shard_m = reduce_scatter(a @ w2_shard_k.t()), a = activate(all_gather(x_shard_m) @ w1_shard_n.t(), b1)
w1_shard_n [F / R, K], b1 [F / R], w2_shard_k [N, F' / R]; F' is F, or F / 2 with a gated activation

Backward runs chunk by chunk too: fc2's input gradient, the activation's, fc1's, then its all-reduce. The weight and
bias gradients are computed whole, under what is left of the all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ascend_parallel.ops.operators import rows_of, shaped
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import check_operands
from ascend_parallel.ops.record import BESIDE, MATMUL, compute, recorded_layer
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.exchange import (
    GatheredRows,
    Reduced,
    Rows,
    chunk_bounds,
    draining,
    recorded_call,
)
from ascend_parallel.overlap.region.rows import LazyRows, saved_hooks
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
    sequence_parallel
        Gather x before fc1 and reduce-scatter after fc2: x and y are this rank's rows.
    before_communicating
        Called before each pass's first collective.
    finish
        Returns the rows of the forward's all-reduce; waits for them, unless it hands them to a consumer that does.
    """

    group: dist.ProcessGroup
    cut: RegionCut
    activate: Activate
    sequence_parallel: bool = False
    source: LazyRows | None = None
    fc1_gradient: WeightGradient
    fc2_gradient: WeightGradient
    before_communicating: Callable[[], None]
    finish: Callable[[Pending], torch.Tensor] = Pending.wait

    def inputs(self, x_m: torch.Tensor, source: LazyRows | None, **options: int) -> Rows | GatheredRows:
        """Return the rows that a pass multiplies: x_m [m, K] itself, or gathered from all ranks."""
        if self.sequence_parallel:
            return GatheredRows(x_m, self.cut.sizes, self.group, source, **options)
        return Rows(x_m, self.cut.sizes, source)


def chunked_mlp(
    x: torch.Tensor,
    w1_shard_n: torch.Tensor,
    b1_shard_n: torch.Tensor | None,
    w2_shard_k: torch.Tensor,
    mlp: ChunkedMlp,
) -> torch.Tensor:
    """Run an MLP, without the bias of fc2, on one rank of its group: x [..., K], the result [..., N].

    The result is the same on every rank, as x is; with sequence parallelism both are this rank's rows. Raises
    `ValueError` for operands that do not fit, `CollectiveError` if a rank fails.
    """
    operands = [x, w1_shard_n, b1_shard_n, w2_shard_k]
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # then no activation keeps a graph
        operands = [None if operand is None else operand.detach() for operand in operands]
    y: torch.Tensor = _ChunkedMlp.apply(*operands, mlp)  # type: ignore[no-untyped-call]
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
        x_m, graphs, sizes = rows_of(x), [], mlp.cut.sizes
        ranks = mlp.group.size() if mlp.sequence_parallel else 1
        # The whole activation, for fc2's weight gradient.
        a_r = x_m.new_empty(ranks, x_m.shape[0], w2.shape[1]) if needs_w2 else None
        bias, graphed = None if b1 is None else b1.detach(), needs_x or needs_w1 or needs_b1
        # A graph inside this function would have a checkpoint run again for every chunk: keep the activation's input.
        h_all = x_m.new_empty(ranks, x_m.shape[0], w1.shape[0]) if graphed and saved_hooks() else None
        with recorded_call(mlp.group, mlp.cut, w2.t(), mlp.sequence_parallel):
            inputs = mlp.inputs(x_m, mlp.source)
            reduced = Reduced(x_m.new_empty(x_m.shape[0], w2.shape[0]), sizes, mlp.group, mlp.sequence_parallel)
            with _guarded(inputs, reduced):
                for index, (start, stop) in enumerate(chunk_bounds(sizes)):
                    h_r = x_m.new_empty(ranks, stop - start, w1.shape[0])
                    inputs.multiply(index, w1.t(), h_r, "fc1")
                    if h_all is not None:
                        h_all[:, start:stop].copy_(h_r)
                    now = graphed and h_all is None
                    a_c, graph = compute(BESIDE, "activation", _activate, mlp.activate, h_r, bias, now)
                    graphs.append(graph)
                    a_c = a_c.view(ranks, stop - start, w2.shape[1])
                    reduced.send(index, compute(MATMUL, "fc2", reduced.multiply, index, a_c, w2.t()))
                    if a_r is not None:
                        a_r[:, start:stop].copy_(a_c)
            keep = mlp.sequence_parallel and not mlp.cut.settings.recompute_all_gather
            gathered = inputs.wait() if keep and needs_w1 else None
        ctx.save_for_backward(
            (x if gathered is None else gathered) if needs_w1 else None,
            w1 if needs_x else None,
            w2 if graphed else None,
            None if a_r is None else a_r.flatten(0, 1),
            h_all,
            None if h_all is None else b1,
        )
        ctx.mlp, ctx.graphs, ctx.x_shape, ctx.hidden, ctx.kept = mlp, graphs, x.shape, w1.shape[0], keep
        return shaped(mlp.finish(reduced.pending), (*x.shape[:-1], w2.shape[0]))

    @staticmethod
    @once_differentiable
    @recorded_layer("mlp", "backward")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, w1, w2, a_m, *activation = ctx.saved_tensors
        mlp: ChunkedMlp = ctx.mlp
        needs_x, needs_w1, needs_b1, _, _ = ctx.needs_input_grad
        mlp.fc2_gradient.begin(a_m, w2)
        mlp.fc1_gradient.begin(x, w1)
        mlp.before_communicating()
        dy_m = rows_of(dy.contiguous())
        with recorded_call(mlp.group, mlp.cut, w1, mlp.sequence_parallel), ExitStack() as stack:
            gradients = mlp.inputs(dy_m, None, ahead=len(mlp.cut.sizes))
            again = None if x is None or ctx.kept else mlp.inputs(rows_of(x.contiguous()), None)
            reduced = None
            if needs_x:
                dx_m = dy_m.new_empty(dy_m.shape[0], w1.shape[1])
                reduced = Reduced(dx_m, mlp.cut.sizes, mlp.group, mlp.sequence_parallel)
            stack.enter_context(_guarded(gradients, again, reduced))
            if isinstance(again, GatheredRows) and isinstance(gradients, GatheredRows):
                gradients.send(len(mlp.cut.sizes))
                if mlp.cut.settings.order != "compute_first":
                    again.send(len(mlp.cut.sizes))
            dh_r = gradients.x_r.new_empty(*gradients.x_r.shape[:2], ctx.hidden) if needs_w1 or needs_b1 else None
            for index, dh_c in _hidden_gradients(ctx, gradients, w2, dh_r, *activation):
                if reduced is not None:
                    reduced.send(index, compute(MATMUL, "fc1", reduced.multiply, index, dh_c, w1))
            if isinstance(again, GatheredRows):
                again.send(len(mlp.cut.sizes))
            dw2 = None
            if a_m is not None:  # before fc1's, as without regions, and under the rest of the gather of x
                dw2 = compute(MATMUL, "weight gradient", mlp.fc2_gradient.compute, a_m, gradients.wait())
            x_m = x if again is None else again.wait()
            dw1, db1 = _fc1_gradients(ctx, x_m, None if dh_r is None else dh_r.flatten(0, 1))
            dx = None if reduced is None else reduced.pending.wait().view(ctx.x_shape)
        return dx, dw1, db1, dw2, None


def _activate(
    activate: Activate, h_r: torch.Tensor, bias: torch.Tensor | None, graphed: bool
) -> tuple[torch.Tensor, tuple[GradientEdge, GradientEdge] | None]:
    """Return the activation [r m_c, F'] of a chunk h_r [r, m_c, F], and the edges of its graph: its own and h_r's.

    The graph holds what the activation saves for backward, and not h_r or the result.
    """
    h_c = h_r.flatten(0, 1)
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
    ctx: Any,
    gradients: Rows | GatheredRows,
    w2: torch.Tensor | None,
    dh_r: torch.Tensor | None,
    h_all: torch.Tensor | None,
    b1: torch.Tensor | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each chunk's gradient of fc1's output [r, m_c, F], and write it to dh_r; nothing if it is not needed.

    h_all [r, m, F] and b1 [F], or None: the activation's input, if its graphs were not kept.
    """
    if w2 is None:
        return
    # A second backward of a retained graph needs the activations' graphs again; else they are freed chunk by chunk.
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    for index, (start, stop) in enumerate(chunk_bounds(ctx.mlp.cut.sizes)):
        da_r = w2.new_empty(gradients.x_r.shape[0], stop - start, w2.shape[1])
        gradients.multiply(index, w2, da_r, "fc2")
        if h_all is not None:
            _, ctx.graphs[index] = _activate(ctx.mlp.activate, h_all[:, start:stop].contiguous(), b1, True)
        a_edge, h_edge = ctx.graphs[index]
        da_c = da_r.flatten(0, 1)
        (dh_c,) = compute(BESIDE, "activation", torch.autograd.grad, [a_edge], [h_edge], [da_c], retain_graph=kept)
        if not kept:
            ctx.graphs[index] = None
        del a_edge, h_edge
        dh_c = dh_c.view(*da_r.shape[:2], ctx.hidden)
        if dh_r is not None:
            dh_r[:, start:stop].copy_(dh_c)
        yield index, dh_c


def _fc1_gradients(
    ctx: Any, x_m: torch.Tensor | None, dh_m: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of fc1's weight and bias, None where not needed: x_m [M, K], dh_m [M, F]."""
    if dh_m is None:
        return None, None
    db1 = dh_m.sum(dim=0) if ctx.needs_input_grad[2] else None
    if x_m is None:
        return None, db1
    gradient = ctx.mlp.fc1_gradient
    return compute(MATMUL, "weight gradient", gradient.compute, rows_of(x_m.contiguous()), dh_m), db1


@contextmanager
def _guarded(*parts: Rows | GatheredRows | Reduced | None) -> Iterator[None]:
    """Wait for what the parts have started if the context fails."""
    pending = [part.pending for part in parts if isinstance(part, (GatheredRows, Reduced))]
    with draining(*pending):
        yield
