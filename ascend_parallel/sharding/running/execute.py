"""A rank's part of a planned model: its slices of the parameters, its part of each operator, explicit collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import ascend_parallel
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, CALL, CONSTANT, INPUT, PARAMETER, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, local_shape
from ascend_parallel.sharding.planner.plan import ShardingPlan
from ascend_parallel.sharding.rules import run_local
from ascend_parallel.sharding.running.agreed import confirm_alike
from ascend_parallel.sharding.running.conversion import convert
from ascend_parallel.sharding.running.fuse import Fusion, Schedule, fuse
from ascend_parallel.sharding.running.holding import check_model, hold, local_slice
from ascend_parallel.sharding.tensors.redistribution import Step

# Operators that work otherwise in training.
OF_MODES = ("dropout", "batch_norm", "instance_norm", "rrelu")


@dataclass(frozen=True)
class Ran:
    """A collective of a kind, such as "all_reduce", along a mesh dimension, outside of overlapped operators.

    module
        Path of the module that reads the tensor; of the one that makes it, if it is converted for several readers.
    value, reader
        The tensor, and the node that reads it: "" for the user, "via" for several.
    direction
        "forward" or "backward".
    """

    kind: str
    mesh_dim: str
    module: str
    value: Value
    reader: str
    direction: str


def parallelize(
    model: torch.nn.Module,
    plan: ShardingPlan,
    *,
    overlap: bool = True,
    settings: Settings | None = None,
    local_inputs: bool = False,
) -> ShardedModule:
    """Return this rank's part of `model` as `plan` lays it out. Every rank of the default group calls it alike.

    model
        The one that was traced, with the same values on every rank; it is not changed.
    overlap
        Run matmuls next to a collective by the overlapped operators where that can be (`ShardedModule.fused`).
    settings
        Of these operators; by default those in force (`ascend_parallel.configure`).
    local_inputs
        Every rank gives its part of the inputs, laid out as the plan says, and not the whole of them.

    Raises `DisagreementError` on every rank if plans or settings differ or a rank does not come; `ValueError` for a
    rank that is not in the plan's mesh, and a model that is not the plan's.
    """
    return ShardedModule(model, plan, overlap=overlap, settings=settings, local_inputs=local_inputs)


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
        self._coordinate, self._local_inputs = place, local_inputs
        self.schedule = Schedule(plan.layouts, plan.inputs, plan.via)
        if overlap:
            self.schedule = fuse(plan, settings or ascend_parallel.status().settings)
        returned = plan.graph.kept
        # Of a tied tensor's names torch.export has one read, and lists the others beside it.
        read = {value.node for value, readers in plan.graph.readers().items() if readers or value in returned}
        given = [node for node in self._given(PARAMETER, BUFFER) if node.name in read]
        check_model(model, given)
        layouts = {node.source: plan.layouts[Value(node.name)] for node in given}
        self._held = hold(self, model, layouts, plan.mesh.shape, place)
        for node in self._given(CONSTANT):
            layout = plan.layouts[Value(node.name)]
            local = local_slice(plan.graph.constants[node.source], layout, plan.mesh.shape, place)
            self.register_buffer(node.name, local, persistent=False)
        self._last = plan.graph.last_reads()

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
        return _Run(self, self._inputs(args, kwargs)).outputs()

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
        shape, place = self.plan.mesh.shape, self._coordinate
        self.load_state_dict(
            {name: local_slice(whole, self._held[name].layout, shape, place) for name, whole in state.items()}
        )

    def _whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        held, mesh = self._held[name], self.plan.mesh
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
        if self._local_inputs:
            shape = local_shape(shape, self.plan.layouts[Value(node.name)], self.plan.mesh.shape, self._coordinate)
        if tuple(tensor.shape) != shape or tensor.dtype != node.outputs[0].dtype:
            raise ValueError(
                f"{node.source} is {list(tensor.shape)} of {tensor.dtype}; the plan is for {list(shape)} of "
                f"{node.outputs[0].dtype}"
            )
        if tensor.requires_grad and torch.is_grad_enabled() and Value(node.name) not in self.plan.differentiable:
            raise ValueError(f"{node.source} wants a gradient, and was traced without: trace with inputs that want one")

    def _update_buffers(self, values: Mapping[Value, torch.Tensor]) -> None:
        """Take what the forward computed for buffers, running statistics."""
        for name, value in self.plan.graph.updates.items():
            shape, source = self.plan.graph.meta(value).shape, self.schedule.layouts[value]
            with torch.no_grad():
                new = convert(values[value], shape, self.plan.mesh, source, self._held[name].layout, self.plan.costs)
            # A tensor of its own: the old one may be kept for backward.
            path, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(path), leaf, new.clone())


_Known = dict[tuple[Value, Layout], torch.Tensor]


class _Run:
    """One forward: the tensors that are still to be read."""

    def __init__(self, module: ShardedModule, given: Mapping[str, torch.Tensor]) -> None:
        self._module, self._plan, self._schedule = module, module.plan, module.schedule
        self._given = given
        self._values: dict[Value, torch.Tensor] = {}
        self._hubs: dict[Value, torch.Tensor] = {}

    def outputs(self) -> Any:
        """Run all nodes and return what the model returns."""
        done: set[str] = set()
        for node in self._plan.graph.nodes.values():
            if node.kind != CALL:
                self._values[Value(node.name)] = self._tensor(node)
            elif node.name not in done:
                done |= self._call(node)
            for value in self._module._last.get(node.name, ()):
                self._values.pop(value, None)
                self._hubs.pop(value, None)
        self._module._update_buffers(self._values)
        return pytree.tree_map(self._returned, self._plan.graph.outputs)

    def _tensor(self, node: Node) -> torch.Tensor:
        """Return the rank's part of a given tensor."""
        if node.kind == INPUT:
            given, value = self._given[node.name], Value(node.name)
            if self._module._local_inputs:
                return given
            whole = (REPLICATE,) * self._plan.mesh.ndim
            return self._convert(given, value, node.name, "", whole, self._schedule.layouts[value])
        path, _, name = ("", "", node.name) if node.kind == CONSTANT else node.source.rpartition(".")
        tensor: torch.Tensor = getattr(self._module.get_submodule(path), name)
        return tensor

    def _call(self, node: Node) -> set[str]:
        """Run a node, and those that its kernel runs with it; return their names."""
        kernel = self._schedule.kernels.get(node.name)
        if kernel is None:
            self._keep(node, self._run(node))
            return {node.name}
        nodes = [self._plan.graph.nodes[name] for name in kernel.nodes]
        known: _Known = {}  # nodes that run together convert what they all read once
        for one, output in zip(nodes, kernel.run([self._read(one, known) for one in nodes]), strict=True):
            self._keep(one, (output,))
        return set(kernel.nodes)

    def _run(self, node: Node) -> tuple[torch.Tensor, ...]:
        assert node.call is not None
        outputs = [self._schedule.layouts[Value(node.name, index)] for index in range(len(node.outputs))]
        wants = self._schedule.inputs[node.name]
        return run_local(
            node.call, self._read(node, {}), wants, outputs, self._plan.mesh.shape, self._module._coordinate
        )

    def _keep(self, node: Node, outputs: tuple[torch.Tensor, ...]) -> None:
        assert len(outputs) == len(node.outputs), f"{node.name} gave {len(outputs)} of {len(node.outputs)} outputs"
        self._values |= {Value(node.name, index): output for index, output in enumerate(outputs)}

    def _read(self, node: Node, known: _Known) -> list[torch.Tensor]:
        """Return a node's inputs in the layouts in which it reads them; `known` are some that are there."""
        found = []
        for value, target in zip(node.inputs, self._schedule.inputs[node.name], strict=True):
            if (value, target) not in known:
                local, at = self._hub(value)
                known[value, target] = self._convert(local, value, node.name, node.module, at, target)
            found.append(known[value, target])
        return found

    def _hub(self, value: Value) -> tuple[torch.Tensor, Layout]:
        """Return a tensor in the layout in which its readers find it."""
        at = self._schedule.layouts[value]
        if value not in self._schedule.via:
            return self._values[value], at
        via = self._schedule.via[value]
        if value not in self._hubs:
            module = self._plan.graph.nodes[value.node].module
            self._hubs[value] = self._convert(self._values[value], value, "via", module, at, via)
        return self._hubs[value], via

    def _returned(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        return self._convert(self._values[leaf], leaf, "", "", self._schedule.layouts[leaf], self._plan.outputs)

    def _convert(
        self, local: torch.Tensor, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> torch.Tensor:
        mesh, ran = self._plan.mesh, self._module.ran

        def count(direction: str, step: Step) -> None:
            ran[Ran(step.kind, mesh.dim_names[step.mesh_dim], module, value, reader, direction)] += 1

        shape = self._plan.graph.meta(value).shape
        return convert(local, shape, mesh, source, target, self._plan.costs, count)
