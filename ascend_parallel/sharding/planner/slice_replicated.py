"""What is computed whole only to be cut by all who read it is computed in slices: free, and less to hold.

Propagation keeps whole what has no gradient and comes from nothing that is cut (ids, masks, positions): every slice of
it is free, and so the choice does not tie distant operators together. Where all readers take the same slice, the
operator can give that slice at no cost; MindSpore's manual configurations of such operators say so.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_parallel.sharding.graph import CALL, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout
from ascend_parallel.sharding.planner.options import Option, Options
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan


def slice_replicated(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with such operators cut; its conversions cost the same. What is given stays as it is."""
    layouts, inputs, moved = dict(plan.layouts), dict(plan.inputs), set()
    readers, options = plan.graph.readers(), Options(tuple(plan.mesh.shape))
    kept = plan.graph.kept | set(plan.shared_layouts)
    for node in reversed(list(plan.graph.nodes.values())):
        if not _is_free(plan, node):
            continue
        wanted = []
        for value in _outputs(node):
            read = {inputs[name][index] for name, index in readers[value]}
            wanted += list(read) if len(read) == 1 and value not in kept else []
        found = _option(options, node, tuple(wanted))
        if found is not None:
            layouts |= dict(zip(_outputs(node), found.outputs, strict=True))
            inputs[node.name] = found.inputs
            moved.add(node.name)
    return replace(plan, layouts=layouts, inputs=inputs, single=plan.single - moved) if moved else plan


def _is_free(plan: ShardingPlan, node: Node) -> bool:
    """Tell whether an operator was kept whole, reads what is whole and has no gradient."""
    if node.kind != CALL or node.name in plan.configured:
        return False
    tensors = [*node.inputs, *_outputs(node)]
    if any(value in plan.differentiable for value in tensors):
        return False
    whole: Layout = (REPLICATE,) * plan.mesh.ndim
    return all(plan.layouts[value] == whole for value in tensors)


def _option(options: Options, node: Node, outputs: tuple[Layout, ...]) -> Option | None:
    """Return how the operator can give these slices of slices of what it reads, if they are slices."""
    if len(outputs) != len(node.outputs) or not any(state.kind == "shard" for one in outputs for state in one):
        return None
    for option in options.of(node, (False,) * (len(node.inputs) + 1)):
        free = all(state.kind in ("replicate", "shard") for one in option.inputs for state in one)
        if free and option.outputs == outputs:
            return option
    return None


def _outputs(node: Node) -> list[Value]:
    return [Value(node.name, index) for index in range(len(node.outputs))]
