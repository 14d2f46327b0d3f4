"""A pipeline: the stages of one plan on several meshes, run by a schedule of torch.distributed.pipelining."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from ascend_parallel.process_groups import group_timeout
from ascend_parallel.process_groups.consistency import confirm_same, fingerprint
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import CALL, Value
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.local_parameters import parameters_of
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss, Losses
from ascend_parallel.training.pipeline.cross_mesh import make_stage
from ascend_parallel.training.pipeline.cross_mesh_sums import held_by_earlier_meshes
from ascend_parallel.training.pipeline.groups import SharedGradients, check_meshes, make_groups
from ascend_parallel.training.pipeline.picture import MeasuredStep, measure_step
from ascend_parallel.training.pipeline.split_plan import StagePlan, plan_of_each, split_into_stages
from ascend_parallel.training.pipeline.stage import Batch, StageModule
from ascend_parallel.training.pipeline.stage_assignment import assign, balanced
from ascend_parallel.tuning.step_time.schedule import SINGLE, SPLIT, check, forward_only, schedule_class, stages_of
from ascend_parallel.tuning.step_time.timing import Slot


class PipelineError(RuntimeError):
    """A step failed or waited too long; the message names the rank, its stages and its last finished action."""


class Pipeline:
    """This rank's part of a pipeline-parallel model.

    plan, parts
        The plan of the whole model for this rank's mesh, and that of each stage.
    meshes
        The mesh of each group of ranks.
    stages, modules
        This rank's stages and their modules, in order. Parameters are this rank's shards, under the model's own names.
        A parameter that several stages read is held by each of them.
    shared
        The parameters that several stages read.
    factor
        The next steps multiply gradients by this number.
    count
        If the model returns a sum and a count: the last batch's count, by which its gradients are to be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan | Sequence[ShardingPlan],
        stages: Mapping[str, int] | int | None,
        meshes: Sequence[ProcessMesh],
        *,
        schedule: str = "1f1b",
        micro_batches: int = 1,
        overlap: bool = True,
        settings: Settings | None = None,
        local_inputs: bool = True,
        broadcast_inputs: Sequence[str] = (),
        timeout: timedelta | None = None,
        **sharded: Any,
    ) -> None:
        """Build this rank's part. Every rank of the default group must call it with the same arguments.

        model
            The traced model, with the same values on every rank; it is not changed.
        plan
            The plan of the model with its loss, a mean over the batch, for one micro-batch of all ranks of one mesh.
            For meshes of different shapes: such a plan, of the same graph, for each of `meshes`.
        stages
            The stage of every operator (`assign`, `balanced`), of modules by pattern, or a number of stages of about
            the same work; None: the modules' `pipeline_stage`.
        meshes
            A mesh for each group of ranks, of its plan's shape, in the order of the stages; `stages_of` tells which
            stages lie on which mesh.
        schedule
            "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble" or "zbv".
        local_inputs
            Every rank gives its part of the batch, in the plan's layout. False: every rank gives the whole batch.
        broadcast_inputs
            Names of inputs that are the same for every micro-batch, such as a mask.
        timeout
            How long a rank waits for another in a step; None: the default group's timeout.
        overlap, settings, sharded
            Arguments of the stages' `ShardedModule`.

        Raises `StageError` and `ValueError` for impossible arguments, and `DisagreementError` if the ranks' models,
        plans, stages or schedules differ.
        """
        if dist.group.WORLD is None:
            raise RuntimeError("a pipeline needs torch.distributed.init_process_group, on every rank")
        check_meshes(meshes)
        self.meshes = tuple(meshes)
        plans = plan_of_each(plan, meshes)
        assignment = _assignment(model, plans[0], stages)
        count = max(assignment.values()) + 1
        check(schedule, len(meshes), count, micro_batches)
        _check_split(schedule, overlap, sharded.get("recompute") or Recompute.of(model))
        self._mesh_of_stage = stages_of(schedule, len(meshes), count)
        stage_meshes = [meshes[index] for index in self._mesh_of_stage]
        self.parts = split_into_stages([plans[index] for index in self._mesh_of_stage], assignment, stage_meshes)
        self.schedule, self.micro_batches, self.factor = schedule, micro_batches, 1.0
        batch = {"local_inputs": str(local_inputs), "broadcast_inputs": ", ".join(sorted(broadcast_inputs))}
        seed = _confirm(self, model, {**batch, "overlap": str(overlap), "assignment": _digest(assignment)})
        limit = timeout or group_timeout(dist.group.WORLD) or dist.distributed_c10d.default_pg_timeout
        self._groups = make_groups(meshes, limit)
        self.plan = plans[self._groups.index]
        self.stages = tuple(stage for stage, index in enumerate(self._mesh_of_stage) if index == self._groups.index)
        common = {"overlap": overlap, "settings": settings, "local_inputs": True, "group": self._groups.mesh, **sharded}
        common["prefetch"] = schedule not in SPLIT
        self.modules = tuple(ShardedModule(model, self.parts[stage].plan, **common) for stage in self.stages)
        for module in self.modules:
            module.randomness.restart(seed)
        own = [self.parts[stage] for stage in self.stages]
        self._wrapped = [StageModule(part, module) for part, module in zip(own, self.modules, strict=True)]
        self._batch = Batch(self.plan, micro_batches, local_inputs, broadcast_inputs, self.modules[0].coordinate)
        self.shared = SharedGradients(
            self.parts, self._mesh_of_stage, self.modules, meshes, limit, self._groups.everybody
        )
        self._executed: list[Slot] = []
        self._losses = Losses(micro_batches)
        self.count: torch.Tensor | None = None
        self._seconds = 0.0
        self._torch_schedule = self._make_schedule()

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of all micro-batches of a batch; return the mean of their losses.

        Along dimension 0 the batch is `micro_batches` times the traced batch; each micro-batch gets an equal part.
        Gradients are the mean loss's, times `factor`, and are added to `.grad`; `reduce_gradients` sums them over
        ranks. If the model returns a sum and a count, gradients are the sum's, to be divided by `count`.

        Raises `ValueError` for a batch that does not match the traced batch, `PipelineError` if a stage fails or waits
        too long.
        """
        self.shared.check_cleared(self.modules)
        loss = self._run(self._torch_schedule.step, args, kwargs)
        self.shared.due = True
        return loss.mean

    def evaluate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward of all micro-batches of a batch in the modules' current mode; return the mean of their losses.

        No gradient is changed. Arguments and errors as for `step`.
        """
        with torch.no_grad(), forward_only(self._torch_schedule):
            return self._run(self._torch_schedule.eval, args, kwargs).mean

    def reduce_gradients(self, *dims: str, but: Sequence[str] = ()) -> None:
        """Sum gradients over the ranks of the named mesh dimensions (none: all), and of shared parameters over stages.

        but
            Dimensions to leave out; the caller sums over them.

        Every rank must call it alike. Raises `ValueError` for a dimension that the mesh does not have.
        """
        chosen = [dim for dim in dims or self.meshes[0].dim_names if dim not in but]
        for module in self.modules if chosen else ():
            module.reduce_gradients(*chosen)
        self.shared.sum([dim for dim in self.meshes[0].dim_names if dim not in chosen])

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's shards of all its stages' parameters; a parameter that several stages read, once."""
        parameters = (parameter for module in self.modules for parameter in module.parameters())
        return (parameter for parameter in parameters if parameter not in self.shared.repeated)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for module in self.modules:
            for parameter in parameters_of(module):
                parameter.grad = None

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shards of parameters and persistent buffers, by the model's names."""
        return {name: shard for module in reversed(self.modules) for name, shard in module.tensor_shards().items()}

    @property
    def held_elsewhere(self) -> frozenset[str]:
        """Names of state that an earlier mesh of another shape holds too, perhaps cut in another way."""
        known = self.parts, self._mesh_of_stage, self._groups.index
        return frozenset() if self._groups.everybody is None else held_by_earlier_meshes(*known)

    def measure(self, *args: Any, **kwargs: Any) -> MeasuredStep:
        """Run a step that all ranks begin together; return its measured times. Every rank must call it."""
        dist.barrier(self._groups.timed[0])
        self.step(*args, **kwargs)
        numbers = len(self.parts), self.micro_batches
        return measure_step(*self._groups.timed, self.schedule, *numbers, self._executed, self._seconds)

    @property
    def executed(self) -> tuple[Slot, ...]:
        """The actions that this rank ran in the last step, with times in seconds of time.perf_counter."""
        return tuple(self._executed)

    def _run(self, schedule: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchLoss:
        """Run `schedule`, a method of torch's schedule, and return the loss."""
        cut_inputs, broadcast_inputs = self._batch.inputs(args, kwargs, self.parts, self.stages)
        self._executed.clear()
        self._losses = Losses(self.micro_batches, self.factor)
        start = perf_counter()
        try:
            with ExitStack() as stack:
                for wrapped, module in zip(self._wrapped, self.modules, strict=True):
                    wrapped.broadcast_inputs = broadcast_inputs
                    stack.enter_context(module.gradients.no_sync_of_step())
                schedule(target=torch.zeros(self.micro_batches), return_outputs=False, **cut_inputs)
            loss = self._broadcast_loss()
        except RuntimeError as error:
            raise PipelineError(self._failure(error)) from error
        self._seconds, self.count = perf_counter() - start, loss.count
        return loss

    def _make_schedule(self) -> Any:
        """Return torch's schedule of this rank's stages."""
        stages = [make_stage(wrapped, self.parts, self._groups, self._executed) for wrapped in self._wrapped]
        argument = stages[0] if self.schedule in SINGLE else stages
        return schedule_class(self.schedule)(argument, self.micro_batches, loss_fn=self._weighted, scale_grads=False)

    def _weighted(self, returned: Any, _: object) -> torch.Tensor:
        """Return a micro-batch's share of the differentiated loss."""
        return self._losses.add(returned)

    def _broadcast_loss(self) -> BatchLoss:
        """Return the mean loss, and the count if the model returns it, broadcast from the last stage to all stages."""
        last, everybody = self.parts[-1], self._groups.everybody
        loss = self._losses.batch() if last.stage in self.stages else self._empty(last)
        for tensor in (loss.total, loss.count):
            if tensor is not None and everybody is not None:
                dist.broadcast(tensor, last.plan.mesh.process_ids[0], everybody)
            elif tensor is not None:
                dist.broadcast(tensor, group=self._groups.along, group_src=self._mesh_of_stage[-1])
        return loss

    def _empty(self, last: StagePlan) -> BatchLoss:
        """Return zeros of the dtypes of the last stage's losses."""
        graph, device, losses = last.plan.graph, default_device(), Losses(1)

        def zero(leaf: Any) -> Any:
            return torch.zeros((), dtype=graph.meta(leaf).dtype, device=device) if isinstance(leaf, Value) else leaf

        losses.add(pytree.tree_map(zero, graph.outputs))
        return losses.batch()

    def _failure(self, error: RuntimeError) -> str:
        last = self._executed[-1].action if self._executed else None
        done = f"after {last.kind} of micro-batch {last.micro_batch} in stage {last.stage}" if last else "at its start"
        which = ", ".join(map(str, self.stages))
        return f"stage {which} on rank {dist.get_rank()}, schedule {self.schedule}, failed {done}: {error}"


def _assignment(model: nn.Module, plan: ShardingPlan, stages: Mapping[str, int] | int | None) -> Mapping[str, int]:
    if isinstance(stages, int):
        return balanced(plan.graph, stages)
    calls = {name for name, node in plan.graph.nodes.items() if node.kind == CALL}
    return stages if stages and set(stages) == calls else assign(plan.graph, model, stages)


def _check_split(schedule: str, overlap: bool, recompute: Recompute) -> None:
    if schedule in SPLIT and overlap:
        raise ValueError(
            f"schedule={schedule!r}, overlap=True: an overlapped matmul computes its weight's gradient under the sum "
            "of its input's. This schedule computes the two at different times, so both would be computed twice; give "
            "overlap=False"
        )
    if schedule in SPLIT and recompute.modules:
        raise ValueError(
            f"schedule={schedule!r} with recomputed modules ({', '.join(recompute.modules)}): a recomputed module "
            "gives the gradients of inputs and weights together, and this schedule computes them at different times; "
            "give another schedule"
        )


def _digest(assignment: Mapping[str, int]) -> str:
    return hashlib.sha256(str(sorted(assignment.items())).encode()).hexdigest()[:16]


def _confirm(pipeline: Pipeline, model: nn.Module, more: Mapping[str, str]) -> int:
    """Return a seed for all ranks; raise `DisagreementError` on every rank unless all ranks' arguments are equal."""
    mine = {
        "the model's parameters": fingerprint(model),
        "the sharding plan": "/".join(part.plan.digest for part in pipeline.parts),
        "schedule": pipeline.schedule,
        "micro_batches": str(pipeline.micro_batches),
        **more,
    }
    return confirm_same(dist.group.WORLD, "Pipeline", mine, "ranks make different pipelines", "Give all ranks the same")
