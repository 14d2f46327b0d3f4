"""A batch's parts that a rank's stages read, and the rank's part of a stage, run by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ascend_parallel.sharding.graph import Node, Value
from ascend_parallel.sharding.layout import Shape, local_shape
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.input_checks import bound_inputs
from ascend_parallel.sharding.runtime.local_parameters import local_slice
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.training.pipeline.split_plan import StagePlan
from ascend_parallel.tuning.step_time.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from ascend_parallel.tuning.step_time.timing import Slot

Tensors = dict[str, torch.Tensor]


class Batch:
    """Checks a batch against the traced micro-batch, and takes this rank's part."""

    def __init__(
        self,
        plan: ShardingPlan,
        micro_batches: int,
        local: bool,
        broadcast_inputs: Sequence[str],
        place: tuple[int, ...],
    ) -> None:
        """Take the whole plan, the form of the batch, and this rank's place in its mesh.

        Raises `ValueError` for a name in `broadcast_inputs` that no input has.
        """
        self._plan, self._micro_batches, self._local, self._place = plan, micro_batches, local, place
        nodes = plan.graph.inputs
        names = [node.source for node in nodes]
        for name in broadcast_inputs:
            if name not in names:
                raise ValueError(f"broadcast_inputs: {name!r} is no input; there are {', '.join(names)}")
        self._broadcast = {node.name for node in nodes if node.source in broadcast_inputs or not node.outputs[0].shape}

    def inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: Sequence[StagePlan], stages: Sequence[int]
    ) -> tuple[Tensors, Tensors]:
        """Return the inputs of these stages, by node: those to cut along dimension 0, and those of all micro-batches.

        Raises `ValueError` for arguments, shapes or dtypes that differ from the traced ones.
        """
        pairs = bound_inputs(self._plan.graph, args, kwargs)
        for node, tensor in pairs:
            self._check(node, tensor)
        read = {name for stage in stages for name in parts[stage].inputs}
        own = {node.name: self._own(node, tensor) for node, tensor in pairs if node.name in read}
        cut = {name: tensor for name, tensor in own.items() if name not in self._broadcast}
        return cut, {name: tensor for name, tensor in own.items() if name in self._broadcast}

    def _check(self, node: Node, tensor: torch.Tensor) -> None:
        (meta,), shape, count = node.outputs, self._shape(node), self._micro_batches
        what = f"{node.source} is {list(tensor.shape)} of {tensor.dtype}"
        if tensor.requires_grad:
            raise ValueError(f"{node.source} requires a gradient, which a pipeline does not compute: detach it")
        if node.name in self._broadcast:
            if tuple(tensor.shape) != shape or tensor.dtype != meta.dtype:
                raise ValueError(f"{what}; the plan is for {list(shape)} of {meta.dtype} in every micro-batch")
            return
        if tensor.ndim and tensor.shape[0] % count:
            raise ValueError(
                f"{what}, which cannot be cut along dimension 0 into micro_batches={count} of the same size"
            )
        if tuple(tensor.shape) != (count * shape[0], *shape[1:]) or tensor.dtype != meta.dtype:
            raise ValueError(
                f"{what}; the plan is for micro_batches={count} of {list(shape)} of {meta.dtype} each, joined "
                f"along dimension 0 (broadcast_inputs={[node.source]} if it is the same for all)"
            )

    def _shape(self, node: Node) -> Shape:
        """Return the shape of one micro-batch: the whole mesh's, or this rank's part."""
        if not self._local:
            return node.outputs[0].shape
        return local_shape(node.outputs[0].shape, self._layout(node), self._plan.mesh.shape, self._place)

    def _own(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of all micro-batches."""
        if self._local:
            return tensor
        parts = [tensor] if node.name in self._broadcast else tensor.chunk(self._micro_batches)
        own = [local_slice(part, self._layout(node), self._plan.mesh.shape, self._place) for part in parts]
        return own[0] if len(own) == 1 else torch.cat(own)

    def _layout(self, node: Node) -> Any:
        return self._plan.layouts[Value(node.name)]


class StageModule(torch.nn.Module):
    """Calls a stage's sharded module with the tensors of the stage before and, by name, the inputs that it reads."""

    def __init__(self, part: StagePlan, sharded: ShardedModule) -> None:
        """Take the stage's plan, and this rank's part of it."""
        super().__init__()
        self.part, self.sharded = part, sharded
        self.broadcast_inputs: Mapping[str, torch.Tensor] = {}  # inputs that are the same for all micro-batches

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Return the tensors that the next stage receives, or the loss."""
        by_name = inputs | dict(self.broadcast_inputs)
        outputs = self.sharded(*map(_entered, received), *(by_name[name] for name in self.part.inputs))
        return tuple(map(_sendable, outputs)) if isinstance(outputs, tuple) else outputs


class RankStage(PipelineStage):
    """A stage on this rank that records when each of its actions runs.

    executed
        The actions of the running step, of all stages of the rank.
    """

    def __init__(
        self, module: StageModule, stages: int, device: torch.device, group: dist.ProcessGroup, executed: list[Slot]
    ) -> None:
        """Take the stage's module and the group of the ranks at the same place of all meshes."""
        plan = module.part.plan
        received = tuple(self._meta(module, Value(name)) for name in module.part.received)
        outputs = (plan.graph.outputs,) if isinstance(plan.graph.outputs, Value) else plan.graph.outputs
        returned = tuple(self._meta(module, value) for value in outputs)
        super().__init__(module, module.part.stage, stages, device, received, returned, group=group)
        self._executed = executed

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch's forward."""
        with self._recorded(FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a micro-batch's backward, or only the half for the stage's inputs."""
        with self._recorded(BACKWARD if full_backward else INPUT, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the half of a micro-batch's backward for the stage's weights."""
        with self._recorded(WEIGHT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextmanager
    def _recorded(self, kind: str, micro_batch: int) -> Iterator[None]:
        start = perf_counter()
        yield
        self._executed.append(Slot(Action(kind, self.stage_index, micro_batch), start, perf_counter()))

    @staticmethod
    def _meta(module: StageModule, value: Value) -> torch.Tensor:
        """Return a meta tensor like this rank's part of a tensor that is sent."""
        plan = module.part.plan
        meta, layout = plan.graph.meta(value), plan.returned.get(value, plan.layouts[value])
        shape = local_shape(meta.shape, layout, plan.mesh.shape, module.sharded.coordinate)
        requires_grad = value in plan.differentiable and (meta.dtype.is_floating_point or meta.dtype.is_complex)
        return torch.empty(shape, dtype=meta.dtype, device="meta", requires_grad=requires_grad)


def _entered(received: torch.Tensor) -> torch.Tensor:
    """Return a view of a received tensor whose gradient is made contiguous, so that it can be sent."""
    entered = received.view_as(received)
    if entered.requires_grad:
        entered.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return entered


def _sendable(output: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that is no view and no leaf: torch detaches it in place."""
    own = output.is_contiguous() and not output._is_view() and not output.is_leaf
    return output if own else output.clone(memory_format=torch.contiguous_format)
