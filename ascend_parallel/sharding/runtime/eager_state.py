"""What a model holds of its plan while it runs its own code."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ascend_parallel.sharding.graph import CONSTANT, FunctionCall, Node, Value
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.local_parameters import local_slice
from ascend_parallel.sharding.runtime.randomness import Randomness
from ascend_parallel.sharding.tracing.function_calls import first_names


class Eager:
    """What a model needs to run by a plan.

    collective_counts
        How often each collective ran so far.
    calls
        The traced forward's.
    by_values
        The calls' places by function and the values that they read.
    constants
        This rank's parts, by node.
    updated
        New values of buffers that the forward writes.
    randomness
        What seeds random operators.
    """

    def __init__(self, model: torch.nn.Module, plan: ShardingPlan, local_inputs: bool, seed: int) -> None:
        """Take a model that is whole, and its plan; raises `ValueError` where they do not fit."""
        place = plan.mesh.coordinate(dist.get_rank())
        if place is None:
            raise ValueError(f"rank {dist.get_rank()} is not in {plan.mesh}, so it has no part of the model")
        self.plan, self.local_inputs, self.coordinate = plan, local_inputs, place
        self.randomness = Randomness(seed)
        self.calls, self.collective_counts = _calls(plan), Counter[CollectiveEvent]()
        self.by_values: dict[Any, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            values = tuple(leaf for leaf in call.arguments if isinstance(leaf, Value))
            self.by_values[call.function, values].append(number)
        self.updated = frozenset(plan.graph.updates.values())
        self.constants = {node.name: self._constant(node) for node in nodes_of(plan, CONSTANT)}
        self._first = first_names(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Eager:
        """Return the state of a copy of the model."""
        made = copy.copy(self)
        made.collective_counts, made.randomness = Counter(), copy.copy(self.randomness)
        return made

    def part(self, node: Node, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a parameter or buffer, as a leaf's view through which its gradient comes."""
        tensor, layout = held[self._first[node.source]], self.plan.layouts[Value(node.name)]
        placements = tuple(state.placement for state in layout)
        if not isinstance(tensor, DTensor) or tensor.placements != placements:
            raise ValueError(f"{node.source} is no longer the tensor of placements {list(placements)} that it was")
        return tensor.to_local(grad_placements=placements)

    def _constant(self, node: Node) -> torch.Tensor:
        whole, layout = self.plan.graph.constants[node.source], self.plan.layouts[Value(node.name)]
        return local_slice(whole, layout, self.plan.mesh.shape, self.coordinate)


def nodes_of(plan: ShardingPlan, *kinds: str) -> list[Node]:
    """Return the nodes of these kinds."""
    return [node for node in plan.graph.nodes.values() if node.kind in kinds]


def _calls(plan: ShardingPlan) -> tuple[FunctionCall, ...]:
    """Return the calls that a run follows; raises `ValueError` for a plan that none can follow."""
    mesh, calls = plan.mesh, plan.graph.calls
    if isinstance(calls, str):
        raise ValueError(f"the model cannot be run eagerly: {calls}. parallelize(..., static=True) runs the graph")
    if mesh.process_ids != sorted(mesh.process_ids):
        raise ValueError(
            f"{mesh} has ranks in another order than ascending, in which torch's DTensor gathers wrongly; "
            "parallelize(..., static=True) runs the graph"
        )
    return calls
