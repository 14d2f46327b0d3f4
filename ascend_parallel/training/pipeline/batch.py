"""Check a batch of micro-batches, and take the parts that a rank's stages read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ascend_parallel.sharding.graph import INPUT, Node, Value
from ascend_parallel.sharding.layout import Shape, local_shape
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.input_checks import bound_inputs
from ascend_parallel.sharding.runtime.local_parameters import local_slice
from ascend_parallel.training.pipeline.split_plan import StagePlan

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
        nodes = [node for node in plan.graph.nodes.values() if node.kind == INPUT]
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
