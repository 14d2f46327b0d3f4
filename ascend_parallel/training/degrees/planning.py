"""Exact plans of a replica's micro-batch, as the plan on all ranks has them, from a mesh of the replica's ranks alone.

In a plan of mode "auto" the batch is sharded along `data_dim`, and parameters are whole along it. So the other replicas
add only the sums of gradients to the cost: for each parameter an all-reduce, over the replicas, of the rank's part.
With these sums added to the parameters' own costs, the plan of one replica is that of all; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np

from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.elimination import AssignmentProblem
from ascend_parallel.sharding.planner.propagate import overlap_settings, slice_replicated, warn_if_unproven
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.training.degrees.folding import FoldedGraph
from ascend_parallel.training.degrees.space import DATA, EXPERTS, SEQUENCE
from ascend_parallel.training.degrees.work import TENSOR, OperatorCosts, work_of
from ascend_parallel.tuning.cost_model.hardware import Hardware


class Planner:
    """Plans and their work, cached; equal plans share their work."""

    def __init__(
        self, folded: Callable[[int], FoldedGraph], hardware: Hardware, settings: Settings, *, ranks: int = 1
    ) -> None:
        """Take the folded graph by rows of a micro-batch; ranks: of the whole job, whose slowest sets the pace."""
        self._folded, self._hardware, self._settings, self._ranks = folded, hardware, settings, ranks
        self.costs = cache(self._costs)
        self.work = cache(self._work)
        self._problem = cache(self._problem_of)
        self._known: dict[tuple[int, int, int, int, str], OperatorCosts] = {}

    def _costs(self, dp: int, replica: int) -> MeshCosts:
        """Return the costs of collectives on a mesh of dp replicas of so many ranks."""
        return MeshCosts.of(ProcessMesh(np.arange(dp * replica).reshape(dp, replica), [DATA, TENSOR]), self._hardware)

    def _work(
        self, rows: int, tp: int, dp: int, ep: int = 1, cp: int = 1, sharing: tuple[str, int] = ("", 0)
    ) -> OperatorCosts:
        """Return the work of a micro-batch of `rows` rows on `ep` x `cp` x `tp` ranks, with `dp` replicas.

        sharing: how `cp` ranks share sequences, and in how many groups; "" and 0: what takes least time.
        """
        plan = self._plan(rows, tp, dp, ep, cp, sharing)
        key = rows, tp, ep, cp, plan.digest
        if key not in self._known:
            self._known[key] = work_of(self._folded(rows), plan, self._settings, self._ranks)
        return self._known[key]

    def _plan(self, rows: int, tp: int, dp: int, ep: int, cp: int, sharing: tuple[str, int]) -> ShardingPlan:
        search, base = self._problem(rows, tp, ep, cp, sharing)
        problem = AssignmentProblem(dict(base.sizes), dict(base.own), base.pairs)
        costs, shape = self.costs(dp, ep * cp * tp), tuple(search.mesh.shape)
        for node in search.graph.nodes.values() if dp > 1 else ():
            if node.kind == PARAMETER and Value(node.name) in search.differentiable:
                sizes = [node.outputs[0].local_bytes(layout, shape) for layout in search.produced(Value(node.name))]
                problem.own[node.name] = base.own[node.name] + [costs.seconds(ALL_REDUCE, size, 0) for size in sizes]
        plan = search.plan(problem)
        warn_if_unproven(search, plan)
        return slice_replicated(plan)

    def _problem_of(
        self, rows: int, tp: int, ep: int, cp: int, sharing: tuple[str, int]
    ) -> tuple[Search, AssignmentProblem]:
        around = {name: size for name, size in ((EXPERTS, ep), (SEQUENCE, cp)) if size > 1}
        sizes = *around.values(), tp
        mesh = ProcessMesh(np.arange(prod(sizes)).reshape(sizes), [*around, TENSOR])
        costs = MeshCosts.of(mesh, self._hardware)
        sequence, experts = (name if name in around else None for name in (SEQUENCE, EXPERTS))
        overlap = overlap_settings(settings=self._settings)
        graph = self._folded(rows).graph
        search = Search(
            graph,
            mesh,
            {},
            "time",
            self._hardware,
            costs,
            sequence=sequence,
            sharing=sharing if self._settings.arithmetic.hides_sums else None,
            experts=experts,
            overlap=overlap,
        )
        return search, search.problem()
