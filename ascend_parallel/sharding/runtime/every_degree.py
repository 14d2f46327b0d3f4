"""Which plans have the same bits at every degree of tensor parallelism, with COC_DETERMINISTIC=tp.

A matmul whose weight is cut runs in the blocks and the tree of ops/blocks.py, as a kernel of the overlap pass, also on
a mesh dimension of one rank. All else has to be whole on every rank, or cut without a sum over ranks. The layouts of
cut matmuls have to come from the user: the planner chooses others on another mesh.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_parallel.ops.registry import DegreeError
from ascend_parallel.sharding.graph import CALL, Node
from ascend_parallel.sharding.layout import PARTIAL_GRAD
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules import draws, own_reductions
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.overlapped_linear import ColumnKernel, RowKernel, matmul_of

# Sums of which one rank has a row, and the others zeros, are exact.
EXACT = ("aten.embedding.default",)


def refuse_sums_without_tree(plan: ShardingPlan, schedule: Schedule) -> None:
    """Raise `DegreeError`, which names the operator, if a plan has a sum over ranks that is not the tree."""
    for dim, name in enumerate(plan.mesh.dim_names):
        for node in plan.graph.nodes.values():
            if node.kind == CALL and (reason := _reason(plan, schedule, node, dim)) is not None:
                where = f"{node.module}: " if node.module else ""
                raise DegreeError(f"COC_DETERMINISTIC=tp: {where}{node.name} on mesh dimension {name}: {reason}")


def _reason(plan: ShardingPlan, schedule: Schedule, node: Node, dim: int) -> str | None:
    call = node.call
    assert call is not None
    kernel = next(_kernels(schedule, node, dim), None)
    if kernel is not None and kernel.row_dim is not None:
        return "the gradients of what acts on the ranks' rows have no tree: sequence parallelism is not covered"
    if kernel is not None:
        return None if node.name in plan.configured else "the planner has cut it: give it a strategy"
    reads, writes = schedule.inputs[node.name], [schedule.layouts[value] for value in node.values]
    is_cut, matmul = any(layout[dim].kind == "shard" for layout in (*reads, *writes)), matmul_of(call)
    if plan.mesh.shape[dim] == 1:
        is_cut = matmul is not None and reads[matmul.weight][dim].kind == "shard"
    if is_cut and matmul is not None:
        return "it is cut, and neither a column nor a row layer"
    if plan.mesh.shape[dim] == 1:
        return None
    if any(layout[dim].kind == "partial" for layout in writes) and call.name not in EXACT:
        return "its partial sums have no tree"
    read = [(value, layout) for value, layout in zip(node.inputs, reads, strict=True) if value in plan.differentiable]
    if any(layout[dim] == PARTIAL_GRAD for _, layout in read):
        return "the gradient of its input is a sum over ranks, which has no tree"
    if any(each.mesh_dim == dim for each in own_reductions(call, reads, tuple(plan.mesh.shape))):
        return "its own sum over ranks has no tree"
    return "ranks draw masks of their own parts" if is_cut and draws(call) else None


def _kernels(schedule: Schedule, node: Node, dim: int) -> Iterator[ColumnKernel | RowKernel]:
    for kernel in schedule.kernels.values():
        assert isinstance(kernel, ColumnKernel | RowKernel)
        if node.name in kernel.nodes and kernel.mesh_dim == dim:
            yield kernel
