"""One forward of a rank's part of a planned model: node by node, with explicit collectives between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, CONSTANT, INPUT, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout
from ascend_parallel.sharding.rules import run_local
from ascend_parallel.sharding.running.conversion import convert
from ascend_parallel.sharding.tensors.redistribution import Step

if TYPE_CHECKING:
    from ascend_parallel.sharding.running.execute import ShardedModule


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


_Known = dict[tuple[Value, Layout], torch.Tensor]


class Forward:
    """One forward: the tensors that are still to be read."""

    def __init__(self, module: ShardedModule, given: Mapping[str, torch.Tensor]) -> None:
        """Take the rank's part of the model, and the tensors given for its input nodes."""
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
            for value in self._module.last_reads.get(node.name, ()):
                self._values.pop(value, None)
                self._hubs.pop(value, None)
        self._module.update_buffers(self._values)
        return pytree.tree_map(self._returned, self._plan.graph.outputs)

    def _tensor(self, node: Node) -> torch.Tensor:
        """Return the rank's part of a given tensor."""
        if node.kind == INPUT:
            given, value = self._given[node.name], Value(node.name)
            if self._module.local_inputs:
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
            node.call, self._read(node, {}), wants, outputs, self._plan.mesh.shape, self._module.coordinate
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
        return self._convert(
            self._values[leaf], leaf, "", "", self._schedule.layouts[leaf], self._plan.returned_layout(leaf)
        )

    def _convert(
        self, local: torch.Tensor, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> torch.Tensor:
        mesh, ran = self._plan.mesh, self._module.ran

        def count(direction: str, step: Step) -> None:
            ran[Ran(step.kind, mesh.dim_names[step.mesh_dim], module, value, reader, direction)] += 1

        shape = self._plan.graph.meta(value).shape
        return convert(local, shape, mesh, source, target, self._plan.costs, count)
