"""Shards replicated operators whose readers all take the same slice: at no cost, and with less memory.

Propagation replicates tensors without a gradient that are computed from replicated tensors only (ids, masks,
positions): their slices cost nothing, and the choices of distant operators stay independent. Where all readers take the
same slice, the operator can compute only that slice; MindSpore's manual configurations do the same.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_parallel.sharding.graph import CALL, Node
from ascend_parallel.sharding.layout import REPLICATE, Layout
from ascend_parallel.sharding.planner.options import Option, Options
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan


def slice_replicated(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with these operators sharded; its conversions cost the same. Does not modify `plan`."""
    layouts, inputs, sliced = dict(plan.layouts), dict(plan.inputs), set()
    readers, options = plan.graph.readers(), Options(tuple(plan.mesh.shape))
    kept = plan.graph.kept | set(plan.shared_layouts)
    for node in reversed(list(plan.graph.nodes.values())):
        if not _is_free(plan, node):
            continue
        common = []
        for value in node.values:
            read = {inputs[name][index] for name, index in readers[value]}
            common += list(read) if len(read) == 1 and value not in kept else []
        option = _option(options, node, tuple(common))
        if option is not None:
            layouts |= dict(zip(node.values, option.outputs, strict=True))
            inputs[node.name] = option.inputs
            sliced.add(node.name)
    return replace(plan, layouts=layouts, inputs=inputs, single=plan.single - sliced) if sliced else plan


def _is_free(plan: ShardingPlan, node: Node) -> bool:
    """Tell whether an operator is replicated with all its inputs, and has no gradient."""
    if node.kind != CALL or node.name in plan.configured:
        return False
    tensors = [*node.inputs, *node.values]
    if any(value in plan.differentiable for value in tensors):
        return False
    whole: Layout = (REPLICATE,) * plan.mesh.ndim
    return all(plan.layouts[value] == whole for value in tensors)


def _option(options: Options, node: Node, outputs: tuple[Layout, ...]) -> Option | None:
    """Return the option that produces `outputs` from replicated inputs or their slices; None if nothing is sharded."""
    sharded = any(placement.kind == "shard" for layout in outputs for placement in layout)
    if len(outputs) != len(node.outputs) or not sharded:
        return None
    for option in options.of(node, (False,) * (len(node.inputs) + 1)):
        free = all(placement.kind in ("replicate", "shard") for layout in option.inputs for placement in layout)
        if free and option.outputs == outputs:
            return option
    return None
