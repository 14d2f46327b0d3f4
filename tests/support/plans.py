"""Plans written by hand: a state for every tensor and reader, for tests of execution."""

from links import link_costs
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, INPUT, PARAMETER, Value
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan


def by_hand(graph, mesh, given=None, calls=None, shared_layouts=None, inputs_have_gradients=False):
    """Return a plan; layouts are tuples of states.

    given: layout of inputs and parameters by the model's names; calls: (layouts of inputs, layout of the output) by
    node; what is not named is replicated.
    """
    whole = (REPLICATE,) * mesh.ndim
    given, calls, layouts, inputs = given or {}, calls or {}, {}, {}
    differentiable = set()
    for node in graph.nodes.values():
        values = [Value(node.name, index) for index in range(len(node.outputs))]
        wants, makes = calls.get(node.name, ([whole] * len(node.inputs), given.get(node.source, whole)))
        inputs[node.name] = tuple(wants)[: len(node.inputs)]
        layouts |= dict.fromkeys(values, makes)
        has_gradient = node.kind == PARAMETER or (inputs_have_gradients and node.kind == INPUT)
        if has_gradient or (node.kind == CALL and any(value in differentiable for value in node.inputs)):
            differentiable |= set(values)
    costs = link_costs(mesh.shape, 1e-5, 1e-9)
    return ShardingPlan(
        graph=graph,
        mesh=mesh,
        costs=costs,
        objective="redistribution",
        layouts=layouts,
        inputs=inputs,
        shared_layouts={Value(name): layout for name, layout in (shared_layouts or {}).items()},
        differentiable=frozenset(differentiable),
        configured={},
        single=set(),
        cost=0.0,
    )


def planned_collectives(plan):
    """Return how often each collective should run in a step: (kind, mesh dimension, tensor, reader, direction)."""
    found = {}
    returned = set(pytree.tree_leaves(plan.graph.outputs))
    for one in plan.conversions:
        reader = (
            "shared"
            if plan.shared_layouts.get(one.value) == one.target and one.source == plan.layouts[one.value]
            else one.reader
        )
        if one.reader == "":
            assert one.value in returned
            reader = ""
        for direction, way in (("forward", one.ahead), ("backward", one.back)):
            for step in way.steps if way is not None else ():
                if step.nbytes:
                    key = (step.kind, plan.mesh.dim_names[step.mesh_dim], one.value, reader, direction)
                    found[key] = found.get(key, 0) + 1
    return found
