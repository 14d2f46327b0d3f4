"""A rank's part of a planned model: its slices of the parameters, its part of each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import ascend_parallel
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, CALL, CONSTANT, INPUT, PARAMETER, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, local_shape
from ascend_parallel.sharding.planner.plan import ShardingPlan
from ascend_parallel.sharding.running.agreed import confirm_alike
from ascend_parallel.sharding.running.conversion import convert
from ascend_parallel.sharding.running.forward import Forward, Ran
from ascend_parallel.sharding.running.fuse import Fusion, Schedule, fuse
from ascend_parallel.sharding.running.holding import check_model, hold, local_slice

# Operators that work otherwise in training.
OF_MODES = ("dropout", "batch_norm", "instance_norm", "rrelu")


class ShardedModule(torch.nn.Module):
    """This rank's part of a model; see `parallelize`.

    Parameters are slices, under the model's own names, and so are their gradients after backward: whole for what is
    replicated, so that an optimizer needs no communication. It runs what was traced: train() and eval() change nothing.

    ran
        How often each collective ran so far; to be looked at, and cleared.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: ShardingPlan,
        *,
        overlap: bool = True,
        settings: Settings | None = None,
        local_inputs: bool = False,
    ) -> None:
        """Take the rank's slices of the model, and choose the overlapped operators."""
        super().__init__()
        confirm_alike(plan, model, overlap, settings or ascend_parallel.status().settings)
        plan.mesh.device_mesh()  # makes the groups, for which all ranks are needed
        rank = dist.get_rank()
        place = plan.mesh.coordinate(rank)
        if place is None:
            raise ValueError(f"rank {rank} is not in {plan.mesh}, so it has no part of the model")
        self.plan, self.ran, self.training = plan, Counter[Ran](), plan.graph.training
        self.coordinate, self.local_inputs = place, local_inputs
        self.schedule = Schedule(plan.layouts, plan.inputs, plan.via)
        if overlap:
            self.schedule = fuse(plan, settings or ascend_parallel.status().settings)
        returned = plan.graph.kept
        # Of a tied tensor's names torch.export has one read, and lists the others beside it.
        read = {value.node for value, readers in plan.graph.readers().items() if readers or value in returned}
        given = [node for node in self._given(PARAMETER, BUFFER) if node.name in read]
        check_model(model, given)
        layouts = {node.source: plan.layouts[Value(node.name)] for node in given}
        self.held = hold(self, model, layouts, plan.mesh.shape, place)
        for node in self._given(CONSTANT):
            layout = plan.layouts[Value(node.name)]
            local = local_slice(plan.graph.constants[node.source], layout, plan.mesh.shape, place)
            self.register_buffer(node.name, local, persistent=False)
        self.last_reads = plan.graph.last_reads()

    @property
    def fused(self) -> tuple[Fusion, ...]:
        """What the overlap pass did with each matmul next to a collective."""
        return self.schedule.fused

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # groups are not for a compiler to look at
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, whole on every rank, for whole (or local) inputs.

        Every rank has to call it alike. Raises `ValueError` for arguments unlike those that were traced: their number,
        shapes, dtypes, and the values of those that are no tensors.
        """
        return Forward(self, self._inputs(args, kwargs)).outputs()

    def train(self, mode: bool = True) -> ShardedModule:
        """Refuse another mode than was traced, where an operator works otherwise in it."""
        names = (node.call.name for node in self._given(CALL) if node.call is not None)
        if mode != self.plan.graph.training and any(word in name for name in names for word in OF_MODES):
            traced = "training" if self.plan.graph.training else "evaluation"
            raise ValueError(
                f"the model was traced in {traced} mode, and has dropout or running statistics: trace it again"
            )
        return super().train(mode)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state. Every rank has to call it."""
        return {name: self._whole(name, local) for name, local in self.state_dict().items()}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradient of each parameter that has one. Every rank has to call it."""
        return {
            name: self._whole(name, parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's slices of a whole model's state."""
        shape, place = self.plan.mesh.shape, self.coordinate
        self.load_state_dict(
            {name: local_slice(whole, self.held[name].layout, shape, place) for name, whole in state.items()}
        )

    def _whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        held, mesh = self.held[name], self.plan.mesh
        whole = (REPLICATE,) * mesh.ndim
        return convert(local.detach(), held.shape, mesh, held.layout, whole, self.plan.costs).clone()

    def _given(self, *kinds: str) -> Iterator[Node]:
        return (node for node in self.plan.graph.nodes.values() if node.kind in kinds)

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        nodes, binding = list(self._given(INPUT)), self.plan.graph.binding
        found = list(args) if binding is None else binding.tensors(args, kwargs)
        if len(found) != len(nodes):
            raise ValueError(f"{len(found)} tensors were given; traced were {', '.join(node.source for node in nodes)}")
        for node, tensor in zip(nodes, found, strict=True):
            self._check_input(node, tensor)
        return {node.name: tensor for node, tensor in zip(nodes, found, strict=True)}

    def _check_input(self, node: Node, tensor: torch.Tensor) -> None:
        shape = node.outputs[0].shape
        if self.local_inputs:
            shape = local_shape(shape, self.plan.layouts[Value(node.name)], self.plan.mesh.shape, self.coordinate)
        if tuple(tensor.shape) != shape or tensor.dtype != node.outputs[0].dtype:
            raise ValueError(
                f"{node.source} is {list(tensor.shape)} of {tensor.dtype}; the plan is for {list(shape)} of "
                f"{node.outputs[0].dtype}"
            )
        if tensor.requires_grad and torch.is_grad_enabled() and Value(node.name) not in self.plan.differentiable:
            raise ValueError(f"{node.source} wants a gradient, and was traced without: trace with inputs that want one")

    def update_buffers(self, values: Mapping[Value, torch.Tensor]) -> None:
        """Take what the forward computed for buffers, running statistics."""
        for name, value in self.plan.graph.updates.items():
            shape, source = self.plan.graph.meta(value).shape, self.schedule.layouts[value]
            with torch.no_grad():
                new = convert(values[value], shape, self.plan.mesh, source, self.held[name].layout, self.plan.costs)
            # A tensor of its own: the old one may be kept for backward.
            path, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(path), leaf, new.clone())
