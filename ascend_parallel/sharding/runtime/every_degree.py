"""Which plans have the same bits at every degree of tensor parallelism, with COC_DETERMINISTIC=tp.

A matmul whose weight is cut runs in the blocks and the tree of ops/blocks.py, as a kernel of the overlap pass, also on
a mesh dimension of one rank. Any other sum over ranks is refused, as is a matmul of parts of matrices. The layouts of
cut matmuls have to come from the user: the planner chooses others on another mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.process_groups.collectives import ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import CALL, Node
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.overlapped_matmul import matmul_of
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import Redistribution
from ascend_parallel.sharding.rules import draws

# Sums of which one rank has a row, and the others zeros, are exact.
EXACT = ("aten.embedding.default",)
# Operators that multiply the matrices in the last two dimensions of their tensors.
MATRICES = ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "attention")
# Operators that multiply over any dimension.
PRODUCTS = ("mixture_of_experts", "einsum", "convolution", "conv1d", "conv2d", "conv3d")

_DegreeDependence = tuple[str, int, str]
"""A node, a mesh dimension, and why its bits depend on the number of ranks there."""


def refuse_sums_without_tree(plan: ShardingPlan, settings: Settings) -> None:
    """Raise `DegreeError`, which names the operator, if a plan has a sum over ranks that is not the tree.

    Ranks with the same plan and settings decide the same.
    """
    fused_plan = plan.fused(settings)
    name, dim, reason = next(chain(_sums(plan, fused_plan), _operators(plan, fused_plan)), ("", 0, ""))
    if reason:
        module = plan.graph.nodes[name].module
        where = f"{module}: {name}" if module else name
        raise DegreeError(f"{where} on mesh dimension {plan.mesh.dim_names[dim]}: {reason}")


def _sums(plan: ShardingPlan, fused_plan: FusedPlan) -> Iterator[_DegreeDependence]:
    """Yield every sum over ranks that runs outside of kernels."""
    runs = plan.beside(fused_plan)
    for conversion in runs.conversions:
        source = plan.graph.nodes[conversion.value.node]
        reader = conversion.reader.split(", ")[0] or source.name
        exact = source.call is not None and source.call.name in EXACT
        for dim in () if exact else _summed_dims(runs, conversion.ahead):
            yield source.name, dim, "its partial sums have no tree"
        for dim in _summed_dims(runs, conversion.back):
            yield reader, dim, "the gradient of its input is a sum over ranks, which has no tree"
    for name, steps in runs.op_collectives.items():
        for step in steps:
            yield name, step.mesh_dim, "its own collective has no tree"


def _summed_dims(plan: ShardingPlan, redistribution: Redistribution | None) -> Iterator[int]:
    for step in () if redistribution is None else redistribution.steps:
        if step.kind in (ALL_REDUCE, REDUCE_SCATTER) and plan.mesh.shape[step.mesh_dim] > 1:
            yield step.mesh_dim


def _operators(plan: ShardingPlan, fused_plan: FusedPlan) -> Iterator[_DegreeDependence]:
    """Yield operators of which a rank computes other bits than one rank alone."""
    for dim in range(plan.mesh.ndim):
        for node in plan.graph.of_kind(CALL):
            if reason := _reason(plan, fused_plan, node, dim):
                yield node.name, dim, reason


def _reason(plan: ShardingPlan, fused_plan: FusedPlan, node: Node, dim: int) -> str:
    call = node.call
    assert call is not None
    kernels = (each for each in fused_plan.kernels.values() if node.name in each.nodes and each.mesh_dim == dim)
    kernel = next(kernels, None)
    if kernel is not None and kernel.row_dim is not None:
        return "the gradients of what acts on the ranks' rows have no tree: sequence parallelism is not covered"
    if kernel is not None:
        return "" if node.name in plan.configured else "the planner has cut it: give it a strategy"
    reads, writes = fused_plan.inputs[node.name], tuple(fused_plan.layouts[value] for value in node.values)
    shapes = [len(meta.shape) for meta in (*call.inputs, *node.outputs)]
    cuts = [
        layout[dim].dim - dims
        for layout, dims in zip((*reads, *writes), shapes, strict=True)
        if layout[dim].kind == "shard"
    ]
    matmul, operator = matmul_of(call), call.operator
    if plan.mesh.shape[dim] == 1:  # the other dimensions' parts are whole
        is_cut = matmul is not None and reads[matmul.weight][dim].kind == "shard"
        return "it is cut, and neither a column nor a row layer" if is_cut else ""
    if cuts and (matmul is not None or operator in PRODUCTS):
        return "it is cut, and neither a column nor a row layer"
    if any(cut >= -2 for cut in cuts) and any(operator.endswith(each) for each in MATRICES):
        return "it is cut, and neither a column nor a row layer"
    return "ranks draw masks of their own parts" if cuts and draws(call) else ""
