"""The plan and the counters that an eager model holds."""

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


class EagerState:
    """The state of an eager model.

    collective_counts
        How often each collective has run.
    calls
        The calls of the traced forward.
    by_values
        Positions in `calls`, by function and the values that the call reads.
    constants
        This rank's parts of the constants, by node.
    updated
        The values that the forward writes to buffers.
    randomness
        Seeds the random operators.
    """

    def __init__(self, model: torch.nn.Module, plan: ShardingPlan, local_inputs: bool, seed: int) -> None:
        """Take an unsharded model and its plan; raises `ValueError` if they do not fit."""
        coordinate = plan.mesh.coordinate(dist.get_rank())
        if coordinate is None:
            raise ValueError(f"rank {dist.get_rank()} is not in {plan.mesh}, so it has no part of the model")
        self.plan, self.local_inputs, self.coordinate = plan, local_inputs, coordinate
        self.randomness = Randomness(seed)
        self.calls, self.collective_counts = _calls(plan), Counter[CollectiveEvent]()
        self.by_values: dict[Any, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            values = tuple(leaf for leaf in call.arguments if isinstance(leaf, Value))
            self.by_values[call.function, values].append(number)
        self.updated = frozenset(plan.graph.updates.values())
        self.constants = {node.name: self._constant(node) for node in nodes_of(plan, CONSTANT)}
        self._first = first_names(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerState:
        """Return the state for a copy of the model."""
        copied = copy.copy(self)
        copied.collective_counts, copied.randomness = Counter(), copy.copy(self.randomness)
        return copied

    def part(self, node: Node, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a parameter or buffer, through which the DTensor gets its gradient."""
        tensor, layout = held[self._first[node.source]], self.plan.layouts[Value(node.name)]
        placements = tuple(placement.placement for placement in layout)
        if not isinstance(tensor, DTensor) or tensor.placements != placements:
            raise ValueError(f"{node.source} is not the DTensor of placements {list(placements)} that parallelize made")
        return tensor.to_local(grad_placements=placements)

    def _constant(self, node: Node) -> torch.Tensor:
        constant, layout = self.plan.graph.constants[node.source], self.plan.layouts[Value(node.name)]
        return local_slice(constant, layout, self.plan.mesh.shape, self.coordinate)


def nodes_of(plan: ShardingPlan, *kinds: str) -> list[Node]:
    """Return the nodes of these kinds."""
    return [node for node in plan.graph.nodes.values() if node.kind in kinds]


def _calls(plan: ShardingPlan) -> tuple[FunctionCall, ...]:
    """Return the function calls of the traced forward; raises `ValueError` for a plan that cannot run eagerly."""
    mesh, calls = plan.mesh, plan.graph.calls
    if isinstance(calls, str):
        raise ValueError(f"the model cannot be run eagerly: {calls}. parallelize(..., static=True) runs the graph")
    if mesh.process_ids != sorted(mesh.process_ids):
        raise ValueError(
            f"the ranks of {mesh} are not ascending, and torch's DTensor gathers such meshes wrongly; "
            "parallelize(..., static=True) runs the graph"
        )
    return calls
