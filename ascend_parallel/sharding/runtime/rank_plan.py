"""What a rank runs: a plan with the decisions of its runtime. Deciding runs no collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import Layout, local_shape
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution, plan_differentiable
from ascend_parallel.sharding.runtime.checkpointed_blocks import CheckpointedBlock, checkpointed_blocks
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent, Counting
from ascend_parallel.sharding.runtime.gradient_plan import SummedGradient, with_partial_grads
from ascend_parallel.sharding.runtime.overlapped_linear import Kernel, kernel_of
from ascend_parallel.sharding.runtime.prefetch import PrefetchGroup, prefetch_groups
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.tuning.step_time.runtimes import BUCKET_BYTES

NOT_OVERLAPPED = Settings(num_chunks=1)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """A plan with the decisions of its runtime, for a rank.

    coordinate
        The rank's index on each mesh dimension.
    local_inputs
        Whether the caller passes the rank's parts of the inputs, not global tensors.
    checkpointed_blocks
        The checkpointed blocks by their first node.
    prefetches
        The redistributions that start early, by the node before which they start.
    summed
        The parameters whose gradients are summed over ranks.
    counts
        Counts the collectives that run.
    settings
        Of operators that overlap their own collectives; without overlap they run in one piece.
    eager
        Whether the model's own forward runs, in which each layer finishes its rows.
    """

    plan: ShardingPlan
    fused_plan: FusedPlan
    coordinate: tuple[int, ...]
    local_inputs: bool = False
    checkpointed_blocks: Mapping[str, CheckpointedBlock] = field(default_factory=dict)
    prefetches: Mapping[str, Sequence[PrefetchGroup]] = field(default_factory=dict)
    summed: tuple[SummedGradient, ...] = ()
    counts: Counter[CollectiveEvent] = field(default_factory=Counter)
    settings: Settings = NOT_OVERLAPPED
    eager: bool = False

    @cached_property
    def summed_by_value(self) -> dict[Value, SummedGradient]:
        """`summed` by value."""
        return {param.value: param for param in self.summed}

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        """What runs the fused matmuls, by the first of their nodes."""
        settings = self.settings
        leaves_rows = settings.region_rows if settings.region is True and not self.eager else 0
        return {
            name: kernel_of(matmuls, self.plan.mesh, settings, leaves_rows)
            for name, matmuls in self.fused_plan.kernels.items()
        }

    def shape(self, kernel: Kernel, device: str) -> LayerShape:
        """Return the shape of a kernel's call on this rank."""
        matmuls = kernel.fused
        shape = matmuls.shape._replace(device=device)
        if matmuls.is_even:
            return shape
        name, place = matmuls.nodes[0], matmuls.matmuls[0].x
        meta = self.plan.graph.meta(self.plan.graph.nodes[name].inputs[place])
        *rows, _ = local_shape(meta.shape, self.fused_plan.inputs[name][place], self.plan.mesh.shape, self.coordinate)
        return shape._replace(own_rows=prod(rows))

    def redistribution(
        self, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> DifferentiableRedistribution | None:
        """Return the redistribution of a tensor for a reader; None if neither it nor its gradient changes."""
        if source == target:
            return None
        meta, mesh = self.plan.graph.meta(value), self.plan.mesh
        count = Counting(self.counts, mesh, module, value, reader)
        found = plan_differentiable(meta.shape, meta.dtype.itemsize, mesh, source, target, self.plan.costs, count)
        return None if found.is_noop else found


def plan_for_rank(
    plan: ShardingPlan,
    coordinate: tuple[int, ...],
    overlap: Settings | None,
    *,
    recompute: Recompute | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch: bool = True,
    local_inputs: bool = False,
    part: bool = False,
) -> RankPlan:
    """Decide what a rank runs.

    overlap
        Settings of the overlapped operators; None: no operator is overlapped.
    recompute
        What backward recomputes; None: nothing.
    bucket_bytes, prefetch, local_inputs
        As for `ShardedModule`.
    part
        The plan is of a part of the model, such as a pipeline stage.

    Raises as `checkpointed_blocks`.
    """
    fused_plan = FusedPlan.of(plan) if overlap is None else plan.fused(overlap)
    summed: tuple[SummedGradient, ...] = ()
    if bucket_bytes:
        fused_plan, summed = with_partial_grads(fused_plan, plan)
    found = checkpointed_blocks(plan, fused_plan, recompute or Recompute(), part=part)
    recomputed = {name for block in found.values() for name in block.nodes}
    starts = prefetch_groups(fused_plan, plan, recomputed, bucket_bytes) if prefetch and bucket_bytes else {}
    return RankPlan(
        plan=plan,
        fused_plan=fused_plan,
        coordinate=coordinate,
        local_inputs=local_inputs,
        checkpointed_blocks=found,
        prefetches=starts,
        summed=summed,
        settings=overlap or NOT_OVERLAPPED,
    )
