"""A rank's part of a stage, run by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.training.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Slot
from ascend_parallel.training.pipeline.split_plan import StagePlan


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
