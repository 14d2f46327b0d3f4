"""The predicted seconds of a step of a planned training: the builder of `predict` and plan-training, asked of a plan.

The plan's operators and collectives are priced as plan-training prices those of a folded graph (`degrees/work.py`). All
that surrounds them, sums of gradients, ZeRO's exchanges and the optimizer, is `ReplicatedState`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import CALL, PARAMETER, Value
from ascend_parallel.sharding.layout import REPLICATE, with_placement
from ascend_parallel.sharding.planner.operator_cost import multiply_adds
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.training.degrees.evaluation import slice_elements
from ascend_parallel.training.degrees.folding import FoldedGraph
from ascend_parallel.training.degrees.search import itemsize_of, tokens_of
from ascend_parallel.training.degrees.work import Numbers, OperatorCosts, work_of
from ascend_parallel.training.training_plan import TrainingPlan
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.step_time.replicas import ReplicatedState, Weights
from ascend_parallel.tuning.step_time.runtimes import PLANNED
from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.step import StepTimes, StepWork, time_step
from ascend_parallel.tuning.step_time.throughput import Throughput

# The kind of recompute of a strategy, of those that `work_of` prices.
AGAIN = "again"


class StepPrice:
    """The predicted step of a planned training."""

    def __init__(
        self, planned: TrainingPlan, recompute: Recompute, settings: Settings, sent_bytes: Iterable[int]
    ) -> None:
        """Take a plan; sent_bytes: of a rank and micro-batch, from each stage to the next."""
        self._planned, self._strategy, self._recompute = planned, planned.strategy, recompute
        self._settings, self._sent = settings, max(sent_bytes, default=0)
        hardware = planned.plan.costs.hardware
        assert hardware is not None, "a strategy has a hardware"
        self._costs, self._ranks = CostModel(hardware), self._strategy.ranks

    @cached_property
    def times(self) -> StepTimes:
        """The step's seconds, of all merged batches."""
        merged, times = self._strategy.gradient_merge.steps, time_step(self.work)
        return replace(times, pipeline=merged * times.pipeline)

    @cached_property
    def work(self) -> StepWork:
        """What the ranks do in a step of one batch."""
        pipeline, costs = self._strategy.pipeline, self._costs_of_stages
        hop = 0.0
        if pipeline.degree > 1:
            hop = self._costs.send(self._sent, inside=self._ranks <= self._costs.hardware.collectives.domain)
        again = [work.kept[AGAIN].again + work.kept[AGAIN].again_sent for work in costs]
        forward = self._by_stage([work.forward + work.forward_sent for work in costs])
        backward = self._by_stage([work.backward + work.backward_sent for work in costs]) + self._by_stage(again)
        passes = self.state.passes(forward, backward)
        work = self.state.step_work(*passes, schedule=pipeline.schedule, send=hop)
        return replace(work, micro_batches=pipeline.micro_batches)

    @property
    def throughput(self) -> Throughput:
        """Tokens a second and card, or rows of a batch that has no tokens, and the MFU."""
        graph, backwards = self._planned.plan.graph, self._strategy.backwards
        calls = [node.call for node in graph.of_kind(CALL)]
        tokens = tokens_of(self._planned.batch)
        rows = next((value.shape[0] for value in self._planned.batch if isinstance(value, torch.Tensor)), 1)
        return Throughput(
            seconds=self.times.total,
            cards=self._ranks,
            work=backwards * (tokens or rows),
            macs=backwards * sum(multiply_adds(call) for call in calls if call is not None),
            peak=self._costs.peak(itemsize_of(graph, self._strategy.amp.dtype)),
            unit="tokens" if tokens else "rows",
        )

    @property
    def _stages(self) -> int:
        return self._strategy.pipeline.count if self._planned.stages else 1

    @cached_property
    def _ranks_of_stages(self) -> tuple[int, ...]:
        pipeline = self._strategy.pipeline
        return stages_of(pipeline.schedule, pipeline.degree, pipeline.count) if self._stages > 1 else (0,)

    @cached_property
    def _costs_of_stages(self) -> list[OperatorCosts]:
        """Prices of the whole model's operators on the mesh of each stage; stages on equal meshes share them."""
        priced: dict[int, OperatorCosts] = {}
        for plan in self._planned.different_plans:
            folded = FoldedGraph(plan.graph, np.arange(len(plan.graph.of_kind(CALL))), ())
            settings = self._settings if self._strategy.overlap.operators else Settings(num_chunks=1)
            whole = self._whole_weights(plan)
            priced[id(plan)] = work_of(folded, whole, settings, self._ranks, {AGAIN: self._recompute})
        return [priced[id(self._planned.plans[rank])] for rank in self._ranks_of_stages]

    def _whole_weights(self, plan: ShardingPlan) -> ShardingPlan:
        """Return the plan with weights that ZeRO 3 has not cut: `ReplicatedState` prices their gathers and sums."""
        if self._strategy.sharding.zero_stage != 3:
            return plan
        dim = plan.mesh.dim(self._strategy.sharding.dim)
        layouts = dict(plan.layouts)
        for value in plan.regathered:
            layouts[value] = with_placement(layouts[value], dim, REPLICATE)
        return replace(plan, layouts=layouts, regathered=frozenset())

    @cached_property
    def _stage_of_operators(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        names = [node.name for node in self._planned.plan.graph.of_kind(CALL)]
        return np.array([self._planned.stages.get(name, 0) for name in names], dtype=np.int64)

    def _by_stage(self, of_stages: Sequence[Numbers]) -> Numbers:
        """Return, per stage, the sum of its operators' numbers, priced on its mesh."""
        return np.array(
            [numbers[self._stage_of_operators == stage].sum() for stage, numbers in enumerate(of_stages)], dtype=float
        )

    @cached_property
    def state(self) -> ReplicatedState:
        """The parameters of the ranks, and what the replicas share of them."""
        strategy = self._strategy
        return ReplicatedState(
            weights=self._weights(),
            ranks_of_stages=list(self._ranks_of_stages),
            layers=[1] * self._stages,
            micro_batches=strategy.backwards,
            zero_stage=strategy.sharding.zero_stage,
            under_backward=self._stages == 1 and strategy.sharding.zero_stage <= 1 and strategy.overlap.gradients,
            masters=strategy.amp.has_masters,
            runtime=replace(PLANNED, bucket_bytes=strategy.comm_fusion.bucket_bytes),
            stream=self._costs.stream,
            wide_gradients=strategy.wide_gradients,
        )

    def _weights(self) -> list[Weights]:
        """Return the parameters of each stage, those together that the same ranks hold and sum."""
        kinds: dict[tuple[int, int, tuple[int, ...]], tuple[Numbers, Numbers]] = {}
        plan = self._planned.plan
        dim = self._replicas_dim(plan)
        for stage, work in enumerate(self._costs_of_stages):
            nodes = work.plan.graph.of_kind(PARAMETER)
            for node, parameter in zip(nodes, work.parameters, strict=True):
                if not any(self._stage_of_operators[reader] == stage for reader in parameter.readers):
                    continue
                whole = dim is not None and work.plan.layouts[Value(node.name)][dim] == REPLICATE
                replicas = work.plan.mesh.shape[dim] if dim is not None and whole else 1
                key = parameter.itemsize, replicas, tuple(each for each in parameter.summed_over if each != dim)
                elements, own = kinds.setdefault(key, (np.zeros(self._stages), np.zeros(self._stages)))
                elements[stage] += parameter.elements
                own[stage] += slice_elements(parameter.shape, replicas)
        return [
            Weights(
                elements=elements,
                own=own,
                itemsize=itemsize,
                replicas=replicas,
                collective=partial(_seconds, plan.costs, dim or 0),
                further_sums=[partial(_seconds, plan.costs, each, ALL_REDUCE) for each in further_dims],
            )
            for (itemsize, replicas, further_dims), (elements, own) in kinds.items()
        ]

    def _replicas_dim(self, plan: ShardingPlan) -> int | None:
        """Return the mesh dimension of the replicas that ZeRO shares among, or along which data differ."""
        strategy = self._strategy
        name = strategy.sharding.dim if strategy.sharding.zero_stage else strategy.data_dim
        return None if name is None else plan.mesh.dim(name)


def _seconds(costs: MeshCosts, dim: int, kind: str, nbytes: float) -> float:
    return costs.seconds(kind, nbytes, dim)
