"""The plan and the counters that an eager model holds."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import (
    CONSTANT,
    INPUT,
    FunctionCall,
    Node,
    ParameterRef,
    Value,
    first_names,
    named_tensors,
)
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution, local_part, spec_of
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.eager_program import EagerProgram
from ascend_parallel.sharding.runtime.local_parameters import local_slice
from ascend_parallel.sharding.runtime.randomness import Randomness
from ascend_parallel.sharding.runtime.rank_plan import NOT_OVERLAPPED, RankPlan


class EagerState:
    """The state of an eager model.

    collective_counts
        How often each collective has run.
    calls
        The calls of the traced forward.
    by_values
        Positions in `calls`, by function and the values that the call reads.
    program
        What the calls run.
    constants
        This rank's parts of the constants, by node.
    updated
        The values that the forward writes to buffers.
    randomness
        Seeds the random operators.
    """

    def __init__(
        self, model: torch.nn.Module, plan: ShardingPlan, *, local_inputs: bool, overlap: Settings | None, seed: int
    ) -> None:
        """Take an unsharded model and its plan; raises `ValueError` if they do not fit.

        overlap: settings of the overlapped operators; None: no operator is overlapped.
        """
        self.plan, self.local_inputs, self.coordinate = plan, local_inputs, plan.mesh.own_coordinate()
        self.randomness = Randomness(seed)
        self.calls, self.collective_counts = _calls(plan), Counter[CollectiveEvent]()
        self._fused_plan = FusedPlan.of(plan) if overlap is None else plan.fused(overlap, held_weights=True)
        self._settings = NOT_OVERLAPPED if overlap is None else overlap
        self._compile()
        self._specs: dict[Value, DTensorSpec] = {}
        self._owners: list[tuple[torch.nn.Module, str, ParameterRef]] = []
        self._parts: dict[str, tuple[ParameterRef, tuple[Any, ...]]] = {}
        self.by_values: dict[Any, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            values = tuple(leaf for leaf in call.arguments if isinstance(leaf, Value))
            self.by_values[call.function, values].append(number)
        self.updated = frozenset(plan.graph.updates.values()).union(*(call.stored for call in self.calls))
        self.constants = {node.name: self._constant(node) for node in plan.graph.of_kind(CONSTANT)}
        self._first = first_names(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerState:
        """Return the state for a copy of the model."""
        copied = copy.copy(self)
        copied.collective_counts, copied.randomness = Counter(), copy.copy(self.randomness)
        copied._owners = []
        copied._compile()
        return copied

    def held(self, model: torch.nn.Module) -> dict[ParameterRef, torch.Tensor]:
        """Return the model's parameters and buffers; a tied tensor by the first of its names."""
        if not self._owners:
            paths = [(name.rpartition("."), ParameterRef(name)) for name in named_tensors(model)]
            self._owners = [(model.get_submodule(path), name, ref) for (path, _, name), ref in paths]
        return {ref: getattr(owner, name) for owner, name, ref in self._owners}

    def spec(self, value: Value) -> DTensorSpec:
        """Return the placements, and the global shape and dtype, of an activation."""
        if value not in self._specs:
            meta = self.plan.graph.meta(value)
            self._specs[value] = spec_of(self.plan.mesh, self._fused_plan.layouts[value], meta.shape, meta.dtype)
        return self._specs[value]

    def gathering(self, value: Value) -> DifferentiableRedistribution | None:
        """Return the redistribution of an input or activation to the whole tensor on every rank."""
        reader = value.node if self.plan.graph.nodes[value.node].kind == INPUT else ""
        whole = (REPLICATE,) * self.plan.mesh.ndim
        return self._rank_plan.redistribution(value, reader, "", self._rank_plan.fused_plan.layouts[value], whole)

    def _compile(self) -> None:
        plan, fused_plan = self.plan, self._fused_plan
        self._rank_plan = RankPlan(
            plan=plan,
            fused_plan=fused_plan,
            coordinate=self.coordinate,
            local_inputs=self.local_inputs,
            counts=self.collective_counts,
            settings=self._settings,
            eager=True,
        )
        self.program = EagerProgram(self._rank_plan, self.calls)

    def part(self, node: Node, held: Mapping[ParameterRef, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a parameter or buffer, through which the DTensor gets its gradient."""
        layout = self.plan.layouts[Value(node.name)]
        if node.name not in self._parts:
            placements = tuple(placement.placement for placement in layout)
            self._parts[node.name] = ParameterRef(self._first[node.source]), placements
        ref, placements = self._parts[node.name]
        tensor = held[ref]
        if not isinstance(tensor, DTensor) or tensor._spec.placements != placements:
            raise ValueError(f"{node.source} is not the DTensor of placements {list(placements)} that parallelize made")
        return local_part(tensor, layout, self.plan.mesh)

    def _constant(self, node: Node) -> torch.Tensor:
        constant, layout = self.plan.graph.constants[node.source], self.plan.layouts[Value(node.name)]
        return local_slice(constant, layout, self.plan.mesh.shape, self.coordinate)


def _calls(plan: ShardingPlan) -> tuple[FunctionCall, ...]:
    """Return the function calls of the traced forward; raises `ValueError` for a plan that cannot run eagerly."""
    mesh, calls = plan.mesh, plan.graph.calls
    if isinstance(calls, str):
        raise ValueError(
            f"the model cannot be run eagerly: {calls}. The graph can be run: by ShardedModule(...), or by "
            "train_step(..., static=True)"
        )
    if mesh.process_ids != sorted(mesh.process_ids):
        raise ValueError(
            f"the ranks of {mesh} are not ascending, and torch's DTensor gathers such meshes wrongly; "
            "ShardedModule(...) runs the graph"
        )
    return calls
