"""The seconds of a plan's collectives as the plan runs: next to a matmul only what stays exposed beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ascend_parallel.overlap.layer_shape import COLUMN, LayerShape
from ascend_parallel.sharding.layout import PARTIAL_GRAD, with_placement
from ascend_parallel.sharding.planner.operator_cost import passes
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.planner.overlapped_matmul import ExposedCosts
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.planner.shared_sequences import exchange_prices
from ascend_parallel.sharding.runtime.overlap_pass import fuse
from ascend_parallel.sharding.runtime.overlapped_linear import ColumnKernel, RowKernel
from ascend_parallel.tuning.cost_model.cost import CostModel


@dataclass(frozen=True)
class ExposedCollectives:
    """What the collectives of a plan cost.

    rest
        The plan with the redistributions alone that no kernel runs.
    kernels
        The exposed seconds of forward and backward of each kernel, by its first node.
    exchanges
        Those of each attention whose sequence ranks share.
    """

    rest: ShardingPlan
    kernels: Mapping[str, tuple[float, float]]
    exchanges: Mapping[str, tuple[float, float]]

    @property
    def seconds(self) -> float:
        """Predicted time of the collectives of a step, forward and backward."""
        full = sum(step.seconds for name in self.exchanges for step in self.rest.op_collectives[name])
        exposed = chain(self.kernels.values(), self.exchanges.values())
        return self.rest.seconds - full + sum(map(sum, exposed))


def exposed_collectives(plan: ShardingPlan) -> ExposedCollectives:
    """Return what the collectives of a plan cost; in full if it was not planned to run overlapped."""
    hardware = plan.costs.hardware
    exchanges = exposed_exchanges(plan, CostModel(hardware)) if hardware is not None else {}
    if plan.overlap is None:
        return ExposedCollectives(plan, {}, exchanges)
    fused_plan, costs = fuse(plan, plan.overlap), ExposedCosts(plan.costs, plan.overlap)
    rest = fused_plan.applied_to(plan)
    kernels = {name: _exposed(kernel, rest, costs) for name, kernel in fused_plan.kernels.items()}
    return ExposedCollectives(rest, kernels, exchanges)


def exposed_exchanges(plan: ShardingPlan, model: CostModel) -> dict[str, tuple[float, float]]:
    """Return the exposed seconds, forward and backward, of each attention whose sequence ranks share, by its node."""
    found: dict[str, tuple[float, float]] = {}
    for node in plan.graph.nodes.values():
        if node.call is None or node.call.sequence is None:
            continue
        option = Option(plan.inputs[node.name], plan.output_layouts(node))
        for price in exchange_prices(node.call, option, plan.costs, model):
            forward, backward = passes(node.call, option, plan.mesh.shape, model)
            backward = price.backward - backward if node.values[0] in plan.differentiable else 0.0
            found[node.name] = price.forward - forward, backward
    return found


def _exposed(kernel: ColumnKernel | RowKernel, rest: ShardingPlan, costs: ExposedCosts) -> tuple[float, float]:
    """Return the exposed seconds of a kernel's forward and backward."""
    forward, backward = costs.passes(_shape(kernel, rest, costs), kernel.mesh_dim, kernel.row_dim is not None)
    return forward, backward if rest.graph.nodes[kernel.nodes[0]].values[0] in rest.differentiable else 0.0


def _shape(kernel: ColumnKernel | RowKernel, rest: ShardingPlan, costs: ExposedCosts) -> LayerShape:
    """Return a rank's part of a kernel's matmuls, as one."""
    parts = []
    for name, matmul in zip(kernel.nodes, kernel.matmuls, strict=True):
        call, reads = rest.graph.nodes[name].call, list(rest.inputs[name])
        assert call is not None
        if kernel.kind == COLUMN:  # x is gathered along the mesh dimension
            reads[matmul.x] = with_placement(reads[matmul.x], kernel.mesh_dim, PARTIAL_GRAD)
        parts.append(costs.shape(kernel.kind, call, matmul, reads, kernel.mesh_dim))
    return parts[0]._replace(n=sum(part.n for part in parts))
