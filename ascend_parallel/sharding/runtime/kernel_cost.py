"""The seconds of a plan's collectives as the plan runs: next to a matmul only what stays exposed beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ascend_parallel.sharding.planner.operator_cost import passes
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.planner.overlap_pass import FusedMatmuls
from ascend_parallel.sharding.planner.overlapped_matmul import ExposedCosts
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.planner.shared_sequences import exchange_prices
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
    """Return the exposed cost of a plan's collectives; the full cost if it was not planned to run overlapped."""
    hardware = plan.costs.hardware
    exchanges = exposed_exchanges(plan, CostModel(hardware)) if hardware is not None else {}
    if plan.overlap is None:
        return ExposedCollectives(plan, {}, exchanges)
    fused, costs = plan.fused(plan.overlap), ExposedCosts(plan.costs, plan.overlap)
    kernels = {name: _exposed(kernel, costs) for name, kernel in fused.kernels.items()}
    return ExposedCollectives(plan.beside(fused), kernels, exchanges)


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


def _exposed(kernel: FusedMatmuls, costs: ExposedCosts) -> tuple[float, float]:
    """Return the exposed seconds of a kernel's forward and backward."""
    forward, backward = costs.passes(kernel.shape, kernel.mesh_dim, kernel.row_dim is not None)
    return forward, backward if kernel.differentiable else 0.0
