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

from ascend_parallel.consistency import confirm_same, fingerprint
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import CALL, Value
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss, Losses
from ascend_parallel.training.pipeline.batch import Batch
from ascend_parallel.training.pipeline.groups import check_meshes, make_groups, time_limit
from ascend_parallel.training.pipeline.schedule import SCHEDULES, SINGLE, SPLIT, Slot, check, forward_only, stages_of
from ascend_parallel.training.pipeline.shared_parameters import SharedGradients
from ascend_parallel.training.pipeline.split_plan import StagePlan, cut
from ascend_parallel.training.pipeline.stage import RankStage, StageModule
from ascend_parallel.training.pipeline.stage_assignment import assign, balanced
from ascend_parallel.training.pipeline.step_times import Measured, measured


class PipelineError(RuntimeError):
    """A step that failed or waited too long; names the rank, its stages and what it had done."""


class Pipeline:
    """This rank's part of a model in stages.

    plan, parts
        Of the whole model, and of each stage.
    meshes
        One for each group of ranks.
    stages, modules
        Those of this rank, in their order. Parameters are slices, under the model's own names, and a parameter that
        several stages read is held by each of them.
    shared
        The parameters that several stages read.
    factor
        By which the gradients of the next steps are multiplied.
    count
        Of the last batch, where the model returns a sum and a count: what its gradients are to be divided by.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
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
        """Take this rank's part. Every rank of the default group calls it alike.

        model
            The one that was traced, with the same values on every rank; it is not changed.
        plan
            Of the model with its loss, a mean over the batch, for one micro-batch of all ranks of one mesh.
        stages
            Of every operator (`assign`, `balanced`), of modules by pattern, or a number of stages of about the same
            work; None: as `pipeline_stage` on the modules says.
        meshes
            One for each group of ranks, of the plan's shape, in the order of the stages; `stages_of` says which
            stages are on which.
        schedule
            "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble" or "zbv".
        local_inputs
            Every rank gives its part of the batch, laid out as the plan says, and not the whole of it.
        broadcast_inputs
            Names of inputs that are the same for every micro-batch, such as a mask.
        timeout
            How long a rank waits for another in a step; by default as long as in the default group.
        overlap, settings, sharded
            Arguments of the stages' `ShardedModule`.

        Raises `StageError` and `ValueError` for what cannot be, and `DisagreementError` if ranks come with different
        models, plans, stages or schedules.
        """
        if dist.group.WORLD is None:
            raise RuntimeError("a pipeline needs torch.distributed.init_process_group, on every rank")
        check_meshes(meshes)
        self.meshes = tuple(meshes)
        assignment = _assignment(model, plan, stages)
        count = max(assignment.values()) + 1
        check(schedule, len(meshes), count, micro_batches)
        _check_split(schedule, overlap, sharded.get("recompute") or Recompute.of(model))
        self._at = stages_of(schedule, len(meshes), count)
        self.plan, self.parts = plan, cut(plan, assignment, [meshes[index] for index in self._at])
        self.schedule, self.micro_batches, self.factor = schedule, micro_batches, 1.0
        batch = {"local_inputs": str(local_inputs), "broadcast_inputs": ", ".join(sorted(broadcast_inputs))}
        seed = _confirm(self, model, {**batch, "overlap": str(overlap), "assignment": _digest(assignment)})
        limit = timeout or time_limit(dist.group.WORLD)
        self._groups = make_groups(meshes, limit)
        self.stages = tuple(stage for stage, index in enumerate(self._at) if index == self._groups.index)
        common = {"overlap": overlap, "settings": settings, "local_inputs": True, "group": self._groups.mesh, **sharded}
        common["ahead"] = schedule not in SPLIT
        self.modules = tuple(ShardedModule(model, self.parts[stage].plan, **common) for stage in self.stages)
        for module in self.modules:
            module.randomness.restart(seed)
        own = [self.parts[stage] for stage in self.stages]
        self._wrapped = [StageModule(part, module) for part, module in zip(own, self.modules, strict=True)]
        self._batch = Batch(plan, micro_batches, local_inputs, broadcast_inputs, self.modules[0].coordinate)
        self.shared = SharedGradients(self.parts, self._at, self.modules, meshes, limit)
        self._ran: list[Slot] = []
        self._losses = Losses(micro_batches)
        self.count: torch.Tensor | None = None
        self._seconds = 0.0
        self._torch = self._made()

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of all micro-batches of a batch, and return the mean of their losses.

        The batch is as many times the traced one along dimension 0, of which each micro-batch has the same part.
        Gradients are those of the mean, times `factor`, and are added to `.grad`; they are not summed over ranks:
        `reduce_gradients`. Of a model that returns a sum and a count they are the sum's, to be divided by `count`.

        Raises `ValueError` for a batch unlike the traced one, `PipelineError` if a stage fails or waits too long.
        """
        self.shared.check_cleared(self.parameters())
        loss = self._run(self._torch.step, args, kwargs)
        self.shared.due = True
        return loss.mean

    def evaluate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward of all micro-batches of a batch, as the modules are, and return the mean of their losses.

        No gradient is touched. Arguments and errors as for `step`.
        """
        with torch.no_grad(), forward_only(self._torch):
            return self._run(self._torch.eval, args, kwargs).mean

    def reduce_gradients(self, *dims: str, but: Sequence[str] = ()) -> None:
        """Sum gradients over the ranks of the named mesh dimensions, or of all, and of shared parameters over stages.

        but
            Dimensions left out, over which the caller sums.

        Every rank has to call it alike. Raises `ValueError` for a dimension that the mesh does not have.
        """
        chosen = [dim for dim in dims or self.meshes[0].dim_names if dim not in but]
        for module in self.modules if chosen else ():
            module.reduce_gradients(*chosen)
        self.shared.sum()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's slices of all its stages' parameters; what several of them read, once."""
        found = (parameter for module in self.modules for parameter in module.parameters())
        return (parameter for parameter in found if parameter not in self.shared.repeated)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's part of parameters and persistent buffers by the model's names."""
        return {name: shard for module in reversed(self.modules) for name, shard in module.tensor_shards().items()}

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Run a step that all ranks begin together, and return where its time went. Every rank has to call it."""
        dist.barrier(self._groups.along)
        self.step(*args, **kwargs)
        return measured(
            self._groups.along,
            self.schedule,
            len(self.parts),
            self.micro_batches,
            self._ran,
            self._seconds,
        )

    @property
    def ran(self) -> tuple[Slot, ...]:
        """When this rank's actions of the last step ran, in seconds of time.perf_counter."""
        return tuple(self._ran)

    def _run(self, schedule: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchLoss:
        """Run one of the ways of torch's schedule, and return the loss."""
        cut_inputs, broadcast_inputs = self._batch.inputs(args, kwargs, self.parts, self.stages)
        self._ran.clear()
        self._losses = Losses(self.micro_batches, self.factor)
        start = perf_counter()
        with ExitStack() as stack:
            for wrapped, module in zip(self._wrapped, self.modules, strict=True):
                wrapped.broadcast_inputs = broadcast_inputs
                stack.enter_context(module.no_sync())
            try:
                schedule(target=torch.zeros(self.micro_batches), return_outputs=False, **cut_inputs)
                found = self._told()
            except RuntimeError as error:
                raise PipelineError(self._failure(error)) from error
        self._seconds, self.count = perf_counter() - start, found.count
        return found

    def _made(self) -> Any:
        """Return torch's schedule of this rank's stages."""
        device, count = torch.device(default_device()), len(self.parts)
        stages = [RankStage(one, count, device, self._groups.along, self._ran) for one in self._wrapped]
        given = stages[0] if self.schedule in SINGLE else stages
        return SCHEDULES[self.schedule](given, self.micro_batches, loss_fn=self._weighted, scale_grads=False)

    def _weighted(self, returned: Any, _: object) -> torch.Tensor:
        """Return a micro-batch's share of what is differentiated."""
        return self._losses.add(returned)

    def _told(self) -> BatchLoss:
        """Return the mean loss, and the count if there is one, which the last stage tells the others."""
        last = self.parts[-1]
        own = self._losses.batch() if last.stage in self.stages else self._empty(last)
        for one in (own.total, own.count):
            if one is not None:
                dist.broadcast(one, group=self._groups.along, group_src=self._at[-1])
        return own

    def _empty(self, last: StagePlan) -> BatchLoss:
        """Return numbers of the dtypes in which the last stage has them."""
        graph, device, losses = last.plan.graph, default_device(), Losses(1)

        def zero(one: Any) -> Any:
            return torch.zeros((), dtype=graph.meta(one).dtype, device=device) if isinstance(one, Value) else one

        losses.add(pytree.tree_map(zero, graph.outputs))
        return losses.batch()

    def _failure(self, error: RuntimeError) -> str:
        last = self._ran[-1].action if self._ran else None
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
            "of its input's, which this schedule takes apart, so both would be computed twice; give overlap=False"
        )
    if schedule in SPLIT and recompute.modules:
        raise ValueError(
            f"schedule={schedule!r} with recomputed modules ({', '.join(recompute.modules)}): what is recomputed gives "
            "the gradients of inputs and weights together, which this schedule takes apart; give another schedule"
        )


def _digest(assignment: Mapping[str, int]) -> str:
    return hashlib.sha256(str(sorted(assignment.items())).encode()).hexdigest()[:16]


def _confirm(pipeline: Pipeline, model: nn.Module, more: Mapping[str, str]) -> int:
    """Return a seed for all ranks; raise `DisagreementError` on every rank unless all have come with the same."""
    mine = {
        "the model's parameters": fingerprint(model),
        "the sharding plan": "/".join(part.plan.digest for part in pipeline.parts),
        "schedule": pipeline.schedule,
        "micro_batches": str(pipeline.micro_batches),
        **more,
    }
    return confirm_same(dist.group.WORLD, "Pipeline", mine, "ranks make different pipelines", "Give all ranks the same")
