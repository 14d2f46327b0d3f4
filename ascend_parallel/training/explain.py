"""The predicted effect of each option of a strategy on a model: collectives, kernels, memory; without processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

from ascend_parallel.overlap.choices import chunks_in_words
from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.grad_dtype import WIDE
from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.planner.overlap_pass import Fusion
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.activation_memory import saved_bytes
from ascend_parallel.sharding.runtime.gradient_plan import Bucket, buckets
from ascend_parallel.sharding.runtime.prefetch import PrefetchGroup
from ascend_parallel.sharding.runtime.rank_plan import plan_for_rank
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.visualize.explain import explain as explain_plan
from ascend_parallel.sharding.visualize.explain import exposed_seconds, headline, warnings
from ascend_parallel.sharding.visualize.page import to_html
from ascend_parallel.text import equal_runs, size_of
from ascend_parallel.training.autocast import is_cast
from ascend_parallel.training.optimizer.partition import predicted_memory
from ascend_parallel.training.pipeline.split_plan import StagePlan, split_into_stages
from ascend_parallel.training.step_collectives import StepCollectives, step_collectives
from ascend_parallel.training.step_price import StepPrice
from ascend_parallel.training.training_plan import TrainingPlan
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes
from ascend_parallel.tuning.step_time.schedule import SPLIT, most_held, stages_of
from ascend_parallel.tuning.step_time.timing import SimulatedStep

HEADS = ("parameters", "gradients", "optimizer", "activations", "total")


@dataclass(frozen=True)
class GroupMemory:
    """The bytes that each rank of a group holds of its stages, by name."""

    stages: tuple[str, ...]
    held: RankBytes


def memory_by_group(
    memory: Sequence[RankBytes], saved: Mapping[int, float], simulated: SimulatedStep
) -> list[GroupMemory]:
    """Return the memory of a rank of each group.

    memory: of each stage, without activations. saved: by stage, the bytes that a micro-batch's forward keeps for its
    backward.
    """
    groups = []
    for slots in simulated.slots:
        actions = [slot.action for slot in slots]
        stages = sorted({action.stage for action in actions})
        activations = RankBytes(0, 0, 0, most_held(actions, saved))
        groups.append(GroupMemory(tuple(map(str, stages)), sum((memory[stage] for stage in stages), activations)))
    return groups


def table(groups: Sequence[GroupMemory]) -> Iterator[str]:
    """Yield the lines of a table; three or more equal ranks with one stage each, one after another, are a line."""
    rows = []
    for group in groups:
        sizes = (*group.held.without_buffers().values(), group.held.total)
        rows.append("".join(f"{size_of(size):>12}" for size in sizes))
    several = any(len(group.stages) > 1 for group in groups)
    named = [(", ".join(group.stages), row) for group, row in zip(groups, rows, strict=True)]
    if len(groups) > 1 and not several:
        named = equal_runs(rows)
    width = max(6, *(len(name) + 2 for name, _ in named))
    yield ("stages" if several else "stage").ljust(width) + "".join(f"{head:>12}" for head in HEADS)
    yield from (name.ljust(width) + row for name, row in named)


def in_billions(count: int) -> str:
    """Return a count of parameters: 6.74B, 12.3M, 4096."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def explain(
    planned: TrainingPlan, operators: bool = False, settings: Settings | None = None, *, full: bool = False
) -> str:
    """Return a paragraph for each option that has an effect, and the memory of a rank in each stage.

    operators, full
        Also show the layout of every operator; of equal layers one, or with `full` all.
    settings
        Settings of the overlapped operators; None: the current settings.
    """
    return Explanation(planned, settings).text(operators, full=full)


def plan_warnings(planned: TrainingPlan) -> list[str]:
    """Return the warnings of a planned training: too little memory, repeated work. `explain` shows them too."""
    return list(Explanation(planned).warnings())


def fullest_rank(planned: TrainingPlan) -> RankBytes:
    """Return the bytes of the rank that holds the most, without buffers: the largest row of the table of `explain`."""
    return Explanation(planned).fullest


def as_dict(planned: TrainingPlan) -> dict[str, Any]:
    """Return the explanation as plain values, for JSON: see `Explanation.as_dict`."""
    return Explanation(planned).as_dict()


@dataclass(frozen=True)
class _Stage:
    """The memory and the operators of the ranks of a stage."""

    name: str
    plan: ShardingPlan
    memory: RankBytes
    saved: tuple[float, float]
    live: float
    fused: tuple[Fusion, ...]
    buckets: tuple[Bucket, ...]
    prefetched: tuple[PrefetchGroup, ...]
    collectives: StepCollectives

    @property
    def activations(self) -> float:
        """The most bytes kept from forward to backward, of all micro-batches in flight."""
        return self.saved[1] * self.live


