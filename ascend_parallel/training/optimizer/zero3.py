"""Parameters held in slices and gathered where they are read: a plan's form of ZeRO level 3."""

from __future__ import annotations

from dataclasses import replace

from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, Shape, shard
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan


def sharded_parameters(plan: ShardingPlan, dim: str = "dp", *, regather: bool = True) -> ShardingPlan:
    """Return the plan with each parameter that is whole on the mesh dimension `dim` cut there instead.

    It is cut along the longest dimension that no other mesh dimension cuts, and gathered where it is read; its
    gradient is reduce-scattered where it was summed. Slices need not be even: the last ranks' are smaller or empty.
    What has no such dimension of 2 or more stays whole, and so do buffers.

    regather
        Gather a parameter again in backward, also one that the plan had cut; else every gathered one is kept until its
        backward, as much memory as at level 2 then, for a third less to send.

    Raises `ValueError` for a name that is no mesh dimension.
    """
    index = plan.mesh.dim(dim)
    if plan.mesh.shape[index] == 1:
        return plan
    layouts, cut = dict(plan.layouts), set()
    for node in plan.graph.nodes.values():
        if node.kind == PARAMETER:
            value = Value(node.name)
            layouts[value] = _cut(layouts[value], index, node.outputs[0].shape)
            cut |= {value} if layouts[value][index].kind == "shard" else set()
    return replace(plan, layouts=layouts, regathered=frozenset(cut) if regather else frozenset())


def _cut(layout: Layout, mesh_dim: int, shape: Shape) -> Layout:
    if layout[mesh_dim] != REPLICATE:
        return layout
    taken = {state.dim for state in layout if state.kind == "shard"}
    free = [dim for dim, size in enumerate(shape) if dim not in taken and size > 1]
    if not free:
        return layout
    longest = max(free, key=lambda dim: (shape[dim], -dim))
    return (*layout[:mesh_dim], shard(longest), *layout[mesh_dim + 1 :])
