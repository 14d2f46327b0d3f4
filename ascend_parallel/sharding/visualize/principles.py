"""The four published principles of Sharding Propagation, and the operators of a model that each principle names.

1  operators with weights: their strategies decide which weights a rank's memory holds
2  operators that change dimensions or axes: the intended strategy after them is ambiguous
3  operators before which the strategy changes: the model's front and back use different parallelism
4  fused operators: the layout without redistribution need not be the intended layout

No principle names element-wise operators, also with a bias: strategies pass through them. No principle names operators
on ids and masks, on constants, and operators whose result is a scalar.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ascend_parallel.sharding.graph import CALL, INPUT, PARAMETER, Node, TensorMeta, Value
from ascend_parallel.sharding.layout import Layout, forward, text
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules.pointwise import pointwise
from ascend_parallel.sharding.rules.registry import find

WEIGHTS, AXES, BOUNDARY, FUSED = 1, 2, 3, 4
TITLES = {
    WEIGHTS: "operators with weights",
    AXES: "operators that change dimensions",
    BOUNDARY: "operators before which the strategy changes",
    FUSED: "fused operators",
}
MATMULS = ("matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", "dot", "mv")
REDUCTIONS = ("mean", "sum", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "norm", "logsumexp")
MOVES = (
    "transpose",
    "permute",
    "movedim",
    "swapaxes",
    "t",
    "slice",
    "select",
    "narrow",
    "index_select",
    "split",
    "chunk",
)
# Parts of the names of fused kernels.
FUSED_PARTS = ("attention", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")

Reasons = dict[int, str]
"""The reasons why an operator is named, by principle."""


def principles(plan: ShardingPlan) -> dict[str, Reasons]:
    """Return the operators that a principle names, by name in the order of the graph.

    plan
        The automatic plan of the whole model. Principle 3 looks for strategy changes in this plan.
    """
    return _Finder(plan).find()


@dataclass
class _Finder:
    plan: ShardingPlan

    @cached_property
    def _readers(self) -> dict[Value, list[tuple[str, int]]]:
        return self.plan.graph.readers()

    def find(self) -> dict[str, Reasons]:
        carries: set[Value] = set()
        found: dict[str, Reasons] = {}
        for node in self.plan.graph.nodes.values():
            if not self._is_activation(node, carries):
                continue
            carries |= {value for value in node.values if self._is_float(value)}
            reasons = dict(self._reasons(node)) if node.kind == CALL else {}
            if reasons:
                found[node.name] = reasons
        for name, why in self._changes():
            for near in self._next_of(name, found):
                found[near].setdefault(BOUNDARY, why)
        return found

    def _is_activation(self, node: Node, carries: set[Value]) -> bool:
        """Tell whether a node has floating-point outputs that depend on weights or on the model's inputs."""
        depends = node.kind in (INPUT, PARAMETER) or any(value in carries for value in node.inputs)
        return depends and any(self._is_float(value) for value in node.values)

    def _is_float(self, value: Value) -> bool:
        return self.plan.graph.meta(value).dtype.is_floating_point

    def _reasons(self, node: Node) -> Iterator[tuple[int, str]]:
        """Yield the reasons of principles 1, 2 and 4 for an operator."""
        name = operator_name(node)
        weights = list(self._weights(node))
        if any(part in name for part in FUSED_PARTS):
            yield FUSED, "is fused: the layout without redistribution need not be the intended layout"
        elif weights and not _is_pointwise(node) and not self._is_of_weights(node):
            shapes = " and ".join(str(list(meta.shape)) for meta in weights)
            yield WEIGHTS, f"has the weight {shapes}: its strategy decides which part a rank holds"
        elif name in (*MATMULS, *REDUCTIONS, *MOVES) and node.outputs[0].shape and not self._is_of_matmul(node):
            yield AXES, f"{_change(node)}: the intended strategy after it is ambiguous"

    def _weights(self, node: Node) -> Iterator[TensorMeta]:
        """Yield an operator's weights, also weights that are transposed or cast before the operator."""
        for value in node.inputs:
            if self._origin(value).kind == PARAMETER:
                yield self.plan.graph.meta(value)

    def _origin(self, value: Value) -> Node:
        node = self.plan.graph.nodes[value.node]
        while node.kind == CALL and self._is_of_weights(node):
            node = self.plan.graph.nodes[node.inputs[0].node]
        return node

    def _is_of_weights(self, node: Node) -> bool:
        """Tell whether an operator only transposes a tensor or changes it element by element; it may be a weight."""
        return len(node.inputs) == 1 and (_swaps_last(node) or _is_pointwise(node))

    def _is_of_matmul(self, node: Node) -> bool:
        """Tell whether a transpose belongs to a matmul, as MindSpore's transpose_b."""
        readers = [self.plan.graph.nodes[name] for value in node.values for name, _ in self._readers[value]]
        return _swaps_last(node) and bool(readers) and all(operator_name(reader) in MATMULS for reader in readers)

    def _changes(self) -> Iterator[tuple[str, str]]:
        """Yield the operators before which a collective changes how an activation is sharded, and the reason."""
        for conversion in self.plan.conversions:
            changed = _changed_dims(conversion.source, conversion.target)
            is_parameter = self.plan.graph.nodes[conversion.value.node].kind == PARAMETER
            if is_parameter or not conversion.ahead.nbytes or not changed:
                continue
            names = self.plan.mesh.dim_names
            before, after = (
                text(forward(tuple(layout[dim] for dim in changed)))
                for layout in (conversion.source, conversion.target)
            )
            where = ", ".join(names[dim] for dim in changed)
            for name in filter(None, conversion.reader.split(", ")):
                yield name, f"before it the strategy along {where} changes from {before} to {after}"

    def _next_of(self, name: str, found: dict[str, Reasons]) -> set[str]:
        """Return the operator if another principle names it, else the first named operators after it on each path."""
        seen, named, waiting = set(), set(), [name]
        while waiting:
            node = waiting.pop()
            if node in found:
                named.add(node)
            elif node not in seen:
                seen.add(node)
                values = self.plan.graph.nodes[node].values
                waiting += [reader for value in values for reader, _ in self._readers[value]]
        return named


def _changed_dims(source: Layout, target: Layout) -> list[int]:
    """Return the mesh dimensions on which a shard placement changes."""
    pairs = enumerate(zip(source, target, strict=True))
    return [dim for dim, (before, after) in pairs if before.kind == "shard" and before != after]


def _change(node: Node) -> str:
    assert node.call is not None
    before = " and ".join(str(list(meta.shape)) for meta in node.call.inputs)
    return f"makes {' and '.join(str(list(meta.shape)) for meta in node.outputs)} of {before}"


def _is_pointwise(node: Node) -> bool:
    """Tell whether an operator is element-wise: its rule is from the module of pointwise rules."""
    entry = find(node.call) if node.call is not None else None
    return entry is not None and entry.rule.__module__ == pointwise.__module__


def _swaps_last(node: Node) -> bool:
    """Tell whether an operator swaps the last two dimensions."""
    name, dims = operator_name(node), len(node.outputs[0].shape)
    if name == "t":
        return dims == 2
    if name not in ("transpose", "swapaxes") or node.call is None:
        return False
    return {dim % dims for dim in node.call.args[1:3]} == {dims - 2, dims - 1}