class Explanation:
    """What a planned training comes to: as text, as a page, as plain values. All three say the same."""

    def __init__(self, planned: TrainingPlan, settings: Settings | None = None) -> None:
        """Take a plan, and the settings of overlapped operators; None: the current settings."""
        self._planned, self._strategy = planned, planned.strategy
        self._settings = settings or current_settings()

    def text(self, operators: bool = False, *, full: bool = False) -> str:
        """Return the explanation."""
        lines = [f"{name}: {text}" for name, text in self.lines()]
        lines += [f"warning: {text}" for text in self.warnings()]
        lines += ["", *table(self.groups), "", *self.collectives.lines()]
        for plan in self._planned.different_plans if operators else ():
            lines += ["", explain_plan(plan, full=full, held=self.fullest)]
        return "\n".join(lines)

    def html(self, model: str = "") -> str:
        """Return the page: what is trained and how first, then the plan; `model`: its name, in place of its class."""
        return to_html(
            self._planned.plan, held=self.fullest, facts=self.facts(model), collectives=self.collectives.table()
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: bytes and seconds.

        "step" has the predicted seconds and rates. "collectives" has what runs in each "micro_batch", "once" in a step,
        and in the "step" in all: counts by kind, the bytes that a rank sends, and seconds as if nothing hid them; with
        a pipeline, those of the ranks whose collectives take longest.
        """
        return {
            "mode": self._strategy.mode,
            "ranks": self._strategy.ranks,
            "mesh": dict(self._strategy.mesh),
            "meshes": [dict(mesh) for mesh in self._strategy.stage_meshes],
            "step": {**self.price.throughput.as_dict(), "parts": vars(self.price.times)},
            "collectives": self.collectives.as_dict(),
            "ops_fused": dict(self._planned.ops_fused),
            "bubble": self.bubble,
            "stages": [
                stage.memory.without_buffers() | {"stage": stage.name, "activations": stage.activations}
                for stage in self.stages
            ],
            "groups": [{"stages": group.stages, **group.held.without_buffers()} for group in self.groups],
            "options": dict(self.lines()),
            "warnings": list(self.warnings()),
        }

    def facts(self, model: str = "") -> dict[str, str]:
        """Return the model and the options by name: the first lines of the page."""
        strategy, pipeline, sharding = self._strategy, self._strategy.pipeline, self._strategy.sharding
        count = sum(parameter.numel() for parameter in self._planned.model.parameters())
        amp = "; ".join(text for name, text in self._precision() if name == "amp")
        stages = f"{pipeline.count} stages on {pipeline.degree} groups of ranks, {pipeline.schedule}"
        merged = strategy.gradient_merge.steps
        return {
            "model": f"{model or type(self._planned.model).__name__}, {in_billions(count)} parameters",
            "mesh": f"{strategy.sizes}{' for each stage' if self.parts else ''}; {strategy.ranks} ranks, "
            f"mode {strategy.mode}",
            "pipeline": stages if self.parts else "none",
            "micro-batches": f"{pipeline.micro_batches}{f', of each of {merged} merged batches' if merged > 1 else ''}",
            "ZeRO": f"stage {sharding.zero_stage}" + (f" over {sharding.dim}" if sharding.zero_stage else ""),
            "amp": amp or "none: the model's own dtype",
            "a step": self._step_in_words(),
            "memory": f"{size_of(self.fullest.total)} on the rank that holds the most",
        }

    @cached_property
    def price(self) -> StepPrice:
        """The predicted step."""
        sent = [part.sent_bytes for part in self.parts[:-1]]
        return StepPrice(self._planned, self.recompute, self._settings, sent)

    def _step_in_words(self) -> str:
        hardware = self._planned.plan.costs.hardware
        assert hardware is not None
        seconds, rates = self.price.times.total, self.price.throughput
        return f"{seconds:.4g} s, {rates}, by the cost model of {hardware.title}"

    @cached_property
    def parts(self) -> tuple[StagePlan, ...]:
        """The plan of each stage; empty without a pipeline."""
        if not self._planned.stages:
            return ()
        options, meshes = self._strategy.pipeline, self._planned.meshes
        mesh_of_stage = stages_of(options.schedule, options.degree, options.count)
        stage_meshes = [meshes[index] for index in mesh_of_stage]
        return split_into_stages([self._planned.plans[at] for at in mesh_of_stage], self._planned.stages, stage_meshes)

    @cached_property
    def stages(self) -> list[_Stage]:
        """The memory and the operators of each stage, or of the whole model."""
        if not self.parts:
            return [self._stage("all", self._planned.plan, 1.0)]
        options = self._strategy.pipeline
        actions = [slot.action for slots in options.simulated().slots for slot in slots]
        live = [
            most_held([one for one in actions if one.stage == part.stage], {part.stage: 1.0}) for part in self.parts
        ]
        return [self._stage(str(part.stage), part.plan, live[part.stage]) for part in self.parts]

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks wait for their pipeline."""
        return self._strategy.pipeline.simulated().bubble if self.parts else 0.0

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what each option does, by the option's name."""
        strategy = self._strategy
        each = "stages on meshes" if strategy.pipeline.meshes else "each stage on a mesh"
        yield "mode", f"{strategy.mode}, {strategy.ranks} ranks, {each if self.parts else 'a mesh'} of {strategy.sizes}"
        yield "step", self._step_in_words()
        micro_batches = strategy.pipeline.micro_batches
        for plan in self._planned.different_plans:
            yield "plan", headline(plan)
            if plan.overlap is not None:
                batch = "a micro-batch" if micro_batches > 1 else "a step"
                ms = 1e3 * exposed_seconds(plan)
                yield "plan", f"{ms:.3f} ms of the collectives of {batch} stay exposed beside its matmuls"
        for name, count in self._planned.ops_fused.items():
            yield "fused_passes", f"{name}: {count} operators and the tensors between them fused away"
        yield from self._pipeline()
        yield from self._recompute()
        yield from self._sharding()
        yield from self._precision()
        yield from self._overlap()

    def warnings(self) -> Iterator[str]:
        """Yield the warnings; memory counts for the rank that holds the most."""
        yield from warnings(self._planned.plan, self.fullest.total)

    @cached_property
    def groups(self) -> list[GroupMemory]:
        """What a rank of each group holds."""
        if not self.parts:
            (stage,) = self.stages
            return [GroupMemory((stage.name,), stage.memory + RankBytes(0, 0, 0, stage.activations))]
        saved = {place: stage.saved[1] for place, stage in enumerate(self.stages)}
        return memory_by_group([stage.memory for stage in self.stages], saved, self._strategy.pipeline.simulated())

    @property
    def fullest(self) -> RankBytes:
        """What the rank holds that holds the most."""
        return max((group.held for group in self.groups), key=lambda held: held.total)

    @cached_property
    def collectives(self) -> StepCollectives:
        """The collectives of a step; with a pipeline, of the group of ranks whose collectives take longest."""
        of_stages = {stage.name: stage.collectives for stage in self.stages}
        by_group = [reduce(add, (of_stages[name] for name in group.stages)) for group in self.groups]
        return max(by_group, key=lambda each: each.total.seconds)

    def _pipeline(self) -> Iterator[tuple[str, str]]:
        options = self._strategy.pipeline
        if not self.parts:
            if options.micro_batches > 1:
                yield "pipeline", f"none; the gradients of {options.micro_batches} micro-batches are accumulated"
            return
        yield "pipeline", f"{options.count} stages on {options.degree} groups of ranks; {options.headline()}"
        for place, sent in equal_runs([size_of(part.sent_bytes) for part in self.parts[:-1]]):
            who = f"stages {place} each send" if " " in place else f"stage {place} sends"
            receive = "receive" if " " in place else "receives"
            yield "pipeline", f"{who} {sent} a rank and micro-batch, and {receive} as much back"

    def _recompute(self) -> Iterator[tuple[str, str]]:
        recompute = self.recompute
        if recompute.modules:
            before, after = (sum(stage.saved[index] for stage in self.stages) for index in (0, 1))
            yield (
                "recompute",
                f"{', '.join(recompute.modules)}: {size_of(after)} kept for backward of a micro-batch instead of "
                f"{size_of(before)}, collectives {recompute.collectives}",
            )

    def _sharding(self) -> Iterator[tuple[str, str]]:
        options = self._strategy.sharding
        if options.zero_stage:
            without = sum(self._memory(stage.plan, 0).total for stage in self.stages)
            held = sum(stage.memory.total for stage in self.stages)
            yield (
                "sharding",
                f"ZeRO stage {options.zero_stage} over {options.dim} by {options.partition_by}: {size_of(held)} of "
                f"parameters, gradients and optimizer instead of {size_of(without)}",
            )
        if self._strategy.max_norm is not None:
            yield (
                "max_norm",
                f"gradients are clipped to a global norm of {self._strategy.max_norm:g}: one all-gather of a number",
            )

    def _precision(self) -> Iterator[tuple[str, str]]:
        amp, merge = self._strategy.amp, self._strategy.gradient_merge
        if amp.dtype is not None:
            masters = "fp32 master weights" if amp.has_masters else "no master weights"
            scaled = ", the loss scaled" if amp.dtype == "float16" else ""
            yield "amp", f"{amp.dtype}, {masters if amp.casts_model else 'by operator'}{scaled}"
        if amp.casts_operators:
            casts = [node for stage in self.stages for node in stage.plan.graph.nodes.values() if is_cast(node)]
            yield "amp", f"level {amp.level}: {len(casts)} casts of tensors between {amp.dtype} and fp32"
        nodes = [node for stage in self.stages for node in stage.plan.graph.nodes.values() if node.kind == PARAMETER]
        if any(self._strategy.gradient_dtype(node.outputs[0].dtype) != node.outputs[0].dtype for node in nodes):
            yield "amp", f"gradients of {self._strategy.backwards} backwards add up, and are summed over ranks, in fp32"
        if merge.steps > 1:
            how = "mean" if merge.average else "sum"
            yield "gradient_merge", f"a step of the optimizer with the {how} of {merge.steps} batches' gradients"

    def _overlap(self) -> Iterator[tuple[str, str]]:
        fused = [fusion for stage in self.stages for fusion in stage.fused]
        if fused:
            able, how = sum(bool(fusion.operator) for fusion in fused), chunks_in_words(self._settings)
            yield "overlap", f"{able} of {len(fused)} matmuls next to a collective can overlap; {how}"
        prefetched = [group for stage in self.stages for group in stage.prefetched]
        if prefetched:
            joined = sum(len(group.conversions) for group in prefetched)
            yield "comm_fusion", f"{joined} collectives start ahead of their readers, as {len(prefetched)}"
        all_buckets = [bucket for stage in self.stages for bucket in stage.buckets]
        if all_buckets:
            members = [member for bucket in all_buckets for member in bucket.members]
            nbytes = sum(
                member.nbytes // member.dtype.itemsize * self._strategy.gradient_dtype(member.dtype).itemsize
                for member in members
            )
            hidden = self._strategy.overlap.gradients and not self.parts  # a pipeline sums after its last backward
            under = "under backward" if hidden else "after backward"
            yield (
                "comm_fusion",
                f"{len(members)} gradients, {size_of(nbytes)}, are summed in {len(all_buckets)} buckets {under}",
            )

    @cached_property
    def recompute(self) -> Recompute:
        """What backward computes again: by the strategy, or by marks in the model."""
        return self._strategy.recompute if self._strategy.recompute.modules else Recompute.of(self._planned.model)

    def _stage(self, name: str, plan: ShardingPlan, live: float) -> _Stage:
        bucket_bytes, part = self._strategy.comm_fusion.bucket_bytes, bool(self._planned.stages)
        rank_plan = plan_for_rank(
            plan,
            (0,) * plan.mesh.ndim,
            self._settings if self._strategy.overlap.operators else None,
            recompute=self.recompute,
            bucket_bytes=bucket_bytes,
            prefetch=self._strategy.pipeline.schedule not in SPLIT,
            part=part,
        )
        saved = [saved_bytes(rank_plan, each, part=part) for each in (Recompute(), self.recompute)]
        return _Stage(
            name,
            plan,
            self._memory(plan, self._strategy.sharding.zero_stage),
            (saved[0], saved[1]),
            live,
            rank_plan.fused_plan.fused,
            buckets(rank_plan.summed, bucket_bytes),
            tuple(group for groups in rank_plan.prefetches.values() for group in groups),
            step_collectives(self._strategy, rank_plan),
        )

    def _memory(self, plan: ShardingPlan, zero_stage: int) -> RankBytes:
        amp, first = self._strategy.amp, (0,) * plan.mesh.ndim
        memories = []
        for replicas in sorted({self._replicas(plan, name) for name in plan.graph.nodes}):
            nodes = [node for node in plan.graph.nodes.values() if node.kind == PARAMETER]
            mine = [node for node in nodes if self._replicas(plan, node.name) == replicas]
            shapes = [
                local_shape(node.outputs[0].shape, plan.layouts[Value(node.name)], plan.mesh.shape, first)
                for node in mine
            ]
            if mine:
                masters = WIDE.itemsize if amp.has_masters else None
                memories.append(
                    predicted_memory(
                        shapes,
                        zero_stage=min(zero_stage, 2) if replicas > 1 else 0,
                        ranks=replicas,
                        partition_by=self._strategy.sharding.partition_by,
                        itemsize=mine[0].outputs[0].dtype.itemsize,
                        master_itemsize=masters,
                        wide_gradients=self._strategy.wide_gradients,
                    )
                )
        return sum(memories, RankBytes(0, 0, 0))

    def _replicas(self, plan: ShardingPlan, name: str) -> int:
        """Return the number of ranks of the sharding dimension that hold the same shard of a parameter."""
        options = self._strategy.sharding
        if not options.zero_stage or plan.graph.nodes[name].kind != PARAMETER:
            return 1
        cut_there = plan.layouts[Value(name)][plan.mesh.dim(options.dim)].kind == "shard"
        return 1 if cut_there else plan.mesh.size(options.dim)
